"""Buffers that follow the batches, and their values in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

ROWS, BATCH, EPOCHS = 64, 8, 2
REDUCTIONS = {
    "running_max": "max",
    "running_min": "min",
    "total": "sum",
    "rows": "sum",
    "latest": "mean",
    "first": "rank0",
}


def expected_buffers(columns: Any) -> dict[str, Any]:
    """Compute the buffers of one process from the rows of both ranks."""
    x = columns["features"].astype(np.float64)
    # The last batch of each contiguous share.
    ends = [share[-BATCH:].mean() for share in np.split(x, 2)]
    return {
        "running_max": x.max(),
        "running_min": x.min(),
        "total": EPOCHS * x.sum(),
        "rows": EPOCHS * ROWS,
        "latest": np.mean(ends),
        "first": ends[0],
    }


@keras.saving.register_keras_serializable("tests")
class KerasTracking(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        for name, dtype in (("total", "float32"), ("latest", "float32"), ("rows", "int32")):
            weight = self.add_weight(
                name=name, shape=(), dtype=dtype, initializer="zeros", trainable=False
            )
            setattr(self, name, weight)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.total.assign_add(ops.sum(x))
            self.rows.assign_add(ops.shape(x)[0])
            self.latest.assign(ops.mean(x))
        return x
