"""Losses of a Keras model: checks, and denominators over the global batch.

The ranks' gradients are averaged by weight, by default by rows. `LossDenominators` scales a loss
that divides by another number. The average then equals the loss over the global batch, whose
numerator and denominator are sums over the ranks.

The checks run on the driver, `LossDenominators` on the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.dry_run import leave_to_ranks, traceless
from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.collectives import GradientAverager, sum_tensors
from hvd_estimators.keras.compile_args import losses
from hvd_estimators.keras.inputs import SHAPE_KINDS
from hvd_estimators.keras.outputs import Outputs

__all__ = [
    "NO_LOSS",
    "LossDenominators",
    "added_losses",
    "check_loss",
    "compares_elements",
    "find_metric",
    "has_any_loss",
    "has_loss",
    "has_own_step",
    "losses_by_output",
    "may_add_loss",
    "pairs_labels",
    "states_denominator",
    "weights_by_samples",
    "without_reduction",
]

NO_LOSS = (
    "loss is not set, and the model adds none. Set loss, compile the model with one, or call "
    "add_loss() in the model or in one of its layers."
)


# Keras losses whose labels have a different shape from the outputs.
_SPARSE = {"sparse_categorical_crossentropy", "ctc", "circle"}


def has_loss(model: keras.Model) -> bool:
    """Return whether a model can compute a loss: a compiled loss, or its own ``compute_loss``."""
    return model.loss is not None or type(model).compute_loss is not keras.Model.compute_loss


def added_losses(model: keras.Model) -> list[Any]:
    """Return the values of `add_loss` in the last call, except regularizers of weights."""
    found = list(model.losses)
    regularized = [v for v in model.trainable_variables if v.regularizer is not None]
    return found[: len(found) - len(regularized)]


def may_add_loss(model: keras.Model) -> bool:
    """Return whether a model may call `add_loss`, judging by its classes."""
    return any(
        type(layer).__module__.partition(".")[0] != "keras"
        or getattr(layer, "activity_regularizer", None) is not None
        for layer in all_layers(model)
    )


def has_own_step(model: keras.Model) -> bool:
    """Return whether a model has its own ``train_step``."""
    return type(model).train_step is not keras.Model.train_step


def pairs_labels(model: keras.Model, compiled: Mapping[str, Any] | None = None) -> bool:
    """Return whether each label had to pair with an output in training.

    The user's own ``train_step``, ``compute_loss`` and ``add_loss`` may compare any values.

    Parameters
    ----------
    model : keras.Model
        The model.
    compiled : mapping, optional
        The model's compile arguments. Default: the current ones.
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
        The ``loss`` argument of `compile`.
    """
    found = losses(loss)
    return bool(found) and all(
        getattr(entry, "reduction", None) == "mean_with_sample_weight" for entry in found
    )


def without_reduction(loss: Any) -> list[Any]:
    """Return the losses without a reduction, which return one number per row."""
    return [entry for entry in losses(loss) if getattr(entry, "reduction", "") in (None, "none")]


def find_metric(name: Any) -> Any:
    """Resolve a metric as ``compile`` does.

    Raises
    ------
    ValueError
        If Keras does not know the metric.
    """
    # These names have several meanings; outputs and labels determine the right one.
    meant = name in ("acc", "accuracy", "ce", "crossentropy")
    return name if meant else keras.metrics.get(name)


def losses_by_output(loss: Any, outputs: Outputs) -> list[Any]:
    """Return the loss of each output, in the order of the outputs."""
    if isinstance(loss, dict):
        names = zip(outputs.names, outputs.layers, strict=True)
        return [loss.get(name, loss.get(layer)) for name, layer in names]
    flat = keras.tree.flatten(loss)
    return flat if len(flat) == len(outputs.labels) else flat[:1] * len(outputs.labels)


def compares_elements(loss: Any) -> bool:
    """Return whether a loss is one of Keras's that require labels in the shape of outputs."""
    try:
        resolved = keras.losses.get(loss)
    except ValueError:
        return False
    function = getattr(resolved, "fn", resolved)
    module = str(getattr(function, "__module__", ""))
    name = str(getattr(function, "__name__", ""))
    return module.startswith("keras.") and name not in _SPARSE


def has_any_loss(model: keras.Model, x: Any) -> bool:
    """Return whether there is a loss to try: the model's, or one that its layers add.

    Parameters
    ----------
    model : keras.Model
        The model, compiled and called.
    x : object
        The input of the call.

    Raises
    ------
    ParamError
        If there is no loss.
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
    """Try the loss; return False if only the ranks can determine if the loss works.

    Parameters
    ----------
    model : keras.Model
        The compiled model.
    known : Outputs or None
        Pairing of outputs and labels; None if labels do not pair with outputs.
    x, outputs, labels, weights : tensors
        The model's input and output for some rows, labels in the structure of the outputs, and
        row weights or None.

    Raises
    ------
    ShapeError
        If the loss cannot take outputs and labels, or does not return a single number.
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
        # Labels that only broadcast to the output would train on unintended pairs.
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
    """Reject added losses with one number per row, because Keras sums them up."""
    for loss in added_losses(model):
        if loss.shape.rank:
            raise ShapeError(
                f"add_loss: expected a number, found shape {tuple(loss.shape)}. Add the mean "
                "over the rows (keras.ops.mean), so that the ranks' gradients can be averaged."
            )


def states_denominator(loss: Any) -> bool:
    """Return whether a user's loss has a method ``denominator(y_true, y_pred)``."""
    return callable(getattr(loss, "denominator", None))


class LossDenominators:
    """Scale the losses that a model computes in its training and test steps.

    With several micro-batches per step, the step's denominator is unknown before the last one. A
    single loss then weights each micro-batch by its denominator instead.

    Parameters
    ----------
    averagers : sequence of GradientAverager
        Average the model's gradients.
    passes : int
        Micro-batches per step on this rank.
    full : int
        Rows of a full batch, the unit of weights.
    by_samples : bool
        Whether gradients are averaged by sample weights, not by rows.
    """

    def __init__(
        self, averagers: Sequence[GradientAverager], passes: int, full: int, by_samples: bool
    ) -> None:
        self._averagers = averagers
        self._passes = passes
        self._full = full
        self._by_samples = by_samples
        self._is_single = True
        self._weight: Any = None
        self._is_training = False
        # Losses of the traced step, and those among them that are not means over rows.
        self._calls = self._others = 0
        self._after: list[Any] = []
        self._denominator: Any = None

    @contextlib.contextmanager
    def patched(self, model: keras.Model) -> Iterator[None]:
        """Scale losses until the block ends. Patches Keras in this process, which trains."""
        kind: Any = keras.losses.Loss
        original = kind.__call__

        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if self._weight is None:
                return original(loss, y_true, y_pred, sample_weight)
            return self._scaled(original, loss, y_true, y_pred, sample_weight)

        kind.__call__ = call
        tracker = next(
            (m for m in model.metrics if m.name == "loss" and type(m) is keras.metrics.Mean), None
        )
        if tracker is not None:
            update = tracker.update_state

            def update_state(values: Any, sample_weight: Any = None) -> Any:
                weight = sample_weight if self._denominator is None else self._denominator
                return update(values, sample_weight=weight)

            vars(tracker)["update_state"] = update_state
        try:
            yield
        finally:
            kind.__call__ = original
            if tracker is not None:
                vars(tracker).pop("update_state")

    @contextlib.contextmanager
    def in_step(self, weight: Any, is_training: bool, labels: int) -> Iterator[None]:
        """Scale the losses of a step that runs or is traced.

        Parameters
        ----------
        weight : tf.Tensor
            Weight of the batch, by rows or by sample weights.
        is_training : bool
            Whether gradients are averaged. In a test step, a single loss is weighted by its
            denominator, so that the loss over all validation rows is exact.
        labels : int
            The number of labels.
        """
        self._weight, self._is_training, self._is_single = weight, is_training, labels == 1
        self._calls = self._others = 0
        self._after, self._denominator = [], None
        try:
            yield
        finally:
            self._weight = self._denominator = None
            self._after = []
        if is_training and self._passes > 1 and self._others and self._calls > 1:
            raise ParamError(
                "loss: with several losses, of which one has a mask, ignored classes, a "
                "denominator, or reduction='sum', a step must be one batch of each rank. Set "
                "backward_passes_per_step=1, and go on with as many ranks as the run began with."
            )

    def _scaled(
        self, original: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any
    ) -> Any:
        self._calls += 1
        call, elements = loss.call, []

        def recorded(*arguments: Any, **named: Any) -> Any:
            elements.append(call(*arguments, **named))
            return elements[-1]

        vars(loss)["call"] = recorded
        try:
            value = original(loss, y_true, y_pred, sample_weight)
        finally:
            vars(loss).pop("call")
        if loss.reduction == "sum" and not states_denominator(loss):
            return self._sum(value)
        denominator = _denominator(loss, y_true, y_pred, sample_weight, elements[-1])
        is_known = self._is_training and self._by_samples and not _has_mask(y_pred, elements[-1])
        if denominator is None or (is_known and not states_denominator(loss)):
            return value
        self._others += 1
        if self._is_training and self._passes > 1:
            for averager in self._averagers:
                averager.weight = denominator / self._full
            self._denominator = denominator
            return value
        if not self._is_training and self._is_single and self._calls == 1:
            self._denominator = denominator
            return self._times(value, denominator > 0)
        self._denominator = None
        counts, weights = self._reduced(tf.stack([denominator, self._weight]))
        own = tf.math.divide_no_nan(denominator, counts)
        return self._times(value, own * tf.math.divide_no_nan(weights, self._weight))

    def _sum(self, value: Any) -> Any:
        self._others += 1
        if self._is_training and self._passes > 1:
            raise ParamError(
                "loss: reduction='sum' needs a step of one batch of each rank. Set "
                "backward_passes_per_step=1, and go on with as many ranks as the run began with; "
                "or set reduction='sum_over_batch_size'."
            )
        weights = self._reduced(tf.reshape(self._weight, (1,)))[0]
        return self._times(value, tf.math.divide_no_nan(weights, self._weight))

    def _reduced(self, own: Any) -> list[Any]:
        """Sum numbers over the ranks, one reduction after the other."""
        # In 64 bits, which Horovod does not fuse with gradients: sums never depend on timing.
        with tf.control_dependencies(self._after):
            total = sum_tensors(tf.cast(own, tf.float64), f"denominators.{self._others}")
        self._after = [total]
        return [tf.cast(number, tf.float32) for number in tf.unstack(total)]

    def _times(self, value: Any, factor: Any) -> Any:
        # A batch without rows may have any loss value.
        return tf.math.multiply_no_nan(value, tf.cast(factor, value.dtype))


def _denominator(loss: Any, y_true: Any, y_pred: Any, weight: Any, elements: Any) -> Any:
    """Return the denominator of a batch's loss; None for a mean over rows."""
    if states_denominator(loss):
        return tf.reduce_sum(tf.cast(loss.denominator(y_true, y_pred), tf.float32))
    if not elements.shape.rank:
        return None
    masks = [get_keras_mask(tensor) for tensor in (y_pred, elements)]
    present = [tf.cast(mask, tf.float32) for mask in masks if mask is not None]
    mask = present[0] if len(present) == 1 else present[0] * present[1] if present else None
    if loss.reduction == "mean_with_sample_weight" and weight is not None:
        weight = tf.cast(weight, tf.float32)
        if mask is None:
            return tf.reduce_sum(weight)
        if len(weight.shape) == len(mask.shape) - 1:
            weight = weight[..., None]
        return tf.reduce_sum(weight * mask)
    return None if mask is None else tf.reduce_sum(mask)


def _has_mask(*tensors: Any) -> bool:
    return any(get_keras_mask(tensor) is not None for tensor in tensors)
