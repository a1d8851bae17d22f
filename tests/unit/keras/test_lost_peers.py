"""What a Keras rank raises where another one is gone."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_estimators.keras.collectives import naming_lost_peers


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (tf.errors.UnknownError(None, None, "Horovod has been shut down."), HorovodInternalError),
        (tf.errors.AbortedError(None, None, "in HorovodAllreduce"), HorovodInternalError),
        # What ranks ask for does not fit: it will not the next time.
        (tf.errors.FailedPreconditionError(None, None, "Horovod: Mismatched"), None),
        (tf.errors.UnknownError(None, None, "a function of the user's"), None),
        (ValueError("horovod"), None),
    ],
)
def test_only_a_collective_that_was_cut_off_counts_as_a_lost_peer(error: Any, raised: Any) -> None:
    with pytest.raises(raised or type(error)) as caught, naming_lost_peers():
        raise error
    assert caught.value is error or caught.value.__cause__ is error
