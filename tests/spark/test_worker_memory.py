"""Memory of a predicting Python worker does not grow with the number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pyspark.sql import functions as F

from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark

WIDTH = 8
# A worker that kept its rows, or its predictions, would need at least 64 bytes for each.
GROWTH_BYTES = 20e6


class Noting(torch.nn.Module):
    """Return 16 numbers per row, and log the memory of the process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.layer = path, torch.nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{psutil.Process().memory_info().rss}\n")
        return self.layer(x)


@pytest.mark.parametrize(
    "rows", [40_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_memory_does_not_grow_with_rows(spark: Any, tmp_path: Path, rows: int) -> None:
    path = tmp_path / "bytes"
    model = TorchModel(
        model=Noting(path),
        feature_columns=["x"],
        label_columns=["y"],
        input_shapes=[[-1, WIDTH]],
        output_shapes=[[16]],
        output_types=["array<double>"],
    )

    numbers = [(F.col("id") + i).cast("double") for i in range(WIDTH)]
    # A single task: one worker serves the whole job.
    frame = spark.range(0, 10 * rows, 1, 1).select(F.array(*numbers).alias("x"))
    model.transform(frame).write.format("noop").mode("overwrite").save()

    notes = list(map(float, path.read_text().split()))
    assert len(notes) >= rows / 1_000
    assert max(notes) - max(notes[: len(notes) // 10]) < GROWTH_BYTES
