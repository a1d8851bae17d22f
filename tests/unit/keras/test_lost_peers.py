"""Errors of a Keras rank after the loss of another rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_estimators.keras.horovod_collectives import HorovodCollectives

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
