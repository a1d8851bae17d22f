"""Denominators of Keras losses over the global batch: masks, ignored classes, sample weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.backend import multiply_no_nan, num_dimensions, ordered, snapshot

if TYPE_CHECKING:
    from hvd_estimators.keras.collectives import GradientAverager

ops: Any = keras.ops


def states_denominator(loss: Any) -> bool:
    """Return whether a user's loss has a method ``denominator(y_true, y_pred)``."""
    return callable(getattr(loss, "denominator", None))


class LossDenominators:
    """Weight the batches of a model's steps: in gradients, losses and metrics.

    With several micro-batches per step, the step's denominator is unknown before the last one. A
    single loss then weights each micro-batch by its denominator instead.

    Parameters
    ----------
    model : keras.Model
        The model.
    averagers : sequence of GradientAverager
        Average the model's gradients.
    passes : int
        Micro-batches per step on this rank.
    full : int
        Rows of a full batch, the unit of weights.
    sum_over_ranks : callable
        Returns the sum of a tensor over the ranks, given the tensor and its name.
    may_be_empty : bool
        Whether batches may have no rows. Metrics then ignore such batches, whose mean is NaN.
        The metrics must be built.

    Attributes
    ----------
    equal_validation : bool
        Whether all ranks validate on the same number of batches.
    """

    def __init__(
        self,
        model: keras.Model,
        averagers: Sequence[GradientAverager],
        passes: int,
        full: int,
        sum_over_ranks: Callable[[Any, str], Any],
        may_be_empty: bool = False,
    ) -> None:
        self._sum_over_ranks = sum_over_ranks
        self.may_be_empty = may_be_empty
        self.equal_validation = True
        self._averagers = averagers
        self._passes = passes
        self._full = full
        self._model: Any = model
        self._is_single = True
        self._weight: Any = None
        self._rows: Any = None
        self._is_training = False
        # Losses of the step that is traced, and those among them that are no means over rows.
        self._calls = self._other_sums = 0
        self._has_sum = False
        self._after: list[Any] = []
        self._denominator: Any = None

    @contextlib.contextmanager
    def _scaling_losses(self) -> Iterator[None]:
        """Scale all losses that the block calls, also those that a step of the user's makes.

        A loss that calls others is a mean over rows, or not, as a whole. The class is changed,
        because Python looks up ``__call__`` there. On TensorFlow, the block runs only while the
        step is traced.
        """
        kind: Any = keras.losses.Loss
        original = kind.__call__
        outer: list[Any] = []

        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if outer:
                return original(loss, y_true, y_pred, sample_weight)
            outer.append(loss)
            try:
                return self._scaled(original, loss, y_true, y_pred, sample_weight)
            finally:
                outer.clear()

        kind.__call__ = call
        try:
            yield
        finally:
            kind.__call__ = original

    @contextlib.contextmanager
    def _weighting_trackers(self) -> Iterator[None]:
        """Weight the means of losses that Keras logs: of all, and of each output.

        Other metrics are changed only so that they ignore batches without rows.
        """
        model, changed = self._model, []
        totals = [m for m in model.metrics if m.name == "loss" and type(m) is keras.metrics.Mean]
        # Exist when the model was called with labels.
        of_outputs = getattr(model._compile_loss, "metrics", ())
        weighted = [*totals[:1], *of_outputs]
        # A metric that is not built yet has no values to keep.
        others = [m for m in model.metrics if m not in weighted and m.variables]
        for metric in (*weighted, *(others if self.may_be_empty else ())):
            update = metric.update_state
            if metric in weighted:
                update = functools.partial(self._update, update, metric in totals)
            if self.may_be_empty:
                update = functools.partial(self._ignore_empty, metric, update)
            attributes = vars(metric)
            own = {name: attributes[name] for name in ("update_state",) if name in attributes}
            changed.append((attributes, own))
            attributes["update_state"] = update
        try:
            yield
        finally:
            for attributes, own in changed:
                del attributes["update_state"]
                attributes.update(own)

    def _ignore_empty(self, metric: Any, update: Any, *args: Any, **kwargs: Any) -> Any:
        before = [snapshot(variable.value) for variable in metric.variables]
        result = update(*args, **kwargs)
        for variable, old in zip(metric.variables, before, strict=True):
            variable.assign(ops.where(self._rows > 0, variable, old))
        return result

    def _update(self, original: Any, is_total: bool, values: Any, sample_weight: Any = None) -> Any:
        if is_total and self._denominator is not None:
            sample_weight = self._denominator
        elif not is_total and sample_weight is None:
            # Keras weights the batches of an output equally, if their rows vary.
            sample_weight = self._weight
        return original(values, sample_weight=sample_weight)

    @contextlib.contextmanager
    def in_step(self, batch: Any, is_training: bool) -> Iterator[None]:
        """Weight the batch of a step that runs or is traced.

        Parameters
        ----------
        batch : structure of tensors
            The argument of the step.
        is_training : bool
            Whether gradients are averaged. In a test step, a single loss is weighted by its
            denominator, so that the loss over all validation rows is exact.
        """
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self._is_single = sum(label is not None for label in keras.tree.flatten(y)) == 1
        self._rows = ops.cast(ops.shape(keras.tree.flatten(x)[0])[0], "float32")
        self._weight, self._is_training = self._rows, is_training
        if is_training:
            for averager in self._averagers:
                averager.weight, averager.applied = self._weight / self._full, 0
        self._calls = self._other_sums = 0
        self._has_sum = False
        self._after, self._denominator = [], None
        try:
            with self._weighting_trackers(), self._scaling_losses():
                yield
        finally:
            self._weight = self._rows = self._denominator = None
            self._after = []
        applied = sum(averager.applied for averager in self._averagers)
        if is_training and self._passes > 1 and applied > 1:
            raise ParamError(
                f"model: its train_step applies optimizers {applied} times per batch, which needs "
                "a step of one batch of each rank. Set backward_passes_per_step=1, and resume on "
                "the number of ranks that started the run."
            )
        if is_training and self._passes > 1 and self.are_joint:
            raise ParamError(
                "loss: several losses need a step of one batch of each rank if one of them has a "
                "mask, ignored classes, a denominator, or reduction='sum'. Set "
                "backward_passes_per_step=1, and resume on the number of ranks that started the "
                "run."
            )
        if not self.equal_validation and (self._has_sum or self.are_joint):
            # The ranks sum in each test step with such losses. The first training step raises, too.
            raise ParamError(
                "loss: reduction='sum', and several losses if one of them has a mask, ignored "
                "classes or a denominator, need as many validation batches on each rank, and some "
                "ranks have fewer rows than batches. Set val_batch_size to 2 or more, with at "
                "least one validation row per rank; or train without validation."
            )

    @property
    def count_rows(self) -> bool:
        """Return whether all losses of the newest step are means over rows."""
        return self._calls > 0 and not self._other_sums

    @property
    def are_joint(self) -> bool:
        """Return whether the losses of the newest step have several denominators."""
        return self._other_sums > 0 and self._calls > 1

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
        if tuple(value.shape) == (0,):
            # Where shapes are known, as on torch, Keras does not reduce a batch without rows.
            value = ops.sum(value)
        if loss.reduction == "sum" and not states_denominator(loss):
            return self._sum(value)
        denominator = _denominator(loss, y_true, y_pred, sample_weight, elements[-1])
        if denominator is None:
            return value
        self._other_sums += 1
        if self._is_training and self._passes > 1:
            for averager in self._averagers:
                averager.weight = denominator / self._full
            self._denominator = denominator
            return value
        if not self._is_training and self._is_single and self._calls == 1:
            self._denominator = denominator
            return self._times(value, denominator > 0)
        self._denominator = None
        counts, weights = self._reduced(ops.stack([denominator, self._weight]))
        own = ops.divide_no_nan(denominator, counts)
        return self._times(value, own * ops.divide_no_nan(weights, self._weight))

    def _sum(self, value: Any) -> Any:
        self._other_sums += 1
        self._has_sum = True
        if self._is_training and self._passes > 1:
            raise ParamError(
                "loss: reduction='sum' needs a step of one batch of each rank. Set "
                "backward_passes_per_step=1, and resume on the number of ranks that started the "
                "run; or set reduction='sum_over_batch_size'."
            )
        weights = self._reduced(ops.reshape(self._weight, (1,)))[0]
        return self._times(value, ops.divide_no_nan(weights, self._weight))

    def _reduced(self, own: Any) -> list[Any]:
        """Sum numbers over the ranks, one reduction after the other."""
        # In 64 bits, which Horovod does not fuse with gradients: sums never depend on timing.
        with ordered(self._after):
            name = f"denominators.{self._other_sums}"
            total = self._sum_over_ranks(ops.cast(own, "float64"), name)
        self._after = [total]
        return [ops.cast(number, "float32") for number in ops.unstack(total)]

    def _times(self, value: Any, factor: Any) -> Any:
        # A batch without rows may have any loss.
        return multiply_no_nan(value, ops.cast(factor, value.dtype))


def denominators_of(model: keras.Model) -> LossDenominators:
    """Return the denominators of a model's losses in one process."""
    return LossDenominators(model, [], 1, 1, lambda tensor, name: tensor)


def _denominator(loss: Any, y_true: Any, y_pred: Any, weight: Any, elements: Any) -> Any:
    """Return the denominator of a batch's loss; None for a mean over rows."""
    if states_denominator(loss):
        return ops.sum(ops.cast(loss.denominator(y_true, y_pred), "float32"))
    if not num_dimensions(elements):
        return None
    masks = [_mask_of(tensor) for tensor in (y_pred, elements)]
    present = [ops.cast(mask, "float32") for mask in masks if mask is not None]
    mask = present[0] if len(present) == 1 else present[0] * present[1] if present else None
    if loss.reduction == "mean_with_sample_weight" and weight is not None:
        weight = ops.cast(weight, "float32")
        if mask is None:
            return ops.sum(weight)
        if len(weight.shape) == len(mask.shape) - 1:
            weight = weight[..., None]
        return ops.sum(weight * mask)
    return None if mask is None else ops.sum(mask)


def _mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)
