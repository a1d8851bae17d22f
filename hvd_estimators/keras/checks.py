"""Dry runs on the driver: whether columns, model, loss and labels fit each other."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.exceptions import DataError, ParamError, ShapeError
from hvd_estimators.fitting.dry_run import leave_to_ranks, traceless
from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.inputs import called_with, input_structure, other_structure
from hvd_estimators.keras.losses import (
    NO_LOSS,
    added_losses,
    compares_elements,
    has_loss,
    has_own_step,
    losses_by_output,
)
from hvd_estimators.keras.metric_states import check_metrics
from hvd_estimators.keras.outputs import Outputs, symbolic
from hvd_estimators.keras.synchronized import synchronized_layers
from hvd_estimators.keras.tensors import ZEROS, Field, TensorSpec, alike
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.parquet.columns import Columns

__all__ = ["DryRun", "call_on_zeros", "check_batches", "kept_random_state"]

# What TensorFlow raises for shapes, beside Python's own exceptions.
_SHAPE_KINDS = (tf.errors.InvalidArgumentError,)

# What a model raises that indexes or unpacks something else than it is given.
_INDEXING_KINDS = (TypeError, ValueError, AttributeError, LookupError, *_SHAPE_KINDS)


class DryRun:
    """A few rows through a model and its loss. Builds the model where it was not: give a copy.

    Parameters
    ----------
    model : keras.Model
        The model.
    feature_cols, label_cols : sequence of str
        Columns of the inputs and outputs.
    sample_weight_col : str or None
        Weight of each row.
    label_shapes : sequence of sequence of int, or None
        Shape of each label, -1 for the rows first.
    compile : callable, optional
        Compiles a model, once its outputs are known; None stands for labels that are none of
        its outputs. Default: the model is compiled.
    class_weight : mapping, optional
        Weight of each class of the only label.
    copy : callable, optional
        Returns another copy of the model, which is tried where the first cannot be called with a
        tensor or a tuple; it is then called with a dict of column name to tensor.
    compares : bool
        Whether labels are compared to outputs, by a loss or by metrics.

    Attributes
    ----------
    model : keras.Model
        The model, built and compiled after `run`.
    outputs : Outputs or None
        Its outputs, as soon as they are known; None if labels are none of its outputs.
    output_shapes : list of tuple of int
        Shape of one row of each label's output.
    tensors : TensorSpec
        How columns become tensors.
    """

    def __init__(
        self,
        model: keras.Model,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        sample_weight_col: str | None,
        label_shapes: Sequence[Sequence[int]] | None,
        compile: Callable[[keras.Model, Outputs | None], None] = lambda model, outputs: None,
        class_weight: Mapping[int, float] | None = None,
        copy: Callable[[], keras.Model] | None = None,
        compares: bool = True,
    ) -> None:
        self.model = model
        self._class_weight = class_weight
        self._compile = compile
        self._copy = copy
        self._compares = compares and not has_own_step(model)
        self._feature_cols = feature_cols
        self._label_cols = label_cols
        self._weight_col = sample_weight_col
        self._label_shapes = label_shapes
        self._inputs: Any = input_structure(model, feature_cols)
        self.output_shapes: list[tuple[int, ...]] | None = None
        self.outputs: Outputs | None = None
        self._known: dict[str, tuple[int, ...]] = {}
        self._batch: tuple[Any, ...] | None = None
        outputs = symbolic(model, "output")
        if outputs is not None:
            self._take_outputs(outputs)

    @property
    def tensors(self) -> TensorSpec:
        """How columns become tensors, as far as it is known by now."""
        labels = self._label_fields()
        structure: Any
        if self.outputs is None:
            structure = labels[0] if len(labels) == 1 else tuple(labels)
        else:
            fields = dict(zip(self._label_cols, labels, strict=True))
            structure = self.outputs.pack(
                # Keras compares structures: an output without a label is compared to nothing.
                [ZEROS if label is None else fields[label] for label in self.outputs.labels]
            )
        return TensorSpec(self._inputs, structure, self._weight_col, self._class_weight)

    def look_at(self, columns: Columns) -> None:
        """Note the columns' shapes, and call nothing.

        Raises
        ------
        ParamError
            If the model is not built, which takes a call.
        """
        self._known = {name: array.shape[1:] for name, array in columns.items()}
        self._go_without_call("dry_run is False")
        model, inputs = self.model, self._inputs
        is_known = len(self._feature_cols) == 1 or has_own_step(model) or called_with(model)
        if not is_known and other_structure(model, inputs, self._feature_cols) is not None:
            raise ParamError(
                "model: there is no telling whether it takes a tuple or a dict of column name to "
                "tensor, as it was not called yet and dry_run is False. Call it on a few rows, in "
                "the form that it takes, before it is given, or leave dry_run on."
            )

    def run(self, columns: Columns) -> None:
        """Call the model and its loss with some rows.

        What cannot run in this process, which is no rank and may have no GPU, is left to the ranks
        with a warning.

        Raises
        ------
        ShapeError
            If the model cannot take the columns, its outputs are not as many as the labels, or
            the loss cannot take outputs and labels.
        ParamError
            If the model is not built, and cannot be called here.
        """
        self._known = {name: array.shape[1:] for name, array in columns.items()}
        self._check_columns(self._input_fields(), columns, "feature_cols", "input")
        with tf.device("CPU:0"), contextlib.ExitStack() as stack:
            try:
                x, outputs = self._call(columns, stack)
            except Exception as error:
                called = self._call_otherwise(columns, stack, error)
                if isinstance(called, str):
                    remedy = _text_remedy(columns, self._inputs)
                    # Numbers that are made of text raise what a missing GPU may raise, too.
                    kinds = (
                        (*_SHAPE_KINDS, tf.errors.UnimplementedError) if remedy else _SHAPE_KINDS
                    )
                    if leave_to_ranks(error, kinds):
                        self._go_without_call(f"it raised {type(error).__name__}: {error}")
                        return
                    arrays = {f: f.array(columns[f.column]) for f in self._input_fields()}
                    given = ", ".join(f"{f.column} {x.shape} {x.dtype}" for f, x in arrays.items())
                    raise ShapeError(
                        f"The model cannot take the feature columns. It was called with {given} "
                        f"and raised {type(error).__name__}: {error}{called}. Set feature_cols in "
                        "the order of the model's inputs, in the shapes that it expects."
                        f"{remedy}"
                    ) from error
                x, outputs = called
            if self.outputs is None:
                self._take_outputs(outputs)
            self._check_rows(outputs, len(next(iter(columns.values()))))
            if self._has_any_loss(x):
                self._check_loss(x, outputs, columns)

    def _input_fields(self) -> list[Field]:
        fields: list[Field] = keras.tree.flatten(self._inputs)
        return fields

    def _call(self, columns: Columns, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        """Return what the model is called with, and what it returns."""
        x = alike(keras.tree.map_structure(lambda f: f.array(columns[f.column]), self._inputs))
        stack.enter_context(_kept_variables(self.model))
        with traceless():
            return x, self.model(x, training=False)

    def _call_otherwise(
        self, columns: Columns, stack: contextlib.ExitStack, error: Exception
    ) -> tuple[Any, Any] | str:
        """Call a model that indexes its inputs in another way; why it cannot be, in words."""
        other = other_structure(self.model, self._inputs, self._feature_cols)
        if other is None or self._copy is None or not isinstance(error, _INDEXING_KINDS):
            return ""
        before = self.model, self._inputs
        # The first may be half built.
        self.model, self._inputs = self._copy(), other
        try:
            return self._call(columns, stack)
        except Exception as second:
            called_by = "a dict of column name to tensor" if isinstance(other, dict) else "a tuple"
            self.model, self._inputs = before
            return f" (and with {called_by} {type(second).__name__}: {second})"

    def _has_any_loss(self, x: Any) -> bool:
        """Return whether there is a loss to try: of the model, or one that its layers add."""
        model = self.model
        self._check_added()
        if has_loss(model) or has_own_step(model):
            return has_loss(model)
        if not added_losses(model):
            try:
                with traceless():
                    model(x, training=True)
            except Exception as error:
                if leave_to_ranks(error, _SHAPE_KINDS):
                    return False
                raise ShapeError(
                    "The model cannot be called with training=True: it raised "
                    f"{type(error).__name__}: {error}."
                ) from error
            self._check_added()
        if not added_losses(model):
            raise ParamError(NO_LOSS)
        return True

    def _check_added(self) -> None:
        """Refuse added losses that are one number per row: Keras sums them up."""
        for loss in added_losses(self.model):
            if loss.shape.rank:
                raise ShapeError(
                    f"add_loss: expected a number, found shape {tuple(loss.shape)}. Add the mean "
                    "over the rows (keras.ops.mean), so that the ranks' gradients can be averaged."
                )

    def check_metrics(self) -> None:
        """Make sure that ranks' metrics can be added up, after `run`; see `check_metrics`."""
        if self._batch is not None:
            with tf.device("CPU:0"), traceless():
                check_metrics(self.model, *self._batch)

    def _go_without_call(self, reason: str) -> None:
        """Leave a model that is not to be called here to the ranks."""
        parts = all_layers(self.model, include_self=False)
        if not self.model.built and not (parts and all(part.built for part in parts)):
            raise ParamError(
                f"model: it is not built, and cannot be built on the driver ({reason}). Call it on "
                "a few rows before it is given, where it can run, or define its build()."
            )
        if self.output_shapes is not None:
            return
        if len(self._label_cols) > 1 and not has_own_step(self.model):
            raise ParamError(
                "model: it does not tell its outputs, so that there is no telling which of them "
                f"belongs to which label, and it cannot be called on the driver ({reason}). Set a "
                "functional model."
            )
        self._compile(self.model, None)

    def _take_outputs(self, outputs: Any) -> None:
        flat = keras.tree.flatten(outputs)
        try:
            self.outputs = Outputs.of(self.model, outputs, self._label_cols)
            flat = self.outputs.select(flat, self._label_cols)
        except ShapeError:
            # A train step of the user's own, or losses of layers, need not compare labels to
            # outputs.
            if self._compares:
                raise
        self.output_shapes = [tuple(tensor.shape[1:]) for tensor in flat]
        self._compile(self.model, self.outputs)

    def _label_fields(self) -> list[Field]:
        names = list(self._label_cols)
        if self._label_shapes is not None:
            return [
                Field(name, tuple(shape[1:]))
                for name, shape in zip(names, self._label_shapes, strict=True)
            ]
        shapes = self.output_shapes
        if shapes is None or self.outputs is None:
            return [Field(name) for name in names]
        return [
            # A label of as many elements as its output is compared in the output's shape.
            Field(name, shape if _same_size(shape, self._known.get(name)) else None)
            for name, shape in zip(names, shapes, strict=True)
        ]

    def _check_columns(
        self, fields: Sequence[Field], columns: Columns, param: str, end: str
    ) -> None:
        for field in fields:
            array = columns[field.column]
            shape, is_text = array.shape[1:], array.dtype.kind in "OSU"
            if field.dtype is not None and is_text != (field.dtype == "string"):
                raise ShapeError(
                    f"{param}: column {field.column!r} holds {'text' if is_text else array.dtype}, "
                    f"and the model's {end} for it is of type {field.dtype}. Set columns in the "
                    f"order of the model's {end}s; text takes keras.Input(..., dtype='string')."
                )
            if not field.fits(shape):
                raise ShapeError(
                    f"{param}: a row of column {field.column!r} has shape {shape}, and the model's "
                    f"{end} for it has {field.shape}. Set columns in the order of the model's "
                    f"{end}s, with as many elements as these."
                )

    def _check_rows(self, outputs: Any, rows: int) -> None:
        flat = keras.tree.flatten(outputs)
        labels = (None,) * len(flat) if self.outputs is None else self.outputs.labels
        for label, output in zip(labels, flat, strict=True):
            if not output.shape or output.shape[0] != rows:
                which = "" if label is None else f" for label {label!r}"
                raise ShapeError(
                    f"The model's output{which} has shape {tuple(output.shape)} for "
                    f"{rows} rows. Its first dimension must count the rows."
                )

    def _check_loss(self, x: Any, outputs: Any, columns: Columns) -> None:
        tensors = self.tensors
        self._check_columns(list(tensors.label_fields()), columns, "label_shapes", "label")
        batch = tensors.arrays(columns)
        labels = keras.tree.map_structure(tf.convert_to_tensor, batch[1])
        compared = self._compared(outputs, labels)
        shapes = "; ".join(
            f"{name}: output {tuple(output.shape)}, label {tuple(label.shape)}"
            for name, output, label, _ in compared
        )
        remedy = "Set label_cols and the model's outputs to the same shapes, or label_shapes."
        try:
            with traceless():
                value = self.model.compute_loss(
                    x, labels, outputs, None if len(batch) == 2 else tf.convert_to_tensor(batch[2])
                )
        except Exception as error:
            if leave_to_ranks(error, _SHAPE_KINDS):
                return
            raise ShapeError(
                f"The loss cannot take outputs and labels ({shapes}): {type(error).__name__}: "
                f"{error}. {remedy}"
            ) from error
        if value is not None and value.shape.rank:
            raise ShapeError(f"The loss must return a number, found shape {tuple(value.shape)}.")
        self._batch = (x, labels, outputs, *batch[2:])
        for _, output, label, loss in compared:
            # Labels that only broadcast to the output train on something nobody meant.
            sizes = [int(np.prod(tensor.shape[1:])) for tensor in (output, label)]
            if sizes[0] != sizes[1] and compares_elements(loss):
                raise ShapeError(
                    f"The loss compares outputs and labels element by element ({shapes}). {remedy}"
                )

    def _compared(self, outputs: Any, labels: Any) -> list[tuple[str, Any, Any, Any]]:
        """Return name, output, label and loss of each output that has a label."""
        if self.outputs is None:
            return []
        return [
            (name, output, label, loss)
            for name, output, label, loss in zip(
                self.outputs.labels,
                keras.tree.flatten(outputs),
                keras.tree.flatten(labels),
                losses_by_output(self.model.loss, self.outputs),
                strict=True,
            )
            if name is not None
        ]


def check_batches(model: keras.Model, data: DataSpec) -> None:
    """Refuse batches that a model cannot take.

    Raises
    ------
    DataError
        If a batch has no rows and the model normalizes batches.
    ParamError
        If a rank plays several shards, which a layer cannot be made to do.
    """
    plan = data.train_plan
    if synchronized_layers(model):
        data.require_one_shard_per_rank(
            "model", "over which BatchNormalization(synchronized=True) takes no statistics"
        )
    sizes = [
        size
        for shard in range(plan.num_shards)
        for size in plan.batch_sizes(shard, data.batch_size)
    ]
    has_batch_norm = any(
        isinstance(layer, keras.layers.BatchNormalization) for layer in all_layers(model)
    )
    if has_batch_norm and 0 in sizes:
        raise DataError(
            "Batch normalization needs a row on every rank in every step, and there are "
            f"{sum(sizes)} rows for {plan.num_shards} ranks. Set num_proc or batch_size so that "
            "the rows can be shared out."
        )


def call_on_zeros(model: keras.Model, inputs: Any) -> Any:
    """Return the outputs of a model for two rows of zeros; the inputs have to tell their shapes."""
    x = alike(keras.tree.map_structure(lambda field: field.zeros(2), inputs))
    with kept_random_state(), tf.device("CPU:0"):
        return model(x, training=False)


def _text_remedy(columns: Columns, inputs: Any) -> str:
    text = [
        field.column
        for field in keras.tree.flatten(inputs)
        if columns[field.column].dtype.kind in "OSU"
    ]
    if not text:
        return ""
    return (
        f" The columns {_listed(text)} are text: make numbers of it in the model, with "
        "keras.layers.TextVectorization, StringLookup or Hashing, or before, with "
        "pyspark.ml.feature.StringIndexer or a transformation_fn."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _same_size(shape: tuple[int | None, ...], other: tuple[int, ...] | None) -> bool:
    if not shape or other is None or None in shape:
        return False
    return math.prod(size or 0 for size in shape) == math.prod(other)


@contextlib.contextmanager
def _kept_variables(model: keras.Model) -> Iterator[None]:
    """Leave what a built model keeps as it is: layers may count calls, or draw random numbers."""
    kept = [(v, v.numpy()) for v in model.variables] if model.built else []
    try:
        yield
    finally:
        for variable, value in kept:
            variable.assign(value)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave Python's and NumPy's random numbers as they are: Keras draws seeds from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
