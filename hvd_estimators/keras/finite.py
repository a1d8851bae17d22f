"""Which losses and parameters are NaN or infinite on a Keras rank. Runs on the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["NotFinite"]


class NotFinite:
    """Looks at a model's loss and at what it trains.

    Parameters
    ----------
    model : keras.Model
        Built.
    """

    def __init__(self, model: keras.Model) -> None:
        self._variables = [
            variable
            for variable in model.trainable_variables
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        # One call for all, of which nothing but a flag is read where all is well.
        self._are_finite = tf.function(self._all_finite)

    def after_step(self, logs: Mapping[str, Any]) -> tuple[float | None, list[str]]:
        """Return the loss if it is NaN or infinite, and the paths of such variables.

        Parameters
        ----------
        logs : mapping
            What the step has returned. Its loss is the mean of the epoch so far, which a single
            loss that is not finite makes so, too.
        """
        loss = logs.get("loss")
        value = None if loss is None or np.ndim(loss) else float(loss)
        found = None if value is None or np.isfinite(value) else value
        if not self._variables or bool(self._are_finite()):
            return found, []
        return found, [v.path for v in self._variables if not bool(_is_finite(v))]

    def _all_finite(self) -> tf.Tensor:
        return tf.reduce_all(tf.stack(list(map(_is_finite, self._variables))))


def _is_finite(variable: Any) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(variable)))
