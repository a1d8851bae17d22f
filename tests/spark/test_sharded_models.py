"""A model whose ranks hold parts of it stays in files: from fit to prediction without Spark."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import SparkSession
from pytorch_lightning import LightningModule
from safetensors.torch import load_file
from torch.nn import functional

from hvd_estimators import load_checkpoint
from hvd_estimators.exceptions import StoreError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.lightning import LightningEstimator, LightningModel
from hvd_estimators.lightning import load_predictor as of_lightning
from hvd_estimators.store import LocalStore, Store
from hvd_estimators.torch import TorchEstimator, TorchModel, load_predictor

pytestmark = pytest.mark.spark


class Net(torch.nn.Module):
    """Two layers in a list, batch normalization, and a last layer that shares weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        self.last.weight = self.layers[0].weight
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self.norm(x)).sum(dim=1)


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> Any:
    drawn = np.random.default_rng(2).normal(size=(40, 4)).astype("float32")
    rows = [{"features": row.tolist(), "label": float(row.sum())} for row in drawn]
    return spark.createDataFrame(pd.DataFrame(rows)).cache()


@pytest.fixture(scope="module")
def fitted(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LocalStore]:
    store = LocalStore(str(tmp_path_factory.mktemp("sharded")))
    return fit(frame, store), store


def fit(frame: Any, store: Any) -> Any:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    net = Net()
    return TorchEstimator(
        **{"backend": LocalBackend(2), "store": store, "model": net, "run_id": "mine"},
        optimizer=torch.optim.Adam(net.parameters(), 0.01),
        loss=functional.mse_loss,
        **{"feature_cols": ["features"], "label_cols": ["label"], "sharding": "full"},
        **{"batch_size": 5, "epochs": 2, "verbose": 0, "random_seed": 3, "shuffle": False},
    ).fit(frame)


def predictions(model: Any, frame: Any) -> np.ndarray:
    return np.array([row[0] for row in model.transform(frame).select("label__output").collect()])


def test_a_model_stays_in_files_until_it_is_asked_for(
    fitted: tuple[Any, LocalStore], frame: Any, tmp_path: Path
) -> None:
    model, store = fitted
    (folder,) = Path(store.get_run_path("mine")).glob("model-*")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(index.values())}
    assert len(files) == 2
    weights = {name: files[file][name] for name, file in index.items()}

    found = predictions(model, frame)
    evaluated = model.evaluate(frame).metrics
    path = str(tmp_path / "model")
    model.save(path)
    loaded = TorchModel.load(path)
    # Neither of these read the weights on the driver.
    for each in (model, loaded):
        assert all(p.is_meta for p in each.getOrDefault("model").parameters())

    net = Net().eval()
    net.load_state_dict(weights, strict=False)
    assert {*Net().state_dict()} - {*weights} == {"last.weight"}
    features = np.array([row[0] for row in frame.select("features").collect()], "float32")
    labels = np.array([row[0] for row in frame.select("label").collect()])
    with torch.no_grad():
        expected = net(torch.from_numpy(features)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(predictions(loaded, frame), found, rtol=0)
    assert evaluated["loss"] == pytest.approx(np.mean((expected - labels) ** 2), rel=1e-5)
    predictor = load_predictor(path)
    np.testing.assert_allclose(
        predictor.predict({"features": features})["label__output"], found, rtol=0
    )

    module = loaded.getModel()
    assert module.seen == 2 * 4  # steps
    torch.testing.assert_close(module.state_dict(), net.state_dict(), rtol=0, atol=0)
    assert module.last.weight is module.layers[0].weight
    np.testing.assert_allclose(predictions(loaded, frame), found, rtol=0)
    again = str(tmp_path / "again")
    loaded.save(again)
    torch.testing.assert_close(
        TorchModel.load(again).getModel().state_dict(), net.state_dict(), rtol=0, atol=0
    )


def test_a_saved_model_does_not_need_the_run(
    fitted: tuple[Any, LocalStore], frame: Any, tmp_path: Path
) -> None:
    model, store = fitted
    found = predictions(model, frame)
    path = str(tmp_path / "model")
    model.save(path)
    model.write().overwrite().save(path)  # replaces all files
    assert len(list(Path(path).glob("params*/*.safetensors"))) == 2
    store.delete_run("mine")
    np.testing.assert_allclose(predictions(TorchModel.load(path), frame), found, rtol=0)
    with pytest.raises(StoreError, match="save it before you delete the run"):
        model.getModel()


def test_a_model_stays_in_files_of_hdfs(
    hdfs: Any, fitted: tuple[Any, LocalStore], frame: Any
) -> None:
    store = Store.create(f"{hdfs.url}/sharded")
    model = fit(frame, store)
    path = f"{hdfs.url}/saved-sharded"
    model.save(path)
    loaded = TorchModel.load(path)
    store.delete_run("mine")
    found = predictions(loaded, frame)
    assert all(p.is_meta for p in loaded.getOrDefault("model").parameters())
    torch.testing.assert_close(
        loaded.getModel().state_dict(), fit(frame, fitted[1]).getModel().state_dict()
    )
    np.testing.assert_allclose(predictions(loaded, frame), found, rtol=0)


def test_a_lightning_module_stays_in_files_until_it_is_asked_for(
    frame: Any, tmp_path: Path
) -> None:
    class Module(LightningModule):
        """Makes its layers on the ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.net(x)
            return found

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return functional.mse_loss(self(batch["features"]), batch["label"])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    store = LocalStore(str(tmp_path / "store"))
    model = LightningEstimator(
        **{"backend": LocalBackend(2), "store": store, "model": Module(), "run_id": "mine"},
        **{"feature_cols": ["features"], "label_cols": ["label"], "sharding": "full"},
        **{"batch_size": 5, "epochs": 2, "verbose": 0, "random_seed": 3, "shuffle": False},
        column_dtypes={"features": "float32", "label": "float32"},
    ).fit(frame)
    checkpoints = Path(store.get_checkpoint_path("mine"))
    assert len([*checkpoints.glob("*/*-of-00002.safetensors")]) == 2 * 2  # epochs, ranks
    content = load_checkpoint(store, "mine", safe=False).content
    found = predictions(model, frame)
    model.save(str(tmp_path / "model"))
    loaded = LightningModel.load(str(tmp_path / "model"))
    for each in (model, loaded):
        assert all(p.is_meta for p in each.getOrDefault("model").parameters())
    np.testing.assert_allclose(predictions(loaded, frame), found, rtol=0)
    module = loaded.getModel()
    torch.testing.assert_close(module.state_dict(), content["state_dict"], rtol=0, atol=0)
    features = np.array([row[0] for row in frame.select("features").collect()], "float32")
    with torch.no_grad():
        np.testing.assert_allclose(module(torch.from_numpy(features)), found, rtol=1e-6)
    served = of_lightning(str(tmp_path / "model")).predict({"features": features})
    np.testing.assert_allclose(served["label__output"], found, rtol=0)
    assert (module.net.last.weight - Net().last.weight).abs().max() > 1e-3
