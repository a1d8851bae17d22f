"""Training with a store without local paths for data, checkpoints and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remote_store
import torch
from pyarrow import parquet
from reference import OPTIMIZERS, assert_same_weights, global_batches, train_alone, write_rows

from hvd_estimators.store import Store

pytestmark = pytest.mark.integration

RUN = {"batch_size": 16, "epochs": 2, "run_id": "far"}


@pytest.fixture
def columns(tmp_path: Path) -> dict[str, np.ndarray]:
    write_rows(tmp_path / "intermediate_val_data", 21, seed=1)
    return write_rows(tmp_path / "intermediate_train_data", 64)


def check(found: torch.nn.Module, columns: dict[str, np.ndarray]) -> None:
    expected = train_alone(columns, global_batches(64, 2, 16), OPTIMIZERS["sgd"], 2)
    assert_same_weights(found, expected)


def test_rows_in_several_folders_of_another_filesystem(
    backend: Any, tmp_path: Path, columns: Any
) -> None:
    from reference import fit

    remote_store.register_open_store()
    folder = tmp_path / "intermediate_train_data"
    (tmp_path / "second").mkdir()
    (folder / "part-001.parquet").rename(tmp_path / "second" / "rows.parquet")
    urls = [f"open://{folder}", f"open://{tmp_path}/second/rows.parquet"]
    held_out = f"open://{tmp_path}/intermediate_val_data"

    store = Store.create(str(tmp_path / "runs"))
    params = {"backend": backend, "path": urls, "validation_path": held_out}
    model, _ = fit(store, 2, "sgd", **params, **RUN)

    check(model.getModel(), columns)
    rows = parquet.read_table(tmp_path / "intermediate_val_data").to_pydict()
    outputs = model.getModel()(torch.tensor(rows["features"])).reshape(-1)
    loss = torch.nn.functional.mse_loss(outputs, torch.tensor(rows["label"]))
    assert model.getHistory()[-1]["validation"]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert store.get_checkpoints("far")
    assert not (tmp_path / "runs" / "intermediate_train_data").exists()
