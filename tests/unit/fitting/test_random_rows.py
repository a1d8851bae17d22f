"""The driver warns of functions of rows whose random numbers a fit would not repeat."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import line_estimator
from parquet_files import write_columns

from hvd_estimators.launch.backend import Backend
from hvd_estimators.store import LocalStore


class NoRanks(Backend):
    """Backend that ends each fit."""

    def num_processes(self) -> int:
        return 1

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("ranks were to be started")


own = np.random.default_rng(3)
DRAWS = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: float(torch.rand(())),
    "none": lambda: 0.5,
    "a generator of its own": own.random,
}


def collate(draw: Any) -> Any:
    def make(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        x = torch.tensor([[row["x"] + draw()] for row in rows])
        return {"x": x, "y": torch.tensor([row["y"] for row in rows])}

    return {"collate_fn": make, "input_shapes": None}


def row(draw: Any) -> Any:
    return {"transformation_fn": lambda row: {"x": row["x"] + draw(), "y": row["y"]}}


def batch(draw: Any) -> Any:
    def changed(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "x": columns["x"] + draw()}

    return {"transformation_batch_fn": changed}


@pytest.mark.parametrize("pool", ["thread", "process"])
@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("params", [collate, row, batch])
def test_functions_that_draw_random_numbers(
    params: Any, draws: str, pool: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(str(tmp_path), save_runs=False)
    numbers = np.arange(8, dtype=np.float32)
    write_columns(Path(store.get_train_data_path()), {"x": numbers, "y": numbers})
    given = params(DRAWS[draws])
    estimator = line_estimator(store, backend=NoRanks(), reader_pool_type=pool, **given)
    with pytest.raises(AssertionError, match="ranks were to be started"):
        estimator.fit_on_parquet()
    warned = f"{next(iter(given))}: the function draws random numbers" in caplog.text
    assert warned == (pool == "thread" and draws in ("random", "numpy", "torch"))
