"""Feature stages of Spark ML without Spark: arithmetic on Arrow columns, with Spark's results.

A stage reads columns and adds others. Vectors have the form in which Spark stores them; lists of
numbers are vectors, too. Imports no PySpark.
"""

from __future__ import annotations

import abc
import decimal
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hvd_estimators.data.arrays import Array, from_vectors, rows_of, to_array, to_vectors
from hvd_estimators.data.types import (
    DENSE,
    is_list,
    is_number,
    is_string,
    is_vector,
    without_decimals,
)
from hvd_estimators.exceptions import ColumnError, DataError, ParamError, ShapeError
from hvd_estimators.saving.saved import Saved

Columns = Mapping[str, pa.Array]

_EXACT = decimal.Context(prec=400, rounding=decimal.ROUND_HALF_UP)
"""Decimal context with enough digits for any double."""

_PLAIN_LOWEST, _PLAIN_LIMIT = 1e-3, 1e7
"""Bounds between which Java writes numbers without an exponent."""


@dataclass(frozen=True)
class Attributes:
    """Facts about columns that Spark passes from stage to stage as metadata.

    Attributes
    ----------
    labels : mapping
        Column of indices to the text of each index.
    sizes : mapping
        Column of vectors to their size.
    """

    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def after(self, outputs: Collection[str], added: Attributes) -> Attributes:
        """Return the attributes of the columns after a stage with some outputs."""
        labels = {name: text for name, text in self.labels.items() if name not in outputs}
        sizes = {name: size for name, size in self.sizes.items() if name not in outputs}
        return Attributes({**labels, **added.labels}, {**sizes, **added.sizes})


class Stage(abc.ABC):
    """Stage of a pipeline.

    Attributes
    ----------
    inputs, outputs : tuple of str
        Columns that the stage reads, and those that it adds.
    optional_inputs : tuple of str
        Columns that the stage reads if they exist.
    may_lack_inputs : bool
        Whether the stage ignores missing inputs, and makes no outputs of them.
    attributes : Attributes
        Attributes of the outputs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional_inputs: tuple[str, ...] = ()
    may_lack_inputs = False
    attributes: Attributes

    @abc.abstractmethod
    def __call__(self, columns: Columns) -> tuple[dict[str, pa.Array], Array | None]:
        """Return the added columns, and a mask of the given rows that they have (None: all).

        Raises
        ------
        ColumnError
            If a column has a type that the stage does not take.
        DataError
            If a value is invalid, and ``handleInvalid`` is ``"error"``.
        ShapeError
            If vectors have another size than in training.
        """


class FeatureStage(Stage):
    """Stage of Spark ML, made of its saved params and data.

    Parameters
    ----------
    saved : Saved
        Params and data of the stage.
    known : Attributes
        Attributes of the columns of earlier stages.
    """

    def __init__(self, saved: Saved, known: Attributes) -> None:
        self.name = saved.class_name.rpartition(".")[2]
        get = saved.get
        single_input, single_output = get("inputCol"), get("outputCol")
        inputs = get("inputCols") if single_input is None else [single_input]
        # Only Spark's VectorAssembler has several inputs and one output.
        outputs = get("outputCols") or [single_output]
        if not inputs or None in outputs:
            raise ParamError(f"{saved.path!r}: the {self.name} has no input or output column.")
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.handle_invalid = get("handleInvalid") or "error"
        self.attributes = Attributes()

    def __call__(self, columns: Columns) -> tuple[dict[str, pa.Array], Array | None]:
        """Return the added columns, and a mask of the given rows that they have (None: all)."""
        kept = self._kept(columns) if self.handle_invalid == "skip" else None
        if kept is None or kept.all():
            return self._transform(columns), None
        rows = {name: columns[name] for name in self.inputs if name in columns}
        return self._transform(select_rows(rows, kept)), kept

    def _kept(self, columns: Columns) -> Array:
        """Return a mask of the rows that ``skip`` keeps: those without null and NaN."""
        masks = [_is_present(columns[name]) for name in self.inputs if name in columns]
        kept: Array = np.logical_and.reduce(masks)
        return kept

    @abc.abstractmethod
    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        """Return the added columns."""

    def _invalid(self, name: str, value: Any, why: str, remedy: str = "") -> DataError:
        return DataError(
            f"{self.name}: column {name!r} holds {value!r}, {why}. "
            f"{remedy or 'Correct the rows, or set handleInvalid of the stage before saving.'}"
        )

    def _check(self, is_valid: Array, values: Array, name: str, why: str, remedy: str = "") -> None:
        if not is_valid.all():
            raise self._invalid(name, values[~is_valid][0].item(), why, remedy)

    def _numbers(self, columns: Columns, name: str) -> tuple[Array, Array]:
        """Return a column of numbers as doubles, NaN for nulls, and a mask of the others."""
        column = without_decimals(columns[name])
        kind = column.type
        if not (is_number(kind) or pa.types.is_null(kind)):
            raise ColumnError(
                f"{self.name}: column {name!r} has type {kind}; expected numbers. Convert it."
            )
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        doubles = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return doubles, column.is_valid().to_numpy(zero_copy_only=False)

    def _vectors(self, columns: Columns, name: str, size: int | None) -> tuple[Array, Array]:
        """Return a column of vectors as doubles, NaN for null rows, and a mask of the others."""
        column = columns[name]
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        if not valid.any():
            return np.full((len(column), size or 0), np.nan), valid
        if not (is_vector(column.type) or is_list(column.type)):
            raise ColumnError(
                f"{self.name}: column {name!r} has type {column.type}; expected vectors. "
                "Convert it."
            )
        given = column if valid.all() else rows_of(column, valid)
        is_stored = is_vector(column.type)
        array = from_vectors(given, name, np.float64) if is_stored else to_array(given, name)
        if array.ndim != 2 or size not in (None, array.shape[1]):
            raise ShapeError(
                f"{self.name}: a row of {name!r} has the shape {array.shape[1:]}; expected "
                f"{'one dimension' if size is None else (size,)}."
            )
        vectors = np.full((len(column), array.shape[1]), np.nan)
        vectors[valid] = array
        return vectors, valid


class StringIndexer(FeatureStage):
    """Text to the position of each label. Columns that do not exist are left out, as in Spark."""

    may_lack_inputs = True

    def __init__(self, saved: Saved, known: Attributes) -> None:
        super().__init__(saved, known)
        data = saved.data()
        # Spark 2 saved the labels of one column.
        labels = data["labelsArray"] if "labelsArray" in data else [data["labels"]]
        self._labels = dict(zip(self.inputs, map(tuple, labels), strict=True))
        unknown = ("__unknown",) if self.handle_invalid == "keep" else ()
        pairs = zip(self.inputs, self.outputs, strict=True)
        texts = {output: (*self._labels[name], *unknown) for name, output in pairs}
        self.attributes = Attributes(labels=texts)

    def _found(self, column: pa.Array, name: str) -> tuple[pa.Array, pa.Array]:
        """Return a column's text, and the positions of the labels; null for other values."""
        text = self._text(column, name)
        return text, pc.index_in(text, value_set=pa.array(self._labels[name], pa.string()))

    def _kept(self, columns: Columns) -> Array:
        kept = super()._kept(columns)
        for name in self.inputs:
            if name in columns:
                _, found = self._found(columns[name], name)
                kept = kept & found.is_valid().to_numpy(zero_copy_only=False)
        return kept

    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        made = {}
        for name, output in zip(self.inputs, self.outputs, strict=True):
            if name not in columns:
                continue
            text, found = self._found(columns[name], name)
            if self.handle_invalid == "keep":
                found = found.fill_null(len(self._labels[name]))
            elif found.null_count:
                value = text.filter(found.is_null())[0].as_py()
                raise self._invalid(name, value, "which is no label of the training")
            made[output] = found.cast(pa.float64())
        return made

    def _text(self, column: pa.Array, name: str) -> pa.Array:
        """Return a column as text; numbers in the format of Spark's cast."""
        kind = column.type
        if is_string(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind):
            return column.cast(pa.string())
        values = column.to_pylist()
        if pa.types.is_decimal(kind):
            text = [None if value is None else format(value, "f") for value in values]
        elif pa.types.is_floating(kind):
            # The text of a 32-bit float has the fewest digits that identify it among these.
            dtype = kind.to_pandas_dtype()
            text = [None if v is None else java_text(float(str(dtype(v)))) for v in values]
        else:
            raise ColumnError(
                f"{self.name}: column {name!r} has type {kind}; expected text or numbers. "
                "Convert it."
            )
        return pa.array(text, pa.string())


class IndexToString(FeatureStage):
    """Positions to the text of their labels.

    Nulls stay null, as in Spark 3.5; Spark 4 raises an error. NaN is an error, as in Spark 4; Spark
    3.5 takes it for 0.
    """

    def __init__(self, saved: Saved, known: Attributes) -> None:
        super().__init__(saved, known)
        labels = saved.get("labels") or known.labels.get(self.inputs[0])
        if not labels:
            raise ParamError(
                f"{saved.path!r}: the IndexToString has no labels, and no StringIndexer before it "
                f"makes its column {self.inputs[0]!r}. Set labels before saving."
            )
        self._labels = pa.array(labels, pa.string())

    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        (name,), (output,) = self.inputs, self.outputs
        doubles, valid = self._numbers(columns, name)
        indices = np.trunc(np.where(valid, doubles, 0))
        is_label = (indices >= 0) & (indices < len(self._labels))
        why = f"and there are {len(self._labels)} labels"
        self._check(is_label, doubles, name, why, "Set other labels before saving.")
        return {output: self._labels.take(pa.array(indices.astype(np.int64), mask=~valid))}


class OneHotEncoder(FeatureStage):
    """Positions to vectors with a 1 at the position. Nulls stay null, as in Spark."""

    def __init__(self, saved: Saved, known: Attributes) -> None:
        super().__init__(saved, known)
        self._categories = [int(size) for size in saved.data()["categorySizes"]]
        # "keep" adds a category, and dropLast then removes the last one.
        added = (self.handle_invalid == "keep") - bool(saved.get("dropLast"))
        sizes = [size + added for size in self._categories]
        self.attributes = Attributes(sizes=dict(zip(self.outputs, sizes, strict=True)))

    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        made = {}
        for name, output, count in zip(self.inputs, self.outputs, self._categories, strict=True):
            doubles, valid = self._numbers(columns, name)
            is_known = (doubles >= 0) & (doubles < count)
            if self.handle_invalid != "keep":
                why = f"and training had the categories 0 to {count - 1}"
                self._check(is_known | ~valid, doubles, name, why)
            indices = np.where(is_known, doubles, count).astype(np.int64)
            matrix = np.zeros((len(doubles), self.attributes.sizes[output]))
            rows = np.flatnonzero(valid & (indices < matrix.shape[1]))
            matrix[rows, indices[rows]] = 1
            made[output] = _stored(matrix, valid)
        return made


class VectorAssembler(FeatureStage):
    """Numbers and vectors to one vector."""

    def __init__(self, saved: Saved, known: Attributes) -> None:
        super().__init__(saved, known)
        self._sizes = {name: known.sizes[name] for name in self.inputs if name in known.sizes}
        if len(self._sizes) == len(set(self.inputs)):
            total = sum(self._sizes[name] for name in self.inputs)
            self.attributes = Attributes(sizes={self.outputs[0]: total})

    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        parts = []
        for name in self.inputs:
            kind = columns[name].type
            if name in self._sizes or is_vector(kind) or is_list(kind):
                size = self._sizes.get(name)
                part, valid = self._vectors(columns, name, size)
                if size is None and len(valid) and not valid.any():
                    raise self._invalid(
                        name, None, "and its size is unknown", "Fill or drop the nulls."
                    )
            else:
                doubles, valid = self._numbers(columns, name)
                part = doubles[:, None]
                if self.handle_invalid == "error":
                    self._check(~valid | ~np.isnan(doubles), doubles, name, "which is invalid")
            if self.handle_invalid == "error" and not valid.all():
                raise self._invalid(name, None, "which is invalid")
            parts.append(part)
        # Spark leaves out zeros, so -0.0 becomes 0.0.
        return {self.outputs[0]: _stored(np.concatenate(parts, axis=1) + 0.0)}


class _Scaler(FeatureStage):
    """Base of stages that map each entry of a vector."""

    def __init__(self, saved: Saved, known: Attributes, size: int) -> None:
        super().__init__(saved, known)
        self._size = size
        self.attributes = Attributes(sizes={self.outputs[0]: size})

    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        (name,), (output,) = self.inputs, self.outputs
        vectors, valid = self._vectors(columns, name, self._size)
        if not valid.all():
            raise self._invalid(name, None, "which cannot be scaled", "Fill or drop the nulls.")
        with np.errstate(invalid="ignore", over="ignore"):
            return {output: _stored(self._scaled(vectors))}

    @abc.abstractmethod
    def _scaled(self, vectors: Array) -> Array:
        """Return the scaled vectors, rows first."""


class StandardScaler(_Scaler):
    """Vectors minus the mean, divided by the standard deviation."""

    def __init__(self, saved: Saved, known: Attributes) -> None:
        data = saved.data()
        mean, std = _vector(data["mean"]), _vector(data["std"])
        super().__init__(saved, known, len(mean))
        is_spread = std != 0
        factors = np.where(is_spread, 1 / np.where(is_spread, std, 1), 0)
        self._mean = mean if saved.get("withMean") else None
        self._factors = factors if saved.get("withStd") else None

    def _scaled(self, vectors: Array) -> Array:
        if self._mean is not None:
            vectors = vectors - self._mean
        return vectors if self._factors is None else vectors * self._factors


class MinMaxScaler(_Scaler):
    """Vectors with the range of the training mapped to a given range."""

    def __init__(self, saved: Saved, known: Attributes) -> None:
        data = saved.data()
        self._lowest, highest = _vector(data["originalMin"]), _vector(data["originalMax"])
        super().__init__(saved, known, len(self._lowest))
        low, high = float(saved.get("min")), float(saved.get("max"))
        extent = highest - self._lowest
        self._is_constant = extent == 0
        self._factors = (high - low) / np.where(self._is_constant, 1, extent)
        self._low, self._middle = low, (low + high) / 2

    def _scaled(self, vectors: Array) -> Array:
        scaled = (vectors - self._lowest) * self._factors + self._low
        return np.where(self._is_constant & ~np.isnan(vectors), self._middle, scaled)


class Imputer(FeatureStage):
    """Nulls and missing values to the mean, median or mode of the training."""

    def __init__(self, saved: Saved, known: Attributes) -> None:
        super().__init__(saved, known)
        data = saved.data()
        self._surrogates = {name: float(data[name]) for name in self.inputs}
        self._missing = float(saved.get("missingValue"))

    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        made = {}
        for name, output in zip(self.inputs, self.outputs, strict=True):
            doubles, valid = self._numbers(columns, name)
            is_missing = np.isnan(doubles) if np.isnan(self._missing) else doubles == self._missing
            filled = np.where(is_missing | ~valid, self._surrogates[name], doubles)
            made[output] = _cast(filled, columns[name].type)
        return made


class Bucketizer(FeatureStage):
    """Numbers to the position of the interval that contains them."""

    def __init__(self, saved: Saved, known: Attributes) -> None:
        super().__init__(saved, known)
        several = saved.get("splitsArray") if saved.get("inputCol") is None else None
        splits = [np.array(s, np.float64) for s in several or [saved.get("splits")]]
        self._splits = dict(zip(self.inputs, splits, strict=True))
        texts = {
            output: tuple(
                f"{java_text(low)}, {java_text(high)}"
                for low, high in itertools.pairwise(bounds.tolist())
            )
            for output, bounds in zip(self.outputs, splits, strict=True)
        }
        self.attributes = Attributes(labels=texts)

    def _transform(self, columns: Columns) -> dict[str, pa.Array]:
        made = {}
        for name, output in zip(self.inputs, self.outputs, strict=True):
            splits = self._splits[name]
            doubles, valid = self._numbers(columns, name)
            is_nan = np.isnan(doubles)
            if self.handle_invalid != "keep":
                self._check(~is_nan | ~valid, doubles, name, "which is invalid")
            buckets = np.searchsorted(_ordered(splits), _ordered(doubles), side="right") - 1
            is_inside = is_nan | ((buckets >= 0) & (doubles <= splits[-1]))
            why = f"outside of the splits, {splits[0]} to {splits[-1]}"
            self._check(is_inside, doubles, name, why, "Set wider splits before saving.")
            # The last interval contains its end.
            buckets = np.minimum(buckets, len(splits) - 2)
            buckets[is_nan] = len(splits) - 1
            made[output] = pa.array(buckets.astype(np.float64), mask=~valid)
        return made


FEATURE_STAGES: Mapping[str, Callable[[Saved, Attributes], FeatureStage]] = {
    "Bucketizer": Bucketizer,
    "ImputerModel": Imputer,
    "IndexToString": IndexToString,
    "MinMaxScalerModel": MinMaxScaler,
    "OneHotEncoderModel": OneHotEncoder,
    "StandardScalerModel": StandardScaler,
    "StringIndexerModel": StringIndexer,
    "VectorAssembler": VectorAssembler,
}
"""Spark's class to its arithmetic."""


def select_rows(columns: Columns, selected: Array) -> dict[str, pa.Array]:
    """Return the selected rows of each column."""
    return {name: rows_of(column, selected) for name, column in columns.items()}


def _is_present(column: pa.Array) -> Array:
    """Return a mask of the rows that are neither null nor NaN."""
    present: Array = column.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(column.type):
        present = present & ~np.isnan(column.to_numpy(zero_copy_only=False))
    return present


def _stored(vectors: Array, valid: Array | None = None) -> pa.Array:
    """Return rows as Spark stores vectors; the rows outside the mask are null."""
    if valid is None or valid.all():
        return to_vectors(vectors)
    return to_vectors(vectors[valid], valid)


def _vector(saved: Mapping[str, Any]) -> Array:
    """Return a vector from the fields that Spark saves."""
    values = np.array(saved["values"], np.float64)
    if saved["type"] == DENSE:
        return values
    vector = np.zeros(saved["size"])
    vector[np.array(saved["indices"], np.int64)] = values
    return vector


def _cast(doubles: Array, kind: pa.DataType) -> pa.Array:
    """Return doubles as numbers of an Arrow type, with the results of Spark's cast."""
    if pa.types.is_decimal(kind):
        unit = decimal.Decimal(1).scaleb(-kind.scale)
        rounded = [
            None if math.isnan(v) else decimal.Decimal(repr(v)).quantize(unit, context=_EXACT)
            for v in doubles.tolist()
        ]
        return pa.array(rounded, kind)
    if pa.types.is_integer(kind):
        limits = np.iinfo(kind.to_pandas_dtype())
        # The largest 64-bit integer is no double, and its double is too large.
        is_large = doubles >= float(limits.max)
        whole = np.where(is_large, 0, doubles).astype(limits.dtype)
        return pa.array(np.where(is_large, limits.max, whole), kind)
    if pa.types.is_floating(kind):
        return pa.array(doubles.astype(kind.to_pandas_dtype()), kind)
    return pa.array(doubles)


def _ordered(doubles: Array) -> Array:
    """Return integers in the order of doubles, where -0.0 is below 0.0, as in Java's search."""
    bits = np.ascontiguousarray(doubles, np.float64).view(np.int64)
    ordered: Array = np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits)
    return ordered


def java_text(value: float) -> str:
    """Format a double as Java does, with the fewest digits that identify it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0 or _PLAIN_LOWEST <= abs(value) < _PLAIN_LIMIT:
        text = format(decimal.Decimal(repr(value)), "f")
        return text if "." in text else f"{text}.0"
    sign, digits, exponent = decimal.Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    first, *rest = map(str, digits)
    point = exponent + len(rest)
    return f"{'-' if sign else ''}{first}.{''.join(rest) or '0'}E{point}"
