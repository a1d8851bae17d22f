"""Collectives of Keras ranks over torch's default process group: on torch, and on TensorFlow.

On TensorFlow, a sum is a NumPy function of the graph that reduces on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import on_tensorflow
from hvd_estimators.keras.collectives import Collectives
from hvd_estimators.torch import collectives as torch_collectives
from hvd_estimators.torch import operations
from hvd_estimators.training.object_collectives import Bytes


class TorchCollectives(Collectives):
    """Collectives for Keras on torch, over the collectives of torch ranks.

    Parameters
    ----------
    given : hvd_estimators.torch.operations.Collectives
        The rank's connection to the others.
    """

    def __init__(self, given: operations.Collectives) -> None:
        self._given = given
        self.library = given.library  # type: ignore[misc]
        self.rank, self.size, self.local_rank = given.rank, given.size, given.local_rank
        self.uses_nccl = given.uses_nccl

    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over the ranks."""
        return self._given.reduce(tensor.contiguous(), "sum", name)

    def sum_array(self, array: Array, name: str) -> Array:
        """Return the sum of an array over the ranks."""
        # A copy, which the sum overwrites. TensorFlow's arrays are read-only.
        total: Array
        total = self._given.reduce_async(torch.from_numpy(np.array(array)), "sum", name)().numpy()
        return total

    def gather(self, document: Bytes, name: str) -> Bytes:
        """Return the concatenated bytes of all ranks."""
        return torch_collectives.gather_bytes(document, name)


class TensorFlowCollectives(TorchCollectives):
    """Collectives for Keras on TensorFlow, over the collectives of torch ranks."""

    def __init__(self, given: operations.Collectives) -> None:
        super().__init__(given)
        self._error: Exception | None = None

    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over the ranks. TensorFlow runs sums in their traced order."""
        import tensorflow as tf

        def summed(array: Array) -> Array:
            try:
                return self.sum_array(array, name)
            except Exception as error:
                self._error = error
                raise

        total = tf.numpy_function(summed, [tensor], tensor.dtype)
        return tf.ensure_shape(total, tensor.shape)

    @contextlib.contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """Raise the error of a sum that has failed, which TensorFlow converts to another one."""
        import tensorflow as tf

        try:
            yield
        except tf.errors.OpError as error:
            if self._error is None:
                raise
            raise self._error from error


@contextlib.contextmanager
def connected(
    kind: str, mp_start_method: str | None, ranks: int | None, use_gpu: bool
) -> Iterator[TorchCollectives]:
    """Connect this rank to the others for the duration of the block."""
    # TensorFlow's tensors are reduced on the CPU.
    on_gpu = use_gpu and not on_tensorflow()
    with torch_collectives.session(kind, mp_start_method, ranks, on_gpu) as given:
        yield _of(given)


def connect() -> TorchCollectives:
    """Connect this process to the other ranks until it ends."""
    torch_collectives.connect()
    return _of(torch_collectives.current())


def _of(given: operations.Collectives) -> TorchCollectives:
    return TensorFlowCollectives(given) if on_tensorflow() else TorchCollectives(given)
