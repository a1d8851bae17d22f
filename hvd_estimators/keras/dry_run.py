"""Dry runs on the driver: check that columns, model, loss and labels are compatible."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.inputs import matrix_hint
from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.trial import causes, leave_to_ranks, traceless
from hvd_estimators.keras.backend import (
    CPU,
    SHAPE_KINDS,
    all_layers,
    has_own_step,
    on_tensorflow,
)
from hvd_estimators.keras.losses import check_loss, has_any_loss, has_test_loss
from hvd_estimators.keras.metrics import (
    check_metrics,
)
from hvd_estimators.keras.outputs import Outputs, symbolic
from hvd_estimators.keras.own_step import why_one_batch_per_step
from hvd_estimators.keras.sync_batch_norm import synchronized_layers
from hvd_estimators.keras.tensors import (
    ZEROS,
    Field,
    TensorSpec,
    alike,
    called_with,
    input_structure,
    kept_variables,
    other_structure,
)
from hvd_estimators.loading.spec import DataSpec

LAMBDA_REMEDY = (
    "Keras sends the code of a Lambda's lambda without the modules and variables that the lambda "
    "uses. Write a named function (def square(x): return ops.square(x)) and set "
    "keras.layers.Lambda(square), or write a layer with a call()."
)


def check_columns(fields: Sequence[Field], columns: Columns, param: str, end: str) -> None:
    """Reject columns whose kind or shape does not fit a model's inputs or labels.

    Parameters
    ----------
    fields : sequence of Field
        The expected form of each column.
    columns : mapping of str to numpy.ndarray
        Some rows.
    param, end : str
        The parameter that names the columns, and "input" or "label", for messages.

    Raises
    ------
    ShapeError
        If a column does not fit.
    """
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


def check_batches(model: keras.Model, data: DataSpec) -> None:
    """Reject batches that a model cannot take.

    Raises
    ------
    DataError
        If a batch has no rows and the model uses batch normalization.
    ParamError
        If a rank runs several shards and a layer of the model does not support this.
    """
    if synchronized_layers(model):
        data.require_one_shard_per_rank(
            "model", "over which BatchNormalization(synchronized=True) takes no statistics"
        )
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in all_layers(model)):
        data.require_rows_in_batches("Batch normalization")


def text_remedy(columns: Columns, inputs: Any) -> str:
    """Return advice about text columns among a model's inputs; empty if there are none."""
    text = [
        field.column
        for field in keras.tree.flatten(inputs)
        if columns[field.column].dtype.kind in "OSU"
    ]
    if not text:
        return ""
    return (
        f" The columns {', '.join(map(repr, text))} are text: make numbers of it in the model, "
        "with keras.layers.TextVectorization, StringLookup or Hashing, or before, with "
        "pyspark.ml.feature.StringIndexer or a transformation_fn."
    )


logger = logging.getLogger(__name__)


# Errors of models that index or unpack an input of another structure.
_INDEXING_KINDS: tuple[type[BaseException], ...] = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    *SHAPE_KINDS,
)


class DryRun:
    """Trial run of a few rows through a model and its loss.

    The dry run builds a model that is not built, so pass a copy.

    Parameters
    ----------
    model : keras.Model
        The model.
    feature_cols, label_cols : sequence of str
        Columns of the inputs and outputs.
    sample_weight_col : str or None
        Weight of each row.
    label_shapes : sequence of sequence of int, or None
        Shape of each label; the first size is -1, for the rows.
    compile : callable, optional
        Compiles a model when its outputs are known. Takes None instead of outputs if labels do not
        pair with outputs. Default: the model is already compiled.
    class_weight : mapping, optional
        Weight of each class of the only label.
    copy : callable, optional
        Returns another copy of the model, for a second call if the first copy rejects its input.
        The second call passes a dict of column name to tensor instead of a tensor or tuple, or the
        reverse.
    compares : bool
        Whether a loss or metrics compare labels to outputs.
    selection : sequence of (int or str), optional
        Positions or names of the outputs that are predictions.
    original : keras.Model, optional
        The user's model, whose outputs the copy must reproduce.
    is_collated : bool
        Whether the lengths of rows differ by batch. Labels then keep their shapes.

    Attributes
    ----------
    model : keras.Model
        The model, built and compiled after `run`.
    outputs : Outputs or None
        The model's outputs, when known; None if labels do not pair with outputs.
    output_shapes : list of tuple of int or None
        Shape of one row of each label's output; None for a size that only a call determines.
    tensors : TensorSpec
        Conversion of columns to tensors.
    has_test_loss : bool
        False if the model's ``test_step`` is known to lack a loss.
    takes_one_row : bool or None
        Whether the model can be called with one row; None if unknown.
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
        selection: Sequence[int | str] | None = None,
        original: keras.Model | None = None,
        is_collated: bool = False,
    ) -> None:
        self.model = model
        self._original = original
        self._is_collated = is_collated
        self._class_weight = class_weight
        self._compile = compile
        self._copy = copy
        self._compares = compares and not has_own_step(model)
        self._selection = selection
        self._feature_cols = feature_cols
        self._label_cols = label_cols
        self._weight_col = sample_weight_col
        self._label_shapes = label_shapes
        self._inputs: Any = input_structure(model, feature_cols)
        self.output_shapes: list[tuple[int | None, ...]] | None = None
        self.outputs: Outputs | None = None
        self.has_test_loss = True
        self.takes_one_row: bool | None = None
        self._row_shapes: dict[str, tuple[int, ...]] = {}
        self._columns: Columns = {}
        self._batch: tuple[Any, ...] | None = None
        outputs = symbolic(model, "output")
        if outputs is not None:
            self._take_outputs(outputs)

    @property
    def tensors(self) -> TensorSpec:
        """Conversion of columns to tensors, as far as it is known."""
        labels = self._label_fields()
        structure: Any
        if self.outputs is None:
            structure = labels[0] if len(labels) == 1 else tuple(labels)
        else:
            fields = dict(zip(self._label_cols, labels, strict=True))
            structure = self.outputs.pack(
                # Keras compares structures, so an output without a label gets unused zeros.
                [ZEROS if label is None else fields[label] for label in self.outputs.labels]
            )
        return TensorSpec(self._inputs, structure, self._weight_col, self._class_weight)

    @functools.cached_property
    def why_one_batch_per_step(self) -> str | None:
        """See `why_one_batch_per_step`; None for a model without its own ``train_step``."""
        if self._copy is None or not has_own_step(self.model):
            return None
        trial = self._copy()
        self._compile(trial, self.outputs)
        return why_one_batch_per_step(trial, self.tensors.arrays(self._columns))

    def _take_columns(self, columns: Columns) -> None:
        self._columns = columns
        self._row_shapes = {name: array.shape[1:] for name, array in columns.items()}

    def look_at(self, columns: Columns) -> None:
        """Record the columns' shapes without calling the model.

        Raises
        ------
        ParamError
            If only a call can build the model or determine the structure of its inputs.
        """
        self._take_columns(columns)
        self._go_without_call("dry_run is False")
        model, inputs = self.model, self._inputs
        is_known = len(self._feature_cols) == 1 or has_own_step(model) or called_with(model)
        if not is_known and other_structure(model, inputs, self._feature_cols) is not None:
            raise ParamError(
                "model: only a call shows if it takes a tuple or a dict of column name to tensor, "
                "and dry_run is False. Call the model on a few rows before fit(), or set "
                "dry_run=True."
            )

    def run(self, columns: Columns) -> None:
        """Call the model and its loss with some rows.

        The driver is not a rank and may have no GPU. Calls that cannot run on the driver are left
        to the ranks, with a warning.

        Raises
        ------
        ShapeError
            If the model cannot take the columns, the loss cannot take outputs and labels, or the
            numbers of outputs and labels differ.
        ParamError
            If the model is not built and cannot be called on the driver.
        """
        self._take_columns(columns)
        check_columns(self._input_fields(), columns, "feature_cols", "input")
        with keras.device(CPU), contextlib.ExitStack() as stack:
            try:
                x, outputs = self._call(columns, stack)
            except Exception as error:
                called = self._call_otherwise(columns, stack, error)
                if isinstance(called, str) and has_own_step(self.model):
                    self._try_step(columns)
                    self._go_without_call(f"it raised {type(error).__name__}: {error}")
                    if type(self.model).call is keras.Model.call:
                        self.has_test_loss = has_test_loss(self.model)
                    return
                if isinstance(called, str):
                    if isinstance(error, NameError):
                        *_, first = causes(error)  # Keras repeats the message with the arguments.
                        raise ParamError(
                            f"model: its call fails on the ranks, too (NameError: {first}). "
                            f"{LAMBDA_REMEDY}"
                        ) from error
                    remedy = text_remedy(columns, self._inputs)
                    # A conversion of text to numbers may raise the same errors as a missing GPU.
                    kinds = SHAPE_KINDS
                    if remedy and on_tensorflow():
                        import tensorflow as tf

                        kinds = (*kinds, tf.errors.UnimplementedError)
                    if leave_to_ranks(error, kinds):
                        self._go_without_call(f"it raised {type(error).__name__}: {error}")
                        return
                    arrays = {f: f.array(columns[f.column]) for f in self._input_fields()}
                    given = ", ".join(f"{f.column} {x.shape} {x.dtype}" for f, x in arrays.items())
                    raise ShapeError(
                        f"The model cannot take the feature columns. It was called with {given} "
                        f"and raised {type(error).__name__}: {error}{called}. Set feature_cols in "
                        "the order of the model's inputs, or to the names of its inputs, in the "
                        "shapes that it expects."
                        f"{matrix_hint({f.column: x.shape[1:] for f, x in arrays.items()})}"
                        f"{remedy}"
                    ) from error
                x, outputs = called
            if self.outputs is None:
                self._take_outputs(outputs)
            self._check_rows(outputs, len(next(iter(columns.values()))))
            self._note_shapes(outputs)
            self._check_copy(x, outputs)
            self.has_test_loss = has_test_loss(self.model)
            if has_any_loss(self.model, x):
                self._check_loss(x, outputs, columns)
            self._try_one_row(columns, outputs)

    def _try_one_row(self, columns: Columns, of_several: Any) -> None:
        """Call the model with a single row, and compare the outputs with a call of several rows."""
        row = {name: array[:1] for name, array in columns.items()}
        try:
            with contextlib.ExitStack() as stack:
                _, outputs = self._call(row, stack)
        except Exception as error:
            # Several rows have passed.
            self.takes_one_row = None if leave_to_ranks(error, SHAPE_KINDS) else False
            return
        self.takes_one_row = True
        one, several = keras.tree.flatten(outputs), keras.tree.flatten(of_several)
        if any(len(a.shape) < len(b.shape) for a, b in zip(one, several, strict=False)):
            raise ShapeError(
                f"The model's outputs for one row have the shapes {[tuple(a.shape) for a in one]}, "
                "without the dimension of rows. Give squeeze() an axis, such as "
                "keras.ops.squeeze(x, axis=-1)."
            )

    def note_other_sizes(self, batches: Iterable[Columns]) -> None:
        """Leave open each size of an output that differs in other batches of few rows."""
        for columns in batches:
            found = self.output_shapes
            try:
                with keras.device(CPU), contextlib.ExitStack() as stack:
                    self._note_shapes(self._call(columns, stack)[1])
            except Exception as error:
                logger.info("The model does not take a single row (%s)", error)
                continue
            if found is not None and self.output_shapes is not None:
                self.output_shapes = [
                    tuple(a if a == b else None for a, b in zip(shape, other, strict=True))
                    for shape, other in zip(found, self.output_shapes, strict=True)
                ]

    def _check_rows(self, outputs: Any, rows: int) -> None:
        """Reject outputs without one entry per row."""
        flat = self._selected(outputs)
        labels: Sequence[str | None] = [None] * len(flat)
        if self.outputs is not None and self._selection is None:
            flat, labels = keras.tree.flatten(outputs), self.outputs.labels
        for label, output in zip(labels, flat, strict=True):
            if not output.shape or output.shape[0] != rows:
                which = "" if label is None else f" for label {label!r}"
                raise ShapeError(
                    f"The model's output{which} has shape {tuple(output.shape)} for {rows} rows. "
                    "Its first dimension must count the rows; outputs can leave out others."
                )

    def _selected(self, outputs: Any) -> list[Any]:
        """Return the selected outputs, or all outputs without a selection."""
        return Outputs.of(self.model, outputs, (), self._selection).select(
            keras.tree.flatten(outputs)
        )

    def _try_step(self, columns: Columns) -> None:
        """Run the user's own training step, which may call the model differently from `run`.

        Raises
        ------
        ShapeError
            If the step fails.
        """
        assert self._copy is not None
        trial = self._copy()
        try:
            with traceless():
                self._compile(trial, None)
                trial.train_step(self.tensors.arrays(columns))
        except Exception as error:
            if leave_to_ranks(error, SHAPE_KINDS):
                return
            given = ", ".join(f"{name} {array.shape}" for name, array in columns.items())
            raise ShapeError(
                f"The model's train_step failed on a batch of {given} with "
                f"{type(error).__name__}: {error}. Without label_cols it gets x, otherwise (x, y). "
                "Set feature_cols and label_cols to what it expects."
            ) from error

    def _check_copy(self, x: Any, outputs: Any) -> None:
        """Compare the given model's outputs with the outputs of the copy for training.

        Raises
        ------
        ParamError
            If the outputs differ.
        """
        original = self._original
        if original is None or not original.built:
            return
        try:
            with kept_variables(original), traceless():
                expected = original(x, training=False)
            if _same_outputs(outputs, expected):
                return
            with traceless():
                again = self.model(x, training=False)
        except Exception as error:
            logger.debug("The given model was not compared with its copy", exc_info=error)
            return
        # Outputs that are random in each call cannot be compared.
        if _same_outputs(outputs, again):
            raise ParamError(
                "model: a copy that Keras makes of it, as for the ranks, returns other outputs for "
                "the same rows. Give each class of its layers a get_config() and a from_config() "
                "that make an equal object, and set in the constructor what call() uses."
            )

    def _input_fields(self) -> list[Field]:
        fields: list[Field] = keras.tree.flatten(self._inputs)
        return fields

    def _call(self, columns: Columns, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        """Call the model, and return its input and its output."""
        x = alike(keras.tree.map_structure(lambda f: f.array(columns[f.column]), self._inputs))
        stack.enter_context(kept_variables(self.model))
        with traceless():
            return x, self.model(x, training=False)

    def _call_otherwise(
        self, columns: Columns, stack: contextlib.ExitStack, error: Exception
    ) -> tuple[Any, Any] | str:
        """Call the model with another input structure; return the error as text if this fails."""
        other = other_structure(self.model, self._inputs, self._feature_cols)
        if other is None or self._copy is None or not isinstance(error, _INDEXING_KINDS):
            return ""
        before = self.model, self._inputs
        # The first copy may be partly built.
        self.model, self._inputs = self._copy(), other
        try:
            return self._call(columns, stack)
        except Exception as second:
            called_by = "a dict of column name to tensor" if isinstance(other, dict) else "a tuple"
            self.model, self._inputs = before
            return f" (and with {called_by} {type(second).__name__}: {second})"

    def _check_loss(self, x: Any, outputs: Any, columns: Columns) -> None:
        tensors = self.tensors
        check_columns(list(tensors.label_fields()), columns, "label_shapes", "label")
        batch = tensors.arrays(columns)
        if not self._label_cols:
            check_loss(self.model, None, x, outputs, None, None)
            return
        labels = batch[1]
        weights = None if len(batch) == 2 else batch[2]
        try:
            is_tried = check_loss(self.model, self.outputs, x, outputs, labels, weights)
        except ShapeError:
            if not has_own_step(self.model):
                raise
            # The step may pass other values than outputs and labels to the compiled loss.
            self._try_step(columns)
            return
        if is_tried:
            self._batch = (x, labels, outputs, *batch[2:])

    def check_metrics(self) -> None:
        """Check that the ranks' metrics can be summed, after `run`; see `check_metrics`."""
        if self._batch is not None:
            with keras.device(CPU):
                check_metrics(self.model, *self._batch)

    def _go_without_call(self, reason: str) -> None:
        """Leave a model that must not be called on the driver to the ranks."""
        parts = all_layers(self.model, include_self=False)
        if not self.model.built and not (parts and all(part.built for part in parts)):
            raise ParamError(
                f"model: it is not built, and cannot be built on the driver ({reason}). Call it on "
                "a few rows before fit(), or define its build()."
            )
        if self.output_shapes is not None:
            return
        if len(self._label_cols) > 1 and not has_own_step(self.model):
            raise ParamError(
                "model: its outputs are needed to pair them with labels, and it cannot be called "
                f"on the driver ({reason}). Set a functional model."
            )
        self._compile(self.model, None)

    def _take_outputs(self, outputs: Any) -> None:
        try:
            if self._label_cols and (self._compares or self._selection is None):
                self.outputs = Outputs.of(self.model, outputs, self._label_cols, self._selection)
        except ShapeError:
            # The user's own train step, or losses of layers, need not compare labels to outputs.
            if self._compares or self._selection is not None:
                raise
        self._note_shapes(outputs)
        self._compile(self.model, self.outputs)

    def _note_shapes(self, outputs: Any) -> None:
        """Record the shapes of the labels' outputs; only real rows determine all sizes."""
        description, flat = self.outputs, keras.tree.flatten(outputs)
        flat = self._selected(outputs) if description is None else description.select(flat)
        self.output_shapes = [tuple(tensor.shape[1:]) for tensor in flat]

    def _label_fields(self) -> list[Field]:
        names = list(self._label_cols)
        if self._label_shapes is not None:
            return [
                Field(name, tuple(shape[1:]))
                for name, shape in zip(names, self._label_shapes, strict=True)
            ]
        shapes = self.output_shapes
        if shapes is None or self.outputs is None or self._is_collated:
            return [Field(name) for name in names]
        return [
            # A label with as many elements as its output is compared in the output's shape.
            Field(name, _label_shape(shape, self._row_shapes.get(name)))
            for name, shape in zip(names, shapes, strict=True)
        ]


def _label_shape(
    shape: tuple[int | None, ...], column: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return an output's shape if the label's column has as many elements; None otherwise."""
    sizes = tuple(size for size in shape if size is not None)
    if not shape or column is None or len(sizes) < len(shape):
        return None
    return sizes if math.prod(sizes) == math.prod(column) else None


def _same_outputs(outputs: Any, others: Any) -> bool:
    flat, other = keras.tree.flatten(outputs), keras.tree.flatten(others)
    return len(flat) == len(other) and all(map(_same_output, flat, other))


def _same_output(output: Any, other: Any) -> bool:
    a, b = keras.ops.convert_to_numpy(output), keras.ops.convert_to_numpy(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind in "OSU":
        return bool((a == b).all())
    return np.allclose(a.astype(np.float64), b.astype(np.float64), 1e-3, 1e-5, equal_nan=True)
