"""Losses of a Keras model: checks on the driver, and the rules that depend on the loss."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.trial import leave_to_ranks, traceless
from hvd_estimators.inference.batch import is_scalar
from hvd_estimators.inference.classification import of_labels
from hvd_estimators.keras.backend import (
    SHAPE_KINDS,
    all_layers,
    function_of,
    has_own_step,
    is_keras,
    num_dimensions,
    on_tensorflow,
)
from hvd_estimators.keras.compile_args import losses
from hvd_estimators.keras.denominators import LossDenominators
from hvd_estimators.keras.outputs import Outputs
from hvd_estimators.training.row_weights import compare_halves

logger = logging.getLogger(__name__)

NO_LOSS = (
    "loss is not set, and the model adds none. Set loss, compile the model with one, or call "
    "add_loss() in the model or in one of its layers."
)


# Keras's losses whose labels have another shape than the outputs.
_SPARSE = {"sparse_categorical_crossentropy", "ctc", "circle"}


def has_loss(model: keras.Model) -> bool:
    """Return whether a model can compute a loss: a compiled loss, or its own ``compute_loss``."""
    return model.loss is not None or has_own_loss(model)


def may_add_loss(model: keras.Model) -> bool:
    """Return whether a model may call `add_loss`, judging by its classes."""
    return any(
        not is_keras(type(layer)) or getattr(layer, "activity_regularizer", None) is not None
        for layer in all_layers(model)
    )


def pairs_labels(model: keras.Model) -> bool:
    """Return whether each label had to pair with an output in training.

    The user's own ``train_step``, ``compute_loss`` and ``add_loss`` may compare any values.
    """
    return not has_own_step(model) and (not model.compiled or model.loss is not None)


def without_reduction(loss: Any) -> list[Any]:
    """Return the losses without a reduction, which return one number per row."""
    return [entry for entry in losses(loss) if getattr(entry, "reduction", "") in (None, "none")]


def losses_by_output(loss: Any, outputs: Outputs) -> list[Any]:
    """Return the loss of each output, in the order of the outputs."""
    if isinstance(loss, dict):
        return [loss.get(name) for name in outputs.names]
    flat = keras.tree.flatten(loss)
    return flat if len(flat) == len(outputs.labels) else flat[:1] * len(outputs.labels)


def _of_keras(loss: Any) -> tuple[Any, str | None]:
    """Return a loss as ``compile`` resolves it, and the name of its function if it is Keras's."""
    try:
        resolved = keras.losses.get(loss)
    except ValueError:
        return loss, None
    function = function_of(resolved)
    return resolved, getattr(function, "__name__", "") if is_keras(function) else None


def compares_elements(loss: Any) -> bool:
    """Return whether a loss is one of Keras's that require labels in the shape of outputs."""
    return _of_keras(loss)[1] not in (None, *_SPARSE)


def has_own_loss(model: keras.Model) -> bool:
    """Return whether a model has its own ``compute_loss``."""
    return type(model).compute_loss is not keras.Model.compute_loss


def has_own_call(loss: Any) -> bool:
    """Return whether a loss has a ``call`` of the user's; Keras's aligns labels and outputs."""
    resolved, _ = _of_keras(loss)
    return isinstance(resolved, keras.losses.Loss) and not is_keras(type(resolved).call)


# Losses that determine ``outputs_are``, see `kind_of_outputs`.
_OF_CLASSES = {
    *("sparse_categorical_crossentropy", "categorical_crossentropy"),
    "categorical_focal_crossentropy",
}
_OF_ONE_SCORE = {"binary_crossentropy", "binary_focal_crossentropy"}
_OF_NUMBERS = {
    *("mean_squared_error", "mean_absolute_error", "huber", "log_cosh"),
    *("mean_absolute_percentage_error", "mean_squared_logarithmic_error"),
}


def kind_of_outputs(
    model: keras.Model, loss: Any, shape: tuple[int | None, ...] | None
) -> str | None:
    """Return the kind of outputs that a loss of Keras determines, for a model with one output.

    Without ``from_logits``, the activation of the output layer must confirm that outputs are
    probabilities.

    Parameters
    ----------
    model : keras.Model
        The model.
    loss : object
        The only loss.
    shape : tuple of int or None
        Shape of a row of the output, or None if it is not known yet.

    Returns
    -------
    str or None
        A value of ``outputs_are``; None if the loss does not determine it.
    """
    resolved, name = _of_keras(loss)
    is_one_number = shape is not None and is_scalar(shape)
    if name in _OF_NUMBERS and is_one_number:
        return "values"
    is_vector = shape is not None and len(shape) == 1 and not is_one_number
    of_classes = name in _OF_CLASSES and (shape is None or is_vector)
    of_one_score = name in _OF_ONE_SCORE and (shape is None or is_vector or is_one_number)
    if not (of_classes or of_one_score):
        return None
    kind = "logits"
    if not (isinstance(resolved, keras.losses.Loss) and resolved.get_config().get("from_logits")):
        kind = "probabilities"
        if _last_activation(model) != ("softmax" if of_classes else "sigmoid"):
            return None
    return of_labels(kind) if of_one_score and is_vector else kind


def class_limit(loss: Any, shape: Sequence[int | None] | None) -> tuple[int, float | None] | None:
    """Return the number of classes and the ignored class, if a loss takes class numbers.

    Parameters
    ----------
    loss : object
        Loss of an output.
    shape : sequence of int or None, optional
        Shape of a row of the output.
    """
    resolved, name = _of_keras(loss)
    if name != "sparse_categorical_crossentropy":
        return None
    if not shape or shape[-1] is None:
        return None
    config = resolved.get_config() if isinstance(resolved, keras.losses.Loss) else {}
    return shape[-1], config.get("ignore_class")


def _last_activation(model: keras.Model) -> str | None:
    """Return the name of the output layer's activation, or None if it is not known."""
    if isinstance(model, keras.Sequential):
        layer = model.layers[-1] if model.layers else None
    else:
        names: list[str] = getattr(model, "output_names", None) or []
        layer = model.get_layer(names[0]) if len(names) == 1 else None
    activation = getattr(layer, "activation", None)
    if activation is None:
        return {keras.layers.Softmax: "softmax"}.get(type(layer))
    return getattr(activation, "__name__", None)


def check_loss(
    model: keras.Model,
    description: Outputs | None,
    x: Any,
    outputs: Any,
    labels: Any,
    weights: Any | None,
    denominators: LossDenominators | None = None,
) -> bool:
    """Try the loss; return False if only the ranks can determine if the loss works.

    Parameters
    ----------
    model : keras.Model
        The compiled model.
    description : Outputs or None
        Pairing of outputs and labels; None if labels do not pair with outputs.
    x, outputs, labels, weights : tensors
        The model's input and output for some rows, labels in the structure of the outputs, and
        row weights or None.
    denominators : LossDenominators, optional
        Counts the losses that the model calls.

    Raises
    ------
    ShapeError
        If the loss cannot take outputs and labels, or does not return a single number.
    """
    compared = _compared(model, description, outputs, labels)
    shapes = "; ".join(
        f"{name}: output {tuple(output.shape)}, label {tuple(label.shape)}"
        for name, output, label, _ in compared
    )
    remedy = "Set label_cols and the model's outputs to the same shapes, or label_shapes."
    given = (x, labels, outputs, weights)
    if not on_tensorflow():
        # As in a step: torch subtracts no array from a tensor that requires a gradient.
        given = keras.tree.map_structure(
            lambda v: keras.ops.convert_to_tensor(v) if isinstance(v, np.ndarray) else v, given
        )
    for added in model.losses:
        if num_dimensions(added):
            # Keras would sum the numbers of the rows.
            raise ShapeError(
                f"add_loss: expected a number, found shape {tuple(added.shape)}. Add the mean "
                "over the rows (keras.ops.mean), so that the ranks' gradients can be averaged."
            )
    counting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if denominators is not None:
        counting = denominators.in_step((x, labels, weights), False)
    try:
        with traceless(), counting:
            value = model.compute_loss(*given)
    except Exception as error:
        if leave_to_ranks(error, SHAPE_KINDS):
            return False
        raise ShapeError(
            f"The loss cannot take outputs and labels ({shapes}): {type(error).__name__}: "
            f"{error}. {remedy}"
        ) from error
    if value is not None and num_dimensions(value):
        raise ShapeError(f"The loss must return a number, found shape {tuple(value.shape)}.")
    for name, output, label, loss in compared:
        # Labels that merely broadcast to the output train the wrong comparison.
        sizes = [int(np.prod(tensor.shape[1:])) for tensor in (output, label)]
        if sizes[0] != sizes[1] and compares_elements(loss):
            raise ShapeError(
                f"The loss compares outputs and labels element by element ({shapes}). {remedy}"
            )
        _check_mean(name, loss, label, output)
    return True


def _check_mean(name: str, loss: Any, label: Any, output: Any) -> None:
    """Warn if a loss of the user's is no mean over rows; reject a sum that is not declared."""

    def losses_of(rows: slice) -> list[float]:
        return [float(keras.ops.mean(resolved(label[rows], output[rows])))]

    try:
        resolved = keras.losses.get(loss)
        if is_keras(function_of(resolved)):
            return
    except Exception:  # It may be a loss only where the model was compiled.
        return
    with traceless():
        (reduction,) = compare_halves(losses_of, len(output)) or ["mean"]
    if reduction == "sum" and getattr(resolved, "reduction", None) != "sum":
        raise ParamError(
            f"loss: expected a mean over rows for label {name!r}, found a sum. Return a value for "
            "each row, or set a keras.losses.Loss with reduction='sum'."
        )
    if reduction == "other":
        logger.warning(
            "loss: for label %r the loss of a few rows is not the mean of the losses of both "
            "halves. Several ranks then do not train as one process. Return a value for each row. "
            "If the loss compares rows with each other, see 'Contrastive losses over the rows of "
            "all ranks' in the page on Keras.",
            name,
        )


def _compared(
    model: keras.Model, description: Outputs | None, outputs: Any, labels: Any
) -> list[tuple[str, Any, Any, Any]]:
    """Return name, output, label and loss of each output that has a label."""
    if description is None:
        return []
    return [
        (name, output, label, loss)
        for name, output, label, loss in zip(
            description.labels,
            keras.tree.flatten(outputs),
            keras.tree.flatten(labels),
            losses_by_output(model.loss, description),
            strict=True,
        )
        if name is not None
    ]
