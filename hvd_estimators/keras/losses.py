"""Facts about a model's losses: whether there are any, and how they average over rows.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.compiling import losses
from hvd_estimators.keras.outputs import Outputs

__all__ = [
    "NO_LOSS",
    "added_losses",
    "compares_elements",
    "find_metric",
    "has_loss",
    "has_own_step",
    "losses_by_output",
    "may_add_loss",
    "pairs_labels",
    "weights_by_samples",
    "without_reduction",
]

NO_LOSS = (
    "loss is not set, and the model adds none. Set loss, compile the model with one, or call "
    "add_loss() in the model or in one of its layers."
)

# Keras's losses whose labels have another shape than the outputs.
_SPARSE = {"sparse_categorical_crossentropy", "ctc", "circle"}


def has_loss(model: keras.Model) -> bool:
    """Return whether a model can compute a loss: it was compiled with one, or computes its own."""
    return model.loss is not None or type(model).compute_loss is not keras.Model.compute_loss


def added_losses(model: keras.Model) -> list[Any]:
    """Return what `add_loss` was given in the last call, except regularizers of weights."""
    found = list(model.losses)
    regularized = [v for v in model.trainable_variables if v.regularizer is not None]
    return found[: len(found) - len(regularized)]


def may_add_loss(model: keras.Model) -> bool:
    """Return whether a model may call `add_loss`, as far as its classes tell."""
    return any(
        type(layer).__module__.partition(".")[0] != "keras"
        or getattr(layer, "activity_regularizer", None) is not None
        for layer in all_layers(model)
    )


def has_own_step(model: keras.Model) -> bool:
    """Return whether a model trains in a way of its own."""
    return type(model).train_step is not keras.Model.train_step


def pairs_labels(model: keras.Model, compiled: Mapping[str, Any] | None = None) -> bool:
    """Return whether each label had to pair with an output while a model was trained.

    The user's own ``train_step``, ``compute_loss`` and ``add_loss`` compare what they like.

    Parameters
    ----------
    model : keras.Model
        The model.
    compiled : mapping, optional
        What it was compiled with. Default: as it is compiled.
    """
    if has_own_step(model):
        return False
    if compiled is None:
        return not model.compiled or model.loss is not None
    return compiled.get("loss") is not None


def weights_by_samples(loss: Any) -> bool:
    """Return whether all losses divide by the sum of sample weights, not by rows.

    Parameters
    ----------
    loss : object
        What `compile` is given.
    """
    found = losses(loss)
    return bool(found) and all(
        getattr(entry, "reduction", None) == "mean_with_sample_weight" for entry in found
    )


def without_reduction(loss: Any) -> list[Any]:
    """Return the losses that give one number per row."""
    return [entry for entry in losses(loss) if getattr(entry, "reduction", "") in (None, "none")]


def find_metric(name: Any) -> Any:
    """Return a metric as ``compile`` finds it.

    Raises
    ------
    ValueError
        If Keras knows none.
    """
    # Which of several is meant by these, outputs and labels tell.
    meant = name in ("acc", "accuracy", "ce", "crossentropy")
    return name if meant else keras.metrics.get(name)


def losses_by_output(loss: Any, outputs: Outputs) -> list[Any]:
    """Return the loss of each output, in the order of their places."""
    if isinstance(loss, dict):
        names = zip(outputs.names, outputs.layers, strict=True)
        return [loss.get(name, loss.get(layer)) for name, layer in names]
    flat = keras.tree.flatten(loss)
    return flat if len(flat) == len(outputs.labels) else flat[:1] * len(outputs.labels)


def compares_elements(loss: Any) -> bool:
    """Return whether a loss is one of Keras's that needs labels in the shape of outputs."""
    try:
        resolved = keras.losses.get(loss)
    except ValueError:
        return False
    function = getattr(resolved, "fn", resolved)
    module = str(getattr(function, "__module__", ""))
    name = str(getattr(function, "__name__", ""))
    return module.startswith("keras.") and name not in _SPARSE
