"""Whether a model has a loss, and whether it takes outputs and labels; on the driver."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.dry_run import leave_to_ranks, traceless
from hvd_estimators.keras.losses import (
    NO_LOSS,
    added_losses,
    compares_elements,
    has_loss,
    has_own_step,
    losses_by_output,
)
from hvd_estimators.keras.outputs import Outputs
from hvd_estimators.keras.trial_calls import SHAPE_KINDS

__all__ = ["check_loss", "has_any_loss"]


def has_any_loss(model: keras.Model, x: Any) -> bool:
    """Return whether there is a loss to try: of the model, or one that its layers add.

    Parameters
    ----------
    model : keras.Model
        The model, compiled and called.
    x : object
        What it was called with.

    Raises
    ------
    ParamError
        If there is none.
    ShapeError
        If a layer adds one number per row, or the model cannot be called as in training.
    """
    _check_added(model)
    if has_loss(model) or has_own_step(model):
        return has_loss(model)
    if not added_losses(model):
        try:
            with traceless():
                model(x, training=True)
        except Exception as error:
            if leave_to_ranks(error, SHAPE_KINDS):
                return False
            raise ShapeError(
                "The model cannot be called with training=True: it raised "
                f"{type(error).__name__}: {error}."
            ) from error
        _check_added(model)
    if not added_losses(model):
        raise ParamError(NO_LOSS)
    return True


def check_loss(
    model: keras.Model,
    known: Outputs | None,
    x: Any,
    outputs: Any,
    labels: Any,
    weights: Any | None,
) -> bool:
    """Try the loss; return False where only the ranks can tell whether it fits.

    Parameters
    ----------
    model : keras.Model
        The model, compiled.
    known : Outputs or None
        Which output belongs to which label; None if labels are none of its outputs.
    x, outputs, labels, weights : tensors
        Some rows: what the model was called with, what it returned, labels in the structure of its
        outputs, and the rows' weights, if they have any.

    Raises
    ------
    ShapeError
        If the loss cannot take outputs and labels, or is more than a number.
    """
    compared = _compared(model, known, outputs, labels)
    shapes = "; ".join(
        f"{name}: output {tuple(output.shape)}, label {tuple(label.shape)}"
        for name, output, label, _ in compared
    )
    remedy = "Set label_cols and the model's outputs to the same shapes, or label_shapes."
    try:
        with traceless():
            value = model.compute_loss(x, labels, outputs, weights)
    except Exception as error:
        if leave_to_ranks(error, SHAPE_KINDS):
            return False
        raise ShapeError(
            f"The loss cannot take outputs and labels ({shapes}): {type(error).__name__}: "
            f"{error}. {remedy}"
        ) from error
    if value is not None and value.shape.rank:
        raise ShapeError(f"The loss must return a number, found shape {tuple(value.shape)}.")
    for _, output, label, loss in compared:
        # Labels that only broadcast to the output train on something nobody meant.
        sizes = [int(np.prod(tensor.shape[1:])) for tensor in (output, label)]
        if sizes[0] != sizes[1] and compares_elements(loss):
            raise ShapeError(
                f"The loss compares outputs and labels element by element ({shapes}). {remedy}"
            )
    return True


def _compared(
    model: keras.Model, known: Outputs | None, outputs: Any, labels: Any
) -> list[tuple[str, Any, Any, Any]]:
    """Return name, output, label and loss of each output that has a label."""
    if known is None:
        return []
    return [
        (name, output, label, loss)
        for name, output, label, loss in zip(
            known.labels,
            keras.tree.flatten(outputs),
            keras.tree.flatten(labels),
            losses_by_output(model.loss, known),
            strict=True,
        )
        if name is not None
    ]


def _check_added(model: keras.Model) -> None:
    """Refuse added losses that are one number per row: Keras sums them up."""
    for loss in added_losses(model):
        if loss.shape.rank:
            raise ShapeError(
                f"add_loss: expected a number, found shape {tuple(loss.shape)}. Add the mean "
                "over the rows (keras.ops.mean), so that the ranks' gradients can be averaged."
            )
