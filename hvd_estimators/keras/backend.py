"""Which of Keras's backends this package works with."""

from __future__ import annotations

import keras

from hvd_estimators.exceptions import DependencyError

__all__ = ["require_tensorflow"]


def require_tensorflow() -> None:
    """Make sure that Keras runs on TensorFlow.

    Raises
    ------
    DependencyError
        If it runs on something else, for which there are no collectives here.
    """
    found = keras.backend.backend()
    if found != "tensorflow":
        raise DependencyError(
            f"Keras runs on the backend {found!r}; hvd_estimators.keras needs 'tensorflow'. Set "
            "the environment variable KERAS_BACKEND=tensorflow before keras is imported (it takes "
            "precedence over ~/.keras/keras.json)."
        )
