"""LightningEstimator with custom data modules, and its params."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remote_store
import torch
from backends import InProcessBackend
from lightning_reference import fit
from pytorch_lightning import LightningDataModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import MLFlowLogger
from reference import (
    OPTIMIZERS,
    assert_same_weights,
    global_batches,
    make_net,
    train_alone,
    write_rows,
)

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store import Store

pytestmark = pytest.mark.integration


@pytest.mark.usefixtures("compat")
def test_horovods_estimator_trains_a_plain_module(backend: Any, store: Any) -> None:
    from horovod.spark.lightning import TorchEstimator

    columns = write_rows(Path(store.get_train_data_path()), 65)
    net = make_net()
    params: dict[str, Any] = {
        "model": net,
        "optimizer": OPTIMIZERS["adam"](net.parameters()),
        "loss": torch.nn.functional.mse_loss,
        "num_gpus": 1,
        "batch_size": 16,
        "epochs": 2,
    }
    model = fit(backend, store, TorchEstimator, **params)
    expected = train_alone(columns, global_batches(65, 2, 16), OPTIMIZERS["adam"], epochs=2)
    assert_same_weights(model.getModel(), expected)
    with pytest.raises(ParamError, match=r"callbacks: the model is a plain .* Leave callbacks out"):
        fit(backend, store, TorchEstimator, **params, callbacks=[ModelCheckpoint()])


class UsersDataSteps:
    """Custom reader of the Parquet files that uses the documented arguments."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        assert set(kwargs) == {
            *("train_dir", "val_dir", "num_train_epochs", "has_val", "train_batch_size"),
            *("val_batch_size", "shuffle", "transformation", "inmemory_cache_all", "cur_shard"),
            *("shard_count", "schema_fields", "storage_options", "steps_per_epoch_train"),
            *("steps_per_epoch_val", "verbose", "reader_pool_type", "reader_worker_count", "seed"),
            *("num_reader_epochs", "transformation_edit_fields", "transformation_removed_fields"),
            *("debug_data_loader", "train_async_data_loader_queue_size"),
            "val_async_data_loader_queue_size",
        }
        assert kwargs["train_dir"].startswith("file:///")
        assert kwargs["val_dir"] is None
        self.kwargs = kwargs

    def train_dataloader(self) -> Any:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(self.kwargs["train_dir"]).to_pydict()
        own = slice(self.kwargs["cur_shard"], None, self.kwargs["shard_count"])
        x, y = torch.tensor(table["features"])[own], torch.tensor(table["label"])[own]
        size = self.kwargs["train_batch_size"]
        batches = [
            {"features": x[i : i + size], "label": y[i : i + size]} for i in range(0, len(x), size)
        ]
        return torch.utils.data.DataLoader(batches, batch_size=None)


class UsersData(UsersDataSteps, LightningDataModule):
    """Data module of the package pytorch_lightning."""


def test_a_custom_data_module_receives_the_documented_arguments(backend: Any, store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    model = fit(backend, store, data_module=UsersData, batch_size=16, epochs=2, loader_num_epochs=1)
    batches = [np.arange(32), np.arange(32, 64)]
    expected = train_alone(columns, batches, OPTIMIZERS["adam"], epochs=2)
    assert_same_weights(model.getModel().net, expected)


def test_gradients_are_compressed_and_the_fit_is_profiled(backend: Any, store: Any) -> None:
    import horovod.torch as hvd

    columns = write_rows(Path(store.get_train_data_path()), 64)
    model = fit(
        backend,
        store,
        batch_size=16,
        gradient_compression=hvd.Compression.fp16,
        profiler="simple",
        run_id="profiled",
        inmemory_cache_all=True,
        trainer_args={"gradient_clip_val": 1e6},
    )
    expected = train_alone(columns, global_batches(64, 2, 16), OPTIMIZERS["adam"], epochs=1)
    for found, wanted in zip(model.getModel().net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
    assert list(Path(store.get_logs_path("profiled"), "profile").iterdir())


class NeverLaunched(InProcessBackend):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the ranks were launched")


def test_a_link_to_the_last_checkpoint_in_a_remote_store_is_an_error(tmp_path: Path) -> None:
    remote_store.register_open_store()
    store = Store.create(f"open://{tmp_path}")
    write_rows(tmp_path / "intermediate_train_data", 64)
    with pytest.raises(ParamError, match=r"callbacks: .*save_last='link'.* Set save_last=True"):
        fit(NeverLaunched(), store, callbacks=[ModelCheckpoint(save_last="link")])


def test_mlflow_logs_to_the_logs_of_the_run(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write_rows(Path(store.get_train_data_path()), 64)
    write_rows(Path(store.get_val_data_path()), 21, seed=1)
    logger = MLFlowLogger("trial", save_dir=str(tmp_path / "elsewhere"))
    params = {"validation": 0.5, "batch_size": 16, "epochs": 3, "run_id": "tracked"}
    model = fit(InProcessBackend(), store, logger=logger, **params)
    # MLflow's format: a file for each metric, and a line for each value: time, value, step.
    (file,) = Path(store.get_logs_path("tracked"), "mlruns").glob("*/*/metrics/val_loss")
    values = [float(line.split()[1]) for line in file.read_text().splitlines()]
    assert values == pytest.approx([e["validation"]["val_loss"] for e in model.getHistory()])
    assert not list(tmp_path.glob("elsewhere/**/metrics"))
