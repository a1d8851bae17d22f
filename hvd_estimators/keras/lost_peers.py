"""What a rank raises where another one is gone. Runs on the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

__all__ = ["naming_lost_peers"]


@contextlib.contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Raise Horovod's own error where one of its operations fails because a rank is gone.

    TensorFlow makes an error of its own of it, which looks like one of the training code: as if
    this rank had failed, and not the other one.
    """
    try:
        yield
    # Calls of ranks that do not fit each other are a FailedPreconditionError.
    except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
        if "horovod" not in str(error).lower():
            raise
        raise HorovodInternalError(error.message) from error
