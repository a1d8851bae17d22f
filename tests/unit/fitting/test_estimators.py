"""Params of the torch estimator and model that need no Spark session."""

import inspect
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest, RowGroup, Split
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.fitting.planning import plan_data
from hvd_estimators.fitting.run import ReadOrder
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.prepare.datasets import manifest_path
from hvd_estimators.store import Store
from hvd_estimators.torch import TorchEstimator, TorchModel


@pytest.fixture
def params(tmp_path):
    """Return valid params of an estimator."""
    module = torch.nn.Linear(2, 1)
    return {
        "store": Store.create(str(tmp_path)),
        "model": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["features"],
        "label_cols": ["label"],
    }


def check(params):
    """Create an estimator and check its params, as `fit` does first."""
    estimator = TorchEstimator(**params)
    Fit(estimator).check()
    return estimator


def test_optimizers_that_need_a_closure_are_rejected(params):
    optimizer = torch.optim.LBFGS(params["model"].parameters())
    message = r"optimizer: LBFGS\.step\(\) needs closure.* train_minibatch_fn that calls"
    with pytest.raises(ParamError, match=message):
        check({**params, "optimizer": optimizer})
    check({**params, "optimizer": optimizer, "train_minibatch_fn": print})


class EndsWithMore:
    def on_train_end(self, epoch):
        pass


class BeginsWithOthers:
    def on_train_begin(self, model, optimizer):
        pass


class Attribute:
    on_epoch_end = None
    on_epoch_begin = 5


class Any:
    def on_train_begin(self, **given):
        pass

    def on_epoch_begin(self, epoch, more=1):
        pass


def test_callbacks_with_wrong_signatures_are_rejected(params):
    import keras
    from pytorch_lightning.callbacks import EarlyStopping

    check({**params, "callbacks": [Any()]})
    for callback, message in (
        (
            EndsWithMore(),
            r"EndsWithMore.on_train_end\(epoch\) of .* cannot be called as on_train_end\(\)",
        ),
        (BeginsWithOthers(), r"as on_train_begin\(module, optimizer\) .* 'model'"),
        (Attribute(), r"expected on_epoch_begin\(epoch\) of Attribute to be a method"),
        (EarlyStopping("loss"), r"EarlyStopping.on_train_end\(.* of pytorch_lightning.* cannot"),
        (keras.callbacks.EarlyStopping(), r"EarlyStopping.on_train_begin\(.* of keras.* cannot"),
    ):
        with pytest.raises(ParamError, match=f"callbacks: .*{message}"):
            check({**params, "callbacks": [callback]})


@pytest.mark.parametrize("validation", [0.2, "held_out"])
def test_validation_needs_a_validation_part(params, validation):
    store = params["store"]
    split = Split(store.get_train_data_path("abc"), (RowGroup("a.parquet", 0, 5),))
    manifest = DatasetManifest((ColumnSpec("features", "vector", "float32", (2,)),), split)
    store.write_text(manifest_path(store, "abc"), manifest.to_json())
    estimator = TorchEstimator(**params, backend=LocalBackend(1), validation=validation)

    with pytest.raises(ParamError, match=rf"validation: found {validation!r}, .* no validation"):
        estimator.fit_on_parquet(dataset_idx="abc")


def test_the_plan_for_all_ranks_has_the_drivers_reader(params, monkeypatch):
    """Ranks that can import Petastorm use Arrow, too, if the driver cannot."""
    columns = ColumnSpec("features", "array", "float32", (2,)), ColumnSpec("label", "scalar", "f4")
    manifest = DatasetManifest(columns, Split("data", (RowGroup("data/a.parquet", 0, 8),)))
    monkeypatch.setitem(sys.modules, "hvd_estimators.loading.petastorm", None)
    for given, expected in ((None, "arrow"), ("petastorm", "petastorm")):
        estimator = TorchEstimator(**params, data_module=given)
        settings = Fit(estimator).settings
        assert plan_data(settings, manifest, ReadOrder(2, 0), 2).data_module == expected


@pytest.mark.parametrize("form", ["rows", "text"])
def test_the_plan_measures_text_that_files_store_once(params, tmp_path, form):
    rows, names = 1000, ["features", "label"]
    folders = [tmp_path / "train", tmp_path / "val"]
    for folder in folders:
        folder.mkdir()
        for length in (1000, 9000):
            table = pa.table({"features": ["x" * length] * rows, "label": np.zeros(rows)})
            parquet.write_table(table, folder / f"{length}.parquet")
    options = {"collate_fn": len}
    allowed = dict.fromkeys(names, "any")
    if form == "text":
        options, allowed = {"transformation_fn": dict}, True
    train, val = map(str, folders)
    manifest = read_manifest(params["store"], train, val, names, allow_text=allowed)
    assert manifest.train.row_groups[0].num_bytes < 20 * rows
    settings = Fit(TorchEstimator(**params, **options)).settings
    data = plan_data(settings, manifest, ReadOrder(2, 0), 2)
    # The mean of both files, and 8 bytes of the label.
    assert data.train_plan.row_bytes == pytest.approx(5008, rel=0.01)
    assert data.val_plan.row_bytes == data.train_plan.row_bytes
    # A resumed run keeps the size that it began with.
    again = plan_data(settings, manifest, ReadOrder(2, 0, 77), 2).train_plan
    assert again.row_bytes == 77


def test_accessors_of_horovod_spark_exist():
    """Their spelling is irregular; code that calls them migrates unchanged."""
    estimator = TorchEstimator()

    estimator.setShufflingBufferSize(2**21).setTrainReaderNumWorker(3).setValReaderNumWorker(4)
    estimator.setInMemoryCacheAll(True)

    assert estimator.getShufflingBufferSize() == 2**21
    assert estimator.getTrainReaderNumWorker() == 3
    assert estimator.getValReaderNumWorker() == 4
    assert estimator.getInMemoryCacheAll() is True
    assert TorchEstimator().getShufflingBufferSize() is None
    assert TorchEstimator().getShuffleBufferSize() is None
    assert TorchEstimator().getDataModule() is None
    assert TorchModel(label_columns=["y"]).getLabelColoumns() == ["y"]


def test_subclasses_keep_the_signature_of_their_constructor():
    class Small(TorchEstimator):
        def __init__(self, width: int) -> None:
            super().__init__(batch_size=width)

    assert list(inspect.signature(Small).parameters) == ["width"]
    assert Small(width=7).getBatchSize() == 7
    assert "epochs" in inspect.signature(TorchEstimator).parameters
