"""TorchEstimator on Spark: fits, predictions and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import line_estimator, plane_rows
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from hvd_estimators import clear_training_cache, list_prepared_data, prepare_data
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark


class TwoColumns(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.stack([a, b], dim=1))


def make_estimator(store: Any, net: torch.nn.Module, **params: Any) -> Any:
    given = {"num_proc": 2, "feature_cols": ["features"], "input_shapes": None, "batch_size": 16}
    return line_estimator(store, lr=0.1, model=net, **{**given, **params})


def linear_net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def test_a_pipeline_fits_predicts_saves_and_loads(spark: Any, store: Any, tmp_path: Path) -> None:
    frame = plane_rows(spark)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = make_estimator(
        store, linear_net(), epochs=40, validation="held_out", metrics=[torch.nn.functional.l1_loss]
    )
    pipeline = Pipeline(stages=[assembler, estimator])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(frame)

    model = fitted.stages[-1]
    assert isinstance(model, TorchModel)
    # The label is linear in the features, so the fit converges to its coefficients.
    weight = model.getModel().weight.detach().numpy().reshape(-1)
    np.testing.assert_allclose(weight, [2, -3], atol=0.05)
    history = model.getHistory()
    assert [record["epoch"] for record in history] == list(range(40))
    assert history[-1]["validation"]["loss"] < 1e-3 < history[0]["validation"]["loss"]
    assert set(history[0]["train"]["all_metrics"][0]) == {"l1_loss"}

    predicted = fitted.transform(frame)
    assert dict(predicted.dtypes)["y__output"] == "double"
    rows = predicted.select("a", "b", "y__output").collect()
    expected = [2 * row["a"] - 3 * row["b"] + 1 for row in rows]
    np.testing.assert_allclose([row["y__output"] for row in rows], expected, atol=0.05)

    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert again.transform(frame).select("y__output").collect() == [
        row[2:] for row in predicted.select("a", "b", "y__output").collect()
    ]
    # The weights are a plain torch file, usable without this package.
    (weights,) = (tmp_path / "fitted").glob("stages/1_*/weights.pt")
    state = torch.load(weights, weights_only=True)
    assert torch.equal(state["weight"], model.getModel().weight)
    assert again.stages[-1].getOptimizer().param_groups[0]["lr"] == 0.1
    # Prepared data is deleted; checkpoint and logs are kept.
    clear_training_cache()
    kept = sorted(path.name for path in Path(store.prefix_path).iterdir())
    assert kept == ["runs"]
    run = Path(store.get_run_path(model.getRunId()))
    assert list((run / "checkpoints").glob("checkpoint-*.ckpt"))
    assert list((run / "logs").glob("events.out.tfevents.*"))


def fail_to_list(store: Any, dataset_idx: str) -> int:
    raise StoreError("the store cannot list")


def test_prepared_data_is_usable_until_it_is_cleared(
    spark: Any, store: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = plane_rows(spark, 100)
    net = TwoColumns()
    estimator = make_estimator(
        store, net, feature_cols=["a", "b"], num_proc=1, validation=0.3, epochs=1, verbose=1
    )
    with prepare_data(1, store, frame, ["y"], ["a", "b"], validation=0.3) as dataset_idx:
        assert store.exists(store.get_train_data_path(dataset_idx))
        (dataset,) = list_prepared_data(store)
        model = estimator.fit_on_parquet(dataset_idx=dataset_idx)
        of_fit = capsys.readouterr().err.splitlines()[0]
        with monkeypatch.context() as patch:
            patch.setattr("hvd_estimators.fitting.fit.dataset_bytes", fail_to_list)
            estimator.fit_on_parquet(dataset_idx=dataset_idx)
        without_size = capsys.readouterr().err.splitlines()[0]
    assert "validation" in model.getHistory()[0]
    rows = f"{dataset.rows} training and {dataset.validation_rows} validation rows"
    size = f"{dataset.num_bytes / 1000:.1f} kB"
    assert of_fit == f"Reusing prepared data {dataset_idx}: {rows}, {size}."
    assert without_size == f"Reusing prepared data {dataset_idx}: {rows}."
    clear_training_cache()
    assert not store.exists(store.get_train_data_path(dataset_idx))
    with pytest.raises(StoreError, match="no prepared dataset"):
        estimator.fit_on_parquet(dataset_idx=dataset_idx)


def test_transform_is_lazy_and_accepts_an_empty_frame(spark: Any) -> None:
    net = linear_net()
    model = TorchModel(
        model=net, feature_columns=["v"], label_columns=["y"], input_shapes=[[-1, 2]]
    )
    frame = spark.createDataFrame([(Vectors.dense([1.0, 2.0]),)], ["v"]).where("1 = 0")
    assert model.transform(frame).collect() == []
    failing = frame.select(F.assert_true(F.lit(False)), "v")
    assert "y__output" in model.transform(failing).columns


def test_torchscript_models_predict(spark: Any, store: Any) -> None:
    frame = plane_rows(spark, 64)
    net = torch.jit.script(TwoColumns())
    with pytest.raises(ParamError, match="Train the module that it was made of"):
        make_estimator(store, net, feature_cols=["a", "b"], num_proc=1).fit(frame)
    model = TorchModel(
        model=net, feature_columns=["a", "b"], label_columns=["y"], input_shapes=[[-1], [-1]]
    )
    predicted = model.transform(frame).collect()
    found = [row["y__output"] for row in predicted]
    a, b = (torch.tensor([float(row[name]) for row in predicted]) for name in ("a", "b"))
    np.testing.assert_allclose(np.ravel(found), net(a, b).detach().ravel(), rtol=1e-5)
