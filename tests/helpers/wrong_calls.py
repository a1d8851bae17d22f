"""Calls that must fail: their errors, their duration, and the unchanged store."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_estimators import Store
from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.launch import Backend

__all__ = ["SECONDS", "Calls", "NoRanks", "Wrong", "cases", "check_wrong", "plain_module"]

SECONDS = 3.0
"""Within which an error has to come."""

Wrong = tuple[Callable[[Any], Any], type[HvdEstimatorsError], str, str]
"""A call, what it raises, what the message names first, and a pattern of what is to be done."""


class NoRanks(Backend):
    """Backend that no wrong call may reach."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks

    def num_processes(self) -> int:
        return self.ranks

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise AssertionError("ranks were to be started")


class Calls:
    """Arguments of wrong calls: a store with a few rows in third-party files, and estimators.

    Columns: ``x`` and ``y`` (numbers), ``w`` (weights), ``v`` (two numbers), ``ragged`` (one or
    two), ``text``, and ``holes`` (a number or null).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store.create(str(folder / "store"))
        rows = 8
        self.table = pa.table(
            {
                **{name: pa.array([0.5] * rows, pa.float32()) for name in "xyw"},
                "v": [[0.0, 1.0]] * rows,
                "ragged": [[0.0], [0.0, 1.0]] * (rows // 2),
                "text": ["a"] * rows,
                "holes": [0.5, None] * (rows // 2),
            }
        )
        self.write(self.store.get_train_data_path(), self.table)

    def write(self, path: str, table: pa.Table) -> None:
        """Write rows as one file."""
        Path(path).mkdir(parents=True)
        pq.write_table(table, f"{path}/part.parquet")

    def torch(self, **changes: Any) -> Any:
        """Return a valid estimator with the given changes."""
        import torch

        from hvd_estimators.torch import TorchEstimator

        net = changes.get("model")
        if not isinstance(net, torch.nn.Module):
            net = torch.nn.Linear(1, 1)
        parameters = list(net.parameters()) or [torch.nn.Parameter(torch.zeros(1))]
        given = {
            "model": net,
            "optimizer": torch.optim.SGD(parameters, lr=0.1),
            "loss": torch.nn.functional.mse_loss,
            "input_shapes": [[1]],
        }
        return TorchEstimator(**self._common(given, changes))

    def keras(self, **changes: Any) -> Any:
        """Return a valid estimator with the given changes."""
        import keras

        from hvd_estimators.keras import KerasEstimator

        given: dict[str, Any] = {"optimizer": "sgd", "loss": "mse"}
        if "model" not in changes:
            given["model"] = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        return KerasEstimator(**self._common(given, changes))

    def lightning(self, **changes: Any) -> Any:
        """Return a valid estimator with the given changes."""
        from hvd_estimators.lightning import LightningEstimator

        if "model" not in changes:
            changes["model"] = plain_module()
        return LightningEstimator(**self._common({}, changes))

    def _common(self, given: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        ranks = {} if {"num_proc", "resource_profile"} & changes.keys() else {"backend": NoRanks()}
        columns = {"feature_cols": ["x"], "label_cols": ["y"]}
        return {"store": self.store, "verbose": 0, **columns, **ranks, **given, **changes}

    def train(self, framework: str, **changes: Any) -> Any:
        """Train on the store's files."""
        return getattr(self, framework)(**changes).fit_on_parquet()


def plain_module() -> Any:
    """Return a LightningModule that maps one number to one."""
    import lightning.pytorch as pl
    import torch

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            return self.layer(x.reshape(-1, 1))

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self(batch["x"]), batch["y"].reshape(-1, 1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Line()


def cases(table: Mapping[str, Wrong]) -> Any:
    """Parametrize a test with the rows of a table."""
    return pytest.mark.parametrize("wrong", list(table.values()), ids=list(table))


def check_wrong(calls: Any, wrong: Wrong) -> None:
    """Check that a call fails as its row says, soon, and without writing anything."""
    call, error, named, remedy = wrong
    before = _files(calls.folder)
    raised, seconds = _failure(call, calls)
    if seconds >= SECONDS:  # the machine may have been busy with something else
        raised, seconds = _failure(call, calls)
    message = str(raised)
    assert type(raised) is error, message
    assert re.search(rf"(?<!\w){re.escape(named)}(?!\w)", message), message
    assert re.search(remedy, message), message
    assert seconds < SECONDS
    assert _files(calls.folder) == before


def _failure(call: Callable[[Any], Any], calls: Any) -> tuple[HvdEstimatorsError, float]:
    """Return the error of a call and the seconds it takes."""
    started = time.monotonic()
    with pytest.raises(HvdEstimatorsError) as raised:
        call(calls)
    return raised.value, time.monotonic() - started


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
