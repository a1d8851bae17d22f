"""Collectives of Keras ranks on TensorFlow over Horovod.

Under Keras 3, ``horovod.tensorflow.keras.DistributedOptimizer`` is accepted but averages nothing.
This module therefore uses only the operations of ``horovod.tensorflow`` itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.collectives import Collectives
from hvd_estimators.training.collectives_choice import require_horovod
from hvd_estimators.training.horovod_session import horovod_session
from hvd_estimators.training.object_collectives import Bytes


class HorovodCollectives(Collectives):
    """Collectives over Horovod, which must be initialized."""

    library = "Horovod"

    def __init__(self) -> None:
        import horovod.tensorflow

        self._hvd = hvd = horovod.tensorflow
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        self.uses_nccl = bool(hvd.nccl_built())

    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over the ranks."""
        if not tf.executing_eagerly():
            tensor = self._unfoldable(tf.convert_to_tensor(tensor))
        # The name is the same in every function or branch that traces the operation.
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name, ignore_name_scope=True)

    def _unfoldable(self, tensor: Any) -> Any:
        """Return the tensor in a form that TensorFlow's optimizers never take for a constant.

        They evaluate operations on constants once, also Horovod's, which do not declare that they
        are stateful. The number of rows, for example, is a constant only on ranks whose batches
        are all of one size. The other ranks would wait for its sum in vain.
        """
        # The size's operation is stateful. A reshape in place of the slice would not do: optimizers
        # remove it where they can infer that it keeps the shape.
        zero = tf.minimum(self._hvd.size_op(), 0)
        # The slice is the whole tensor and shares its memory.
        flat = tf.slice(tf.reshape(tensor, (-1,)), [zero], [-1])
        return tf.reshape(flat, tf.shape(tensor))

    def sum_array(self, array: Array, name: str) -> Array:
        """Return the sum of an array over the ranks."""
        total: Array = self.sum(tf.constant(array), name).numpy()
        return total

    def gather(self, document: Bytes, name: str) -> Bytes:
        """Return the concatenated bytes of all ranks."""
        gathered: Bytes = self._hvd.allgather(tf.constant(document), name=name).numpy()
        return gathered

    @contextlib.contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """Raise Horovod's own error if one of its operations fails because a rank is lost.

        TensorFlow converts Horovod's error to another one. The result looks like an error of the
        training code, as if this rank had failed.
        """
        from horovod.common.exceptions import HorovodInternalError

        try:
            yield
        # Mismatched calls of ranks raise FailedPreconditionError instead.
        except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
            if "horovod" not in str(error).lower():
                raise
            raise HorovodInternalError(error.message) from error


@contextlib.contextmanager
def connected(
    kind: str, mp_start_method: str | None, ranks: int | None, use_gpu: bool
) -> Iterator[HorovodCollectives]:
    """Initialise Horovod for the duration of the block; see `horovod_session`."""
    require_horovod("tensorflow")
    import horovod.tensorflow

    with horovod_session(horovod.tensorflow, mp_start_method, ranks):
        yield HorovodCollectives()


def connect() -> HorovodCollectives:
    """Return the collectives of a program that has called ``horovod.tensorflow.init()``."""
    return HorovodCollectives()
