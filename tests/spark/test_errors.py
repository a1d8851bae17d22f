"""Bad input raises a typed error on the driver and leaves no files or processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from estimators import line_estimator
from pyspark.sql import functions as F

from hvd_estimators import clear_prepared_data, clear_training_cache
from hvd_estimators.exceptions import DataError, WorkerFailedError
from hvd_estimators.launch.warm.server import NAME

pytestmark = pytest.mark.spark


def numbers(spark: Any, rows: int = 20) -> Any:
    return spark.range(rows).select(
        F.col("id").cast("double").alias("x"), (F.col("id") * 2.0).alias("y")
    )


def assert_nothing_written(store: Any) -> None:
    """Assert that the store holds only the empty folder of runs."""
    runs = Path(store.get_runs_path())
    assert [path for path in Path(store.prefix_path).rglob("*") if path != runs] == []


def rank_processes() -> list[psutil.Process]:
    """Return the ranks that these tests started, without other ranks on the machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "name"]):
        is_rank = "hvd_estimators.launch.rank.worker" in " ".join(process.info["cmdline"] or [])
        started_by = (process.info["environ"] or {}).get("TORCH_TESTS_OF_HVD_ESTIMATORS")
        # The process from which ranks are forked stays.
        if is_rank and started_by == str(os.getpid()) and process.info["name"] != NAME:
            found.append(process)
    return found


def test_an_empty_frame_is_rejected(spark: Any, store: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        line_estimator(store).fit(numbers(spark).where("1 = 0"))
    with pytest.raises(DataError, match="no rows to train on"):
        line_estimator(store, validation="y").fit(numbers(spark).where("y > 0"))
    assert_nothing_written(store)


def test_fewer_rows_than_ranks_are_rejected(spark: Any, store: Any) -> None:
    with pytest.raises(DataError, match="1 rows, fewer than the 2 ranks"):
        line_estimator(store, num_proc=2).fit(numbers(spark, 1))
    assert clear_prepared_data(store) == []
    assert_nothing_written(store)


def test_an_error_on_one_rank_reaches_the_driver_with_its_traceback(spark: Any, store: Any) -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        import os

        if os.environ.get("HOROVOD_RANK") == "1":
            raise ArithmeticError("only on rank 1")
        return torch.nn.functional.mse_loss(output, label)

    with pytest.raises(WorkerFailedError, match="only on rank 1") as caught:
        line_estimator(store, num_proc=2, loss=loss).fit(numbers(spark))
    assert caught.value.rank == 1
    assert "ArithmeticError" in str(caught.value)
    assert "in loss" in str(caught.value)
    assert rank_processes() == []
    # The prepared data is no longer in use.
    clear_training_cache()
    assert [path.name for path in Path(store.prefix_path).iterdir() if path.name != "runs"] == []
