"""Dry runs on the driver: check that columns, model, loss and labels are compatible."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.inputs import matrix_hint
from hvd_estimators.exceptions import DataError, ParamError, ShapeError
from hvd_estimators.fitting.trial import leave_to_ranks, traceless, with_open_sizes
from hvd_estimators.keras.backend import (
    CPU,
    SHAPE_KINDS,
    all_layers,
    has_own_step,
    has_own_test_step,
    model_optimizers,
    torch_layers,
)
from hvd_estimators.keras.denominators import LossDenominators, denominators_of
from hvd_estimators.keras.losses import check_loss, has_own_call, has_own_loss, losses_by_output
from hvd_estimators.keras.metrics import (
    as_logs,
    check_metrics,
    has_own_update,
    leaf_metrics,
    results,
)
from hvd_estimators.keras.outputs import Outputs, symbolic
from hvd_estimators.keras.tensors import (
    ZEROS,
    Field,
    TensorSpec,
    alike,
    input_structure,
    kept_variables,
)
from hvd_estimators.loading.spec import DataSpec


def check_batches(model: keras.Model, data: DataSpec) -> None:
    """Reject batches that a model cannot take.

    Raises
    ------
    DataError
        If a batch has no rows and the model uses batch normalization.
    """
    buffers = (name for layer in torch_layers(model) for name, _ in layer.module.named_buffers())
    is_torchs = any(name.endswith("running_mean") for name in buffers)
    kerass = keras.layers.BatchNormalization
    if is_torchs or any(isinstance(layer, kerass) for layer in all_layers(model)):
        data.require_rows_in_batches("Batch normalization")


logger = logging.getLogger(__name__)


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
        Returns another copy of the model, on which its own ``train_step`` is tried.
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
    test_error : Exception or None
        Failure of ``test_step``, if the model has its own ``train_step``.
    metric_names : list of str or None
        Names of loss and metrics; None if only the ranks find them out.
    counts_rows : bool
        Whether all losses of the model are means over rows.
    joint_steps : str or None
        Why a step needs one batch of each rank, as the end of a sentence; None if it does not.
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
        self._label_cols = label_cols
        self._weight_col = sample_weight_col
        self._label_shapes = label_shapes
        self._inputs: Any = input_structure(model, feature_cols)
        self.output_shapes: list[tuple[int | None, ...]] | None = None
        self.outputs: Outputs | None = None
        self.test_error: Exception | None = None
        self.metric_names: list[str] | None = None
        self.counts_rows = False
        self.joint_steps: str | None = None
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

    def _take_columns(self, columns: Columns) -> None:
        self._columns = columns
        self._row_shapes = {name: array.shape[1:] for name, array in columns.items()}

    def look_at(self, columns: Columns) -> None:
        """Record the columns' shapes without calling the model.

        Raises
        ------
        ParamError
            If only a call can build the model or pair its outputs with labels.
        """
        self._take_columns(columns)
        self._go_without_call("dry_run is False")

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
        with keras.device(CPU):
            try:
                x, outputs = self._call(columns)
            except DataError:
                raise
            except Exception as error:
                kinds = SHAPE_KINDS
                if isinstance(self._inputs, tuple):
                    kinds = (*kinds, AttributeError)  # a tuple has no methods of a dict
                if "Cast string to" in str(error):
                    kinds = (*kinds, type(error))  # TensorFlow also raises it without a GPU
                if has_own_step(self.model):
                    self._try_step(columns)
                elif not leave_to_ranks(error, kinds):
                    raise self._not_taken(error) from error
                self._go_without_call(f"it raised {type(error).__name__}: {error}")
                return
            if self.outputs is None:
                self._take_outputs(outputs)
            self._check_rows(outputs, len(next(iter(columns.values()))))
            self._note_shapes(outputs)
            self._check_copy(x, outputs)
            self._check_flat()
            if has_own_step(self.model):
                self._try_step(columns)
            else:
                self._try_loss(columns)

    def _not_taken(self, error: Exception) -> ShapeError:
        """Return the error for a model that cannot be called."""
        columns = {f.column: self._columns[f.column] for f in keras.tree.flatten(self._inputs)}
        given = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in columns.items())
        remedy = matrix_hint({name: array.shape[1:] for name, array in columns.items()})
        if any(array.dtype.kind in "OSU" for array in columns.values()):
            remedy += (
                " Text needs keras.Input(..., dtype='string') and a layer such as "
                "keras.layers.TextVectorization, or pyspark.ml.feature.StringIndexer before."
            )
        if isinstance(error, NameError):
            remedy += (
                " Keras sends a lambda without the modules that it uses: give keras.layers.Lambda "
                "a named function (def)."
            )
        if isinstance(self._inputs, tuple):
            remedy += (
                " If the model takes a dict of column name to tensor, call it on one before fit()."
            )
        return ShapeError(
            f"the model cannot take the columns. It was called with {given} and raised "
            f"{type(error).__name__}: {error}. Set columns in the order of the model's inputs, or "
            f"to their names, in the shapes and types that it expects.{remedy}",
            param="feature_cols",
        )

    def note_other_sizes(self, batches: Iterable[Columns]) -> None:
        """Leave open each size of an output that differs in other batches of few rows."""
        for columns in batches:
            found = self.output_shapes
            try:
                with keras.device(CPU):
                    self._note_shapes(self._call(columns)[1])
            except Exception as error:
                logger.info("The model does not take a single row (%s)", error)
                continue
            if found is not None and self.output_shapes is not None:
                self.output_shapes = with_open_sizes(found, self.output_shapes)

    def _check_rows(self, outputs: Any, rows: int) -> None:
        """Reject outputs without one entry per row."""
        for output in self._selected(outputs):
            if not output.shape or output.shape[0] != rows:
                raise ShapeError(
                    f"An output of the model has shape {tuple(output.shape)} for {rows} rows. "
                    "Its first dimension must count the rows; outputs can leave out others."
                )

    def _selected(self, outputs: Any) -> list[Any]:
        """Return the selected outputs, or all outputs without a selection."""
        return Outputs.of(self.model, outputs, (), self._selection).select(
            keras.tree.flatten(outputs)
        )

    def _check_flat(self) -> None:
        """Reject outputs of shape ``(rows,)`` that the user's own step or loss compares."""
        if has_own_step(self.model):
            self._reject_flat("train_step")
        elif has_own_loss(self.model):
            self._reject_flat("compute_loss")
        elif self.outputs is not None:
            losses = losses_by_output(self.model.loss, self.outputs)
            for name, loss in zip(self.outputs.labels, losses, strict=True):
                if has_own_call(loss):
                    self._reject_flat(f"the loss {type(loss).__name__}", name)

    def _reject_flat(self, own: str, label: str | None = None) -> None:
        """Raise an error if code of the user's compares a label of other dimensions.

        A number per row is a label of shape ``(rows, 1)``, also for an output of shape ``(rows,)``.
        Keras's losses and metrics align them. Other code would compare each row with all rows.

        Parameters
        ----------
        own : str
            What compares.
        label : str, optional
            The label. Default: all labels.

        Raises
        ------
        ShapeError
            If an output has no dimension besides the rows.
        """
        if self._label_shapes is not None or self.outputs is None:
            return
        shapes = zip(self._label_cols, self.output_shapes or (), strict=True)
        for name, shape in shapes:
            is_number = math.prod(self._row_shapes.get(name, (0,))) == 1
            if label not in (None, name) or shape or not is_number:
                continue
            other = ", or set label_shapes=[[-1]] (an entry for each label)"
            raise ShapeError(
                f"expected an output of shape (rows, 1) for the label {name!r}, which has this "
                f"shape, found (rows,). Keras's own losses and metrics align these shapes, and "
                f"{own} would compare each row with all rows. Return an output of shape "
                f"(rows, 1){'' if self._is_collated else other}.",
                param="model",
            )

    def _try_step(self, columns: Columns) -> None:
        """Run the user's own training step, and the test step, which `test_error` remembers.

        Raises
        ------
        ShapeError
            If the step fails.
        """
        if self._copy is None:
            return
        trial, batch = self._copy(), self.tensors.arrays(columns)
        try:
            with traceless():
                self._compile(trial, self.outputs)
                before, losses = _updates(trial), denominators_of(trial)
                with losses.in_step(batch, False):
                    trial.train_step(batch)
        except Exception as error:
            if leave_to_ranks(error, SHAPE_KINDS):
                return
            given = ", ".join(f"{name} {array.shape}" for name, array in columns.items())
            raise ShapeError(
                f"The model's train_step failed on a batch of {given} with "
                f"{type(error).__name__}: {error}. Without label_cols it gets x, otherwise (x, y). "
                "Set feature_cols and label_cols to what it expects."
            ) from error
        updates = _updates(trial) - before
        if updates > 1:
            self.joint_steps = f"and the model's train_step applies optimizers {updates} times"
        else:
            self._note_losses(losses)
        try:
            with traceless():
                trial.test_step(batch)
        except Exception as error:
            self.test_error = None if leave_to_ranks(error, SHAPE_KINDS) else error

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
            with kept_variables(original), kept_variables(self.model), traceless():
                # Outputs that are random in each call cannot be compared.
                differs = not _same_outputs(outputs, original(x, training=False)) and (
                    _same_outputs(outputs, self.model(x, training=False))
                )
        except Exception as error:
            logger.debug("The given model was not compared with its copy", exc_info=error)
            return
        if differs:
            raise ParamError(
                "model: a copy that Keras makes of it, as for the ranks, returns other outputs for "
                "the same rows. Give each class of its layers a get_config() and a from_config() "
                "that make an equal object, and set in the constructor what call() uses."
            )

    def _call(self, columns: Columns) -> tuple[Any, Any]:
        """Call the model, and return its input and its output."""
        for field in keras.tree.flatten(self._inputs):
            field.check_whole(columns[field.column])
        x = alike(keras.tree.map_structure(lambda f: f.array(columns[f.column]), self._inputs))
        with kept_variables(self.model), traceless():
            return x, self.model(x, training=False)

    def _try_loss(self, columns: Columns) -> None:
        """Compute the loss as in training."""
        try:
            batch = self.tensors.arrays(columns)
        except Exception as error:
            raise ShapeError(
                f"cannot reshape the columns of the labels: {error}", param="label_shapes"
            ) from error
        x, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with kept_variables(self.model):
            try:
                with traceless():
                    outputs = self.model(x, training=True)
            except Exception as error:
                if not leave_to_ranks(error, SHAPE_KINDS):
                    raise ShapeError(
                        "The model cannot be called with training=True: it raised "
                        f"{type(error).__name__}: {error}."
                    ) from error
                return
            losses = denominators_of(self.model)
            given = (x, outputs, labels, weights)
            is_tried = check_loss(self.model, self.outputs, *given, denominators=losses)
            if is_tried:
                self.counts_rows = losses.count_rows
                self._note_losses(losses)
        if is_tried and labels is not None:
            self._batch = (x, labels, outputs, weights)
            self._try_metrics()

    def _note_losses(self, losses: LossDenominators) -> None:
        """Note whether the losses of a step need one batch of each rank."""
        if losses.are_joint:
            self.joint_steps = (
                "and several losses, one of them with a mask, ignored classes, a denominator or "
                "reduction='sum', need one batch"
            )

    def _try_metrics(self) -> None:
        """Compute the metrics as in training."""
        assert self._batch is not None
        try:
            with traceless():
                logs = as_logs(self.model.compute_metrics(*self._batch))
            if not has_own_test_step(self.model):
                self.metric_names = list({**results(self.model), **logs})
        except Exception as error:
            if not leave_to_ranks(error, SHAPE_KINDS):
                raise ShapeError(
                    f"cannot be computed: {type(error).__name__}: {error}. Set names that Keras "
                    "knows, objects or functions that take the labels and outputs.",
                    param="metrics",
                ) from error
        finally:
            self.model.reset_metrics()
        for metric in filter(has_own_update, leaf_metrics(self.model)):
            self._reject_flat(f"the metric {metric.name}")

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


def _updates(model: keras.Model) -> int:
    """Return how often a model's optimizers have been applied."""
    return sum(int(optimizer.iterations) for optimizer in model_optimizers(model))


def _label_shape(
    shape: tuple[int | None, ...], column: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return an output's shape if the label's column has as many elements; None otherwise."""
    sizes = tuple(size for size in shape if size is not None)
    if not shape or column is None or len(sizes) < len(shape):
        return None
    return sizes if math.prod(sizes) == math.prod(column) else None


def _same_outputs(outputs: Any, others: Any) -> bool:
    """Return whether outputs, made of numbers, are equal except for their rounding."""
    a, b = (
        [np.asarray(keras.ops.convert_to_numpy(each), np.float64) for each in keras.tree.flatten(o)]
        for o in (outputs, others)
    )
    return len(a) == len(b) and all(
        x.shape == y.shape and np.allclose(x, y, 1e-3, 1e-5, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )
