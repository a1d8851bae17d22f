"""Errors of a Keras rank after the loss of another rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_estimators.exceptions import CollectiveError
from hvd_estimators.keras.horovod_collectives import HorovodCollectives
from hvd_estimators.keras.torch_collectives import TensorFlowCollectives

# Its connection, which this process has not, plays no part.
_naming_lost_peers = functools.partial(HorovodCollectives.naming_lost_peers, None)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (tf.errors.UnknownError(None, None, "Horovod has been shut down."), HorovodInternalError),
        (tf.errors.AbortedError(None, None, "in HorovodAllreduce"), HorovodInternalError),
        # Mismatched requests would recur in the next launch.
        (tf.errors.FailedPreconditionError(None, None, "Horovod: Mismatched"), None),
        (tf.errors.UnknownError(None, None, "a function of the user's"), None),
        (ValueError("horovod"), None),
    ],
)
def test_only_interrupted_collectives_count_as_lost_peers(error: Any, raised: Any) -> None:
    with pytest.raises(raised or type(error)) as caught, _naming_lost_peers():
        raise error
    assert caught.value is error or caught.value.__cause__ is error


def test_a_failed_sum_of_torch_raises_its_own_error() -> None:
    class Lost:
        library, rank, size, local_rank, uses_nccl = "torch.distributed", 0, 2, 0, False

        def reduce_async(self, tensor: Any, op: str, name: str) -> Any:
            raise CollectiveError(f"{name!r} failed")

    collectives = TensorFlowCollectives(Lost())
    step = tf.function(lambda x: collectives.sum(x, "gradients.0"))
    with (
        pytest.raises(CollectiveError, match=r"^'gradients.0' failed$"),
        collectives.naming_lost_peers(),
    ):
        step(tf.ones(3))
    # Later errors of the user's own functions are not the sum's.
    users = tf.function(lambda x: tf.numpy_function(int, [x], tf.int64))
    with (
        pytest.raises(tf.errors.InvalidArgumentError),
        TensorFlowCollectives(Lost()).naming_lost_peers(),
    ):
        users(tf.constant("no number"))
