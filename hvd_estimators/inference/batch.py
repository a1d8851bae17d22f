"""A batch of rows: its Arrow columns as arrays, and a model's predictions on them.

No step makes a Python object per row. Imports no PySpark and no framework, because predictions
without Spark use this module, too.
"""

from __future__ import annotations

import abc
import collections
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array, Columns, rows_of, to_array, valid_rows
from hvd_estimators.data.exact import check_array
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.rows import ROWS, RowTable
from hvd_estimators.exceptions import (
    DataError,
    GpuError,
    HvdEstimatorsError,
    PredictionError,
    ShapeError,
)
from hvd_estimators.inference.classification import ClassScores
from hvd_estimators.inference.errors import described, naming_inputs
from hvd_estimators.loading.collate import Collate
from hvd_estimators.loading.transform import Transformation

Result = TypeVar("Result")

Predictor = Callable[[list[Array]], list[Array]]
"""Function from feature arrays to output arrays, both with rows first. Runs on executors."""


NULL_REMEDY = (
    "fill or drop them before transform(), or set handleInvalid: with 'keep' such rows get null "
    "predictions, with 'skip' they are left out."
)


@dataclass(frozen=True)
class Resources:
    """CPU threads and GPU that a predictor may use.

    Attributes
    ----------
    num_threads : int or None
        Number of compute threads; None for the framework's default.
    gpu : int or None
        Number of the GPU among the GPUs that the process sees; None for the CPU.
    named : str or None
        The user's name for the device; None if Spark assigned the device.
    """

    num_threads: int | None = None
    gpu: int | None = None
    named: str | None = None

    def among(self, visible: int) -> int | None:
        """Return the number of the GPU if a framework sees it; None for the CPU.

        A framework that sees no GPU, because it was built without CUDA, predicts on the CPU.

        Parameters
        ----------
        visible : int
            Number of GPUs that the framework sees.

        Raises
        ------
        GpuError
            If the framework sees GPUs, but not this one.
        """
        if self.gpu is None or not visible:
            return None
        if self.gpu >= visible and self.named is not None:
            raise GpuError(
                f"device: found {self.named!r}, and the framework sees {visible}. Set a number "
                f"below {visible}."
            )
        if self.gpu >= visible:
            raise GpuError(
                f"Spark assigned the GPU {self.gpu} to this task, and its Python worker sees "
                f"{visible}. Let spark.executor.resource.gpu.discoveryScript print the numbers of "
                "GPUs that executors see."
            )
        return self.gpu


DEFAULT_RESOURCES = Resources()
"""The CPU, with the framework's default number of threads."""


class FrameworkPredictor(abc.ABC):
    """Base of predictors that run the forward pass of a framework's model.

    Parameters
    ----------
    columns : sequence of str
        The feature columns.

    Attributes
    ----------
    overlaps : bool
        Whether `begin` returns before the outputs are computed, so that the next batch can start.
    """

    overlaps = False

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)

    def __call__(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs as numbers, for the feature columns of a batch.

        Raises
        ------
        PredictionError
            If the model fails.
        """
        return self.begin(arrays)()

    def begin(self, arrays: list[Array]) -> Callable[[], list[Array]]:
        """Start a forward pass; return a function that waits for the outputs and returns them."""
        given = self._named(arrays)
        with naming_inputs(lambda: described(given), self._expected_inputs):
            inputs = self._inputs(arrays)
            given = self._named(inputs)
            wait = self._start(inputs)

        def finish() -> list[Array]:
            # Errors of a GPU surface when the process waits for it.
            with naming_inputs(lambda: described(given), self._expected_inputs):
                return wait()

        return finish

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return inputs by name, for messages."""
        return dict(zip(self._columns, inputs, strict=True))

    def input_dtype(self, name: str, stored: str) -> str:
        """Return the name of the type in which the model gets an input that has another type."""
        return stored

    @abc.abstractmethod
    def _inputs(self, arrays: list[Array]) -> list[Any]:
        """Return the model's input for each feature column."""

    @abc.abstractmethod
    def _start(self, inputs: list[Any]) -> Callable[[], list[Array]]:
        """Start a forward pass with `_inputs`; return a function that waits for the outputs."""

    @abc.abstractmethod
    def _expected_inputs(self) -> str:
        """Describe the inputs that the model declares; empty if it declares none."""


@dataclass(frozen=True)
class BatchPredictor:
    """Transformation, forward passes and class scores for a batch of rows.

    Attributes
    ----------
    columns : tuple of str
        The columns of a batch.
    keeps_nulls : bool
        Whether rows with nulls get null predictions; otherwise nulls are an error.
    features : InputColumns
        The inputs that the predictor takes, made of the columns after the transformation.
    shapes : tuple of tuple of int or None
        Shape of a row of each output; None for a size that is known only from a batch.
    batch_rows : int or None
        Rows per forward pass; None for a whole Arrow batch.
    scores : ClassScores or None
        Computes a classifier's columns from the only output.
    transformation : Transformation or None
        Applied before the forward pass.
    dtypes : mapping
        Column to its NumPy type in training: in the transformation, or of floats.
    collate : Collate or None
        Makes the predictor's batches of rows; the only column is then `ROWS`.
    leaves_out_nulls : bool
        Whether rows with nulls are left out, even if the collate function takes them.
    labels : frozenset of str
        Labels and weights of training among the columns. Rows to predict on may lack them in part,
        and most transformations do not need them.
    """

    columns: tuple[str, ...]
    features: InputColumns
    keeps_nulls: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    batch_rows: int | None = None
    scores: ClassScores | None = None
    transformation: Transformation | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    collate: Collate | None = None
    leaves_out_nulls: bool = False
    labels: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        features: InputColumns,
        transformation: Transformation | None,
        metadata: Mapping[str, Mapping[str, Any]],
        available: Collection[str] | None = None,
        labels: Collection[str | None] = (),
    ) -> BatchPredictor:
        """Return a predictor whose batches have the columns that the features are made of.

        Parameters
        ----------
        features : InputColumns
            The inputs that the predictor takes.
        transformation : Transformation or None
            Applied before the forward pass.
        metadata : mapping
            Metadata of the training's columns, which the transformation may use.
        available : collection of str, optional
            The columns that exist besides the features. Default: all of ``metadata``.
        labels : collection of str or None
            Labels and weights of training.
        """
        names = features.columns
        dtypes = {n: entry["dtype"] for n, entry in metadata.items() if entry["dtype"] != "object"}
        if transformation is None:
            # Rows may have whole numbers where training had others.
            floats = {n: dtype for n, dtype in dtypes.items() if dtype.startswith("float")}
            return cls(names, features, dtypes=floats)
        further_columns = [
            name
            for name in metadata
            if name not in names and (available is None or name in available)
        ]
        return cls(
            (*names, *further_columns),
            features,
            transformation=transformation,
            dtypes=dtypes,
            labels=frozenset(name for name in further_columns if name in labels),
        )

    @property
    def takes_nulls(self) -> bool:
        """True if rows with nulls go to the collate function."""
        return self.collate is not None and self.collate.takes_nulls and not self.leaves_out_nulls

    @property
    def needed(self) -> list[str]:
        """Columns in which a null is a null of the row."""
        return [name for name in self.columns if name not in self.labels]

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Names of all fields of the UDF's result, with the shapes of their rows."""
        outputs = {f"o{index}": shape for index, shape in enumerate(self.shapes)}
        return {**outputs, **(self.scores.fields(self.shapes[0]) if self.scores else {})}

    def read(
        self,
        columns: Sequence[pa.Array],
        is_row: Array | None = None,
        null_remedy: str = NULL_REMEDY,
    ) -> tuple[dict[str, Array], Array | None]:
        """Return the columns of an Arrow batch as arrays, or as rows for a collate function.

        See `to_arrays`, which has the same arguments, results and errors.
        """
        options: dict[str, Any] = {
            "keeps_nulls": self.keeps_nulls,
            "is_row": is_row,
            "null_remedy": null_remedy,
        }
        if self.collate is None:
            return to_arrays(*self._without_null_labels(columns, is_row), **options)
        valid = _valid_rows(self.columns, columns, takes_nulls=self.takes_nulls, **options)
        table = pa.table(dict(zip(self.columns, columns, strict=True)))
        rows: Any = RowTable(table if valid is None else table.filter(pa.array(valid)))
        return {ROWS: rows}, valid

    def _without_null_labels(
        self, columns: Sequence[pa.Array], is_row: Array | None
    ) -> tuple[list[str], list[pa.Array]]:
        """Return the columns and their names, without labels that hold nulls."""
        kept = [
            (name, column)
            for name, column in zip(self.columns, columns, strict=True)
            if name not in self.labels or has_all(column, is_row)
        ]
        return [name for name, _ in kept], [column for _, column in kept]

    def __call__(self, predictor: Predictor, columns: dict[str, Array]) -> list[Array]:
        """Return an array for each of `fields`, rows first.

        Raises
        ------
        ShapeError
            If the model's outputs differ from the expected ones.
        """
        return self.begin(predictor, columns)()

    def begin(self, predictor: Predictor, columns: dict[str, Array]) -> Callable[[], list[Array]]:
        """Start a prediction, and return a function that finishes it.

        On a GPU, a forward pass is awaited only after the next pass has started. This applies to
        the passes of one batch and, with `one_ahead`, to successive batches.
        """
        rows = len(next(iter(columns.values())))
        if not rows:
            return lambda: [np.zeros((0, *known_sizes(shape))) for shape in self.fields.values()]
        step = self.batch_rows or rows
        parts: list[list[Array]] = []
        waiting: Callable[[], None] | None = None
        for start in range(0, rows, step):
            part = {name: array[start : start + step] for name, array in columns.items()}
            forward = _begin(predictor, self.inputs(part, predictor))
            if waiting is not None:
                waiting()
            waiting = functools.partial(self._collect, forward, min(step, rows - start), parts)

        def finish() -> list[Array]:
            assert waiting is not None
            waiting()
            return self._joined(parts)

        return finish

    def predict(self, predictor: Predictor, columns: dict[str, Array]) -> list[Array]:
        """Return the outputs for some rows, after the transformation if one is set."""
        outputs = predictor(self.inputs(columns, predictor))
        rows = len(next(iter(columns.values())))
        return [with_rows(np.asarray(output), rows) for output in outputs]

    def inputs(self, columns: dict[str, Array], predictor: Any) -> list[Array]:
        """Return the predictor's inputs: the features, after the transformation.

        With a collate function, they are a single `CollatedBatch`.

        Raises
        ------
        DataError
            If the model would get a number with other digits.
        PredictionError
            If the collate function fails.
        """
        if self.collate is not None:
            rows: Any = columns[ROWS]
            return [_collated(self.collate, rows)]
        typed = self._typed(columns)
        if self.transformation is None:
            return self._stacked(typed, predictor)
        try:
            transformed = self.transformation(typed)
        except KeyError as error:
            raise DataError(
                f"The transformation asks for a column {error}, which the DataFrame does not have "
                f"or which holds nulls; it was given {', '.join(typed)}. Add it, or set "
                "apply_transformation=False."
            ) from error
        return self._stacked(transformed, predictor)

    def _typed(self, columns: dict[str, Array]) -> dict[str, Array]:
        """Return columns in the types that they had in training, without labels of other values."""
        typed = {}
        for name, array in columns.items():
            target = self.dtypes.get(name)
            if target is None or (self.transformation is None and array.dtype.kind not in "biu"):
                typed[name] = array
                continue
            try:
                typed[name] = _as_type(name, array, target)
            except DataError:
                if name not in self.labels:
                    raise
        return typed

    def _stacked(self, columns: Columns, predictor: Any) -> list[Array]:
        inputs = self.features.stack(columns)
        if hasattr(predictor, "input_dtype"):
            for name, of_input in self.features.by_name.items():
                target = predictor.input_dtype(name, inputs[name].dtype.name)
                for column in of_input:
                    check_array(column, columns[column], target)
        return [inputs[name] for name in self.features.names]

    def _collect(
        self, forward: Callable[[], list[Array]], rows: int, parts: list[list[Array]]
    ) -> None:
        """Wait for the outputs of a forward pass, check them and append them to ``parts``."""
        outputs = list(map(np.asarray, forward()))
        if len(outputs) == len(self.shapes):
            shapes = zip(outputs, self.shapes, strict=True)
            outputs = [with_rows(output, rows, shape) for output, shape in shapes]
        check_outputs(outputs, rows, self.shapes)
        parts.append(outputs)

    def _joined(self, parts: list[list[Array]]) -> list[Array]:
        outputs = [
            _concatenated(output) if len(output) > 1 else output[0]
            for output in zip(*parts, strict=True)
        ]
        if self.scores is None:
            return outputs
        made = self.scores(outputs[0])
        return [*outputs, *(made[name] for name in self.scores.fields(self.shapes[0]))]


def _as_type(name: str, array: Array, target: str) -> Array:
    """Return a column in another type, with the same values."""
    if array.dtype.name == target:
        return array
    remedy = "Cast or round the column to the type that it had in training."
    if array.dtype.kind == "f" and np.dtype(target).kind in "iu":
        wrong = array[~np.isfinite(array) | (np.trunc(array) != array)]
        if wrong.size:
            told = f"Column {name!r} holds {wrong[0]}, and training had {target}."
            raise DataError(told, column=name, remedy=remedy)
    check_array(name, array, target)
    try:
        return array.astype(target)
    except ValueError as error:
        told = f"Column {name!r} holds {array.dtype.name}, and training had {target} ({error})."
        raise DataError(told, column=name, remedy=remedy) from error


def labels_of(get: Callable[[str], Any]) -> list[str | None]:
    """Return the labels and the weight of a model's training, from its params."""
    return [*(get("label_columns") or ()), get("sample_weight_col")]


def _collated(collate: Collate, rows: Any) -> Any:
    try:
        return collate(rows)
    except HvdEstimatorsError:
        raise
    except Exception as error:
        raise PredictionError(
            f"collate_fn failed on some rows with {type(error).__name__}: {error}. Predictions "
            "call it with the feature columns, without labels and weights: let it leave out what a "
            "row does not have."
        ) from error


def _concatenated(parts: Sequence[Array]) -> Array:
    """Join outputs; rows of different sizes are padded to the largest with NaN."""
    shapes = [part.shape[1:] for part in parts]
    if len(set(shapes)) == 1 or len(set(map(len, shapes))) > 1:
        return np.concatenate(parts)
    largest = np.max(shapes, axis=0)
    return np.concatenate(
        [
            np.pad(
                part.astype(np.result_type(part, np.float32), copy=False),
                [(0, 0), *((0, most - size) for most, size in zip(largest, shape, strict=True))],
                constant_values=np.nan,
            )
            for part, shape in zip(parts, shapes, strict=True)
        ]
    )


def _begin(predictor: Predictor, inputs: list[Array]) -> Callable[[], list[Array]]:
    """Start a forward pass if the predictor can overlap passes; otherwise run the pass."""
    if getattr(predictor, "overlaps", False):
        finish: Callable[[], list[Array]] = predictor.begin(inputs)  # type: ignore[attr-defined]
        return finish
    outputs = predictor(inputs)
    return lambda: outputs


def check_outputs(outputs: Sequence[Array], rows: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """Check the number of outputs, their types, and their numbers of rows and dimensions.

    Sizes within a row may differ from the expected ones.

    Raises
    ------
    ShapeError
        If an output is not numeric, or if one of the counts is wrong.
    """
    if len(outputs) != len(shapes):
        raise ShapeError(
            f"The model returned {len(outputs)} outputs, and {len(shapes)} were expected. Set "
            "label_columns or outputs, or let it return one per label."
        )
    for number, (output, shape) in enumerate(zip(outputs, shapes, strict=True)):
        if output.dtype.kind not in "biuf":
            raise ShapeError(
                f"Output {number} of the model is {output.dtype.name}; expected numbers."
            )
        right = (
            output.size == rows
            if is_scalar(shape)
            else output.ndim == 1 + len(shape) and len(output) == rows
        )
        if not right:
            raise ShapeError(
                f"Output {number} of the model has the shape {output.shape} for {rows} rows; "
                f"expected {(rows, *shape)}. Its first dimension must count the rows, and "
                "output_shapes must tell the others."
            )


def with_rows(output: Any, rows: int, shape: Sequence[int | None] | None = None) -> Any:
    """Return an output with the dimension of rows, which a squeeze drops from a single row.

    Parameters
    ----------
    output : array or tensor
        An output of a model.
    rows : int
        Number of rows that the model was called with.
    shape : sequence of int or None, optional
        Shape of a row, which shows the loss best. Without it, a first dimension of one counts
        rows.
    """
    if rows != 1:
        return output
    if output.ndim == 0:
        return output.reshape((1, *known_sizes(shape or ())))
    if shape is None:
        return output if output.shape[0] == 1 else output[None]
    is_lost = output.ndim == len(shape) and not is_scalar(tuple(shape))
    return output[None] if is_lost else output


def is_scalar(shape: tuple[int | None, ...]) -> bool:
    """Return whether a row of this shape becomes a plain number."""
    return shape in ((), (1,))


def known_sizes(shape: Sequence[int | None]) -> tuple[int, ...]:
    """Return a shape with 1 for each size that is known only from a batch (None or -1)."""
    return tuple(1 if size is None or size < 0 else size for size in shape)


def one_ahead(pending: Iterable[Callable[[], Result]], predictor: Predictor) -> Iterator[Result]:
    """Yield the results of started predictions; on a GPU, each after the next one has started.

    Parameters
    ----------
    pending : iterable of callable
        Functions that `BatchPredictor.begin` returned, or functions that call these.
    predictor : callable
        The predictor that `BatchPredictor.begin` was called with.
    """
    waiting: collections.deque[Callable[[], Result]] = collections.deque()
    for finish in pending:
        waiting.append(finish)
        if len(waiting) > bool(getattr(predictor, "overlaps", False)):
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def to_arrays(
    names: Sequence[str],
    columns: Sequence[pa.Array | Array],
    *,
    keeps_nulls: bool = False,
    is_row: Array | None = None,
    null_remedy: str = NULL_REMEDY,
) -> tuple[dict[str, Array], Array | None]:
    """Return the columns of a batch as arrays, and a mask of the rows in these arrays.

    The mask is None if the arrays hold all rows of the batch.

    Parameters
    ----------
    names : sequence of str
        The columns' names.
    columns : sequence of pa.Array or array
        The columns; arrays hold no nulls.
    keeps_nulls : bool
        Leave rows with nulls out of the arrays.
    is_row : array, optional
        Mask that is false for empty rows.
    null_remedy : str
        End of the message about nulls.

    Raises
    ------
    DataError
        If there are nulls without ``keeps_nulls``, or if lists differ in length.
    """
    valid = _valid_rows(names, columns, keeps_nulls, is_row, null_remedy)
    arrays = {}
    for name, column in zip(names, columns, strict=True):
        if not isinstance(column, pa.Array):
            arrays[name] = column if valid is None else column[valid]
        else:
            arrays[name] = to_array(column if valid is None else rows_of(column, valid), name)
    return arrays, valid


def has_all(column: pa.Array | Array, is_row: Array | None = None) -> bool:
    """Return whether a column holds no null in any row."""
    mask = valid_rows(column) if isinstance(column, pa.Array) else None
    return mask is None or bool((mask if is_row is None else mask | ~is_row).all())


def _valid_rows(
    names: Sequence[str],
    columns: Sequence[pa.Array | Array],
    keeps_nulls: bool,
    is_row: Array | None,
    null_remedy: str,
    takes_nulls: bool = False,
) -> Array | None:
    """Return a mask of the rows that the predictor gets; None for all rows. See `to_arrays`."""
    masks = [] if is_row is None else [is_row]
    for name, column in zip(names, columns, strict=True):
        mask = valid_rows(column) if isinstance(column, pa.Array) else None
        if mask is None:
            continue
        if not keeps_nulls and not has_all(column, is_row):
            raise DataError(f"Column {name!r} holds nulls; {null_remedy}")
        if not takes_nulls:
            masks.append(mask)
    valid = np.logical_and.reduce(masks) if masks else None
    return None if valid is None or valid.all() else valid
