"""Sums of Keras ranks on TensorFlow whose operands are constants on some ranks only.

TensorFlow evaluates constant parts of a graph once. A sum among them would miss later steps.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators.keras.collectives import GradientAverager, session, sum_tensors
from hvd_estimators.launch.local_backend import LocalBackend

pytestmark = pytest.mark.integration

STEPS = 4
SHAPES = ((), (1,), (2, 3))
TYPES = ("float32", "float64", "int64")
# With a sum that one rank leaves out, the other one fails and does not wait forever.
STALLS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "15"}


class HalfPrecision:
    """Compressor of gradients."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return keras.ops.cast(tensor, "float16"), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, dtype: Any) -> Any:
        return keras.ops.cast(tensor, dtype)


def run_steps(collectives: str) -> list[Any]:
    """Return the sums and means of each step. Runs on both ranks.

    Rank 0 has the number of the step, and rank 1 has constants.
    """
    import tensorflow as tf

    with session(collectives) as connected:
        averagers = {
            (dtype, is_compressed): GradientAverager(
                HalfPrecision if is_compressed else None, f"{dtype}.{is_compressed}"
            )
            for dtype in ("float32", "float64")
            for is_compressed in (False, True)
        }

        @tf.function(autograph=False)
        def step(number: Any) -> Any:
            own = number if connected.rank == 0 else tf.constant(1.0)
            sums = {
                (shape, dtype): sum_tensors(
                    tf.cast(tf.fill(shape, own), dtype), f"{len(shape)}.{dtype}"
                )
                for shape in SHAPES
                for dtype in TYPES
            }
            gradient = (5.0 if connected.rank == 0 else 3.0) * own
            means = {
                key: averager.average([tf.cast(tf.fill((2, 2), gradient), key[0])], own)[0]
                for key, averager in averagers.items()
            }
            return sums, means

        return [
            keras.tree.map_structure(np.asarray, step(tf.constant(float(number))))
            for number in range(STEPS)
        ]


@pytest.mark.parametrize("collectives", ["torch", "horovod"])
def test_each_step_sums_what_is_constant_on_one_rank(collectives: str) -> None:
    for of_rank in LocalBackend(2, verbose=0).run(run_steps, (collectives,), env=STALLS):
        assert len(of_rank) == STEPS
        for number, (sums, means) in enumerate(of_rank):
            assert sums.keys() == {(shape, dtype) for shape in SHAPES for dtype in TYPES}
            for (shape, dtype), total in sums.items():
                assert total.dtype == dtype
                np.testing.assert_array_equal(total, np.full(shape, number + 1))
            # Rank 0's weight is the number of the step, and rank 1's is 1.
            mean = (5 * number + 3) / (number + 1)
            assert len(means) == 4
            for (dtype, is_compressed), found in means.items():
                assert found.dtype == dtype
                rtol = 1e-3 if is_compressed else 1e-6
                np.testing.assert_allclose(found, np.full((2, 2), mean), rtol=rtol)
