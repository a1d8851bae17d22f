"""Batches of rows of any length and type, by a collate function or by padding.

Runs on ranks, in their readers' workers, on the driver for its dry run, and where a model predicts.
Imports no framework: any object with a shape that NumPy can read is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array, to_array, valid_rows
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.rows import RowTable, one_array, split_lists
from hvd_estimators.data.types import is_list
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.loading.collate import Collate, CollatedBatch

_EXPECTED = "Return a tensor, a dict of tensors, or a tuple (inputs, labels) of these."


@dataclass(frozen=True)
class CollateFunction(Collate):
    """Collate function of the user.

    Attributes
    ----------
    function : callable
        Maps a list of rows (dicts) to a batch, see ``collate_fn``.
    """

    function: Callable[[list[dict[str, Any]]], Any]

    takes_nulls: ClassVar[bool] = True  # as None

    def make(self, rows: RowTable) -> Any:
        """Return the function's batch, with arrays in place of tensors."""
        value = self.function(rows.to_rows())
        if not is_array(value) and not isinstance(value, (Mapping, tuple, list)):
            raise DataError(f"collate_fn returned {type(value).__name__}. {_EXPECTED}")
        return map_leaves(_as_array, value)


@dataclass(frozen=True)
class Padding(Collate):
    """Arrays by column, with some columns padded to the longest row of the batch.

    Attributes
    ----------
    values : mapping of str to number
        Column to the number after the end of its rows.
    masked : tuple of str
        Columns whose masks are added, as ``<column>_mask``: true for the elements of a row.
    inputs : InputColumns
        The model's inputs; matrices are stacked.
    """

    values: Mapping[str, float]
    masked: tuple[str, ...] = ()
    inputs: InputColumns = field(default_factory=InputColumns)

    def make(self, rows: RowTable) -> dict[str, Array]:
        """Return arrays by column, rows first.

        Raises
        ------
        DataError
            If there is a null, or a column that is not padded has rows of several lengths.
        ColumnError
            If a padded column holds other values than arrays.
        ParamError
            If a column's type does not have the number to pad with.
        """
        made: dict[str, Array] = {}
        for name in rows.table.column_names:
            column = one_array(rows.table.column(name))
            if valid_rows(column) is not None:
                raise DataError(
                    f"Column {name!r} holds nulls; fill or drop them before training, or set "
                    "collate_fn, which takes nulls.",
                    column=name,
                )
            if name not in self.values:
                made[name] = np.array(to_array(column, name))
                continue
            made[name], mask = _padded(column, name, self.values[name])
            if name in self.masked:
                made[f"{name}_mask"] = mask
        return self.inputs.stack(made)


def _padded(column: pa.Array, name: str, value: float) -> tuple[Array, Array]:
    """Return rows that are padded to the longest one, and the mask of their elements."""
    if not is_list(column.type):
        raise ColumnError(
            f"padding: expected arrays in the column {name!r}, found {column.type}. Leave it out "
            "of padding, or set collate_fn."
        )
    offsets, elements = split_lists(column)
    array = to_array(elements, name)
    if array.dtype.kind not in "biuf":
        raise ColumnError(
            f"padding: expected arrays of numbers in the column {name!r}, found {column.type}. Set "
            "collate_fn, which makes tensors of any values."
        )
    lengths = np.diff(offsets)
    mask = np.arange(max(int(lengths.max()), 1)) < lengths[:, None]
    padded = np.full((*mask.shape, *array.shape[1:]), value).astype(array.dtype)
    if padded.size and not np.array_equal(padded.flat[0], value, equal_nan=True):
        raise ParamError(
            f"padding: the column {name!r} holds numbers of type {array.dtype}, which has no "
            f"{value!r}. Set a number of this type, or cast the column."
        )
    padded[mask] = array
    return padded, mask


def make_collate(
    get: Callable[[str], Any], inputs: InputColumns, weight: str | None = None
) -> Collate | None:
    """Return the maker of batches that the params define, or None.

    Parameters
    ----------
    get : callable
        Maps the name of a param to its value.
    inputs : InputColumns
        The model's inputs.
    weight : str, optional
        Column with the weight of each row.
    """
    if get("collate_fn") is not None:
        return CollateFunction(weight, get("collate_fn"))
    if get("padding") is None:
        return None
    masked = tuple(name for name in get("padding") if get("masks") and name in inputs.names)
    return Padding(weight, get("padding"), masked, inputs)


def is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor."""
    is_like = hasattr(value, "__array__") and hasattr(value, "shape")
    return is_like and not isinstance(value, np.generic)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a batch with a function applied to each of its tensors and arrays."""
    if is_array(value):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_leaves(function, entry) for name, entry in value.items()}
    if isinstance(value, (tuple, list)):
        made = [map_leaves(function, entry) for entry in value]
        if hasattr(value, "_fields"):
            return type(value)(*made)
        return made if isinstance(value, list) else tuple(made)
    return value


def _as_array(leaf: Any) -> Any:
    """Return a tensor as an array, which processes share, if NumPy has its type."""
    if hasattr(leaf, "detach"):
        leaf = leaf.detach()
    try:
        return np.asarray(leaf)
    except (TypeError, RuntimeError):  # torch's bfloat16, a sparse tensor
        return leaf


@dataclass(frozen=True)
class BatchNames:
    """Names of the tensors in collated batches, for models that take arrays by name.

    Attributes
    ----------
    features : tuple of str
        The inputs of a batch, in order; the feature columns until a batch is known.
    labels : tuple of str
        The label columns.
    weight : str or None
        Column with the weight of each row.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...] = ()
    weight: str | None = None

    def inputs(self, batch: CollatedBatch) -> dict[str, Any]:
        """Return a batch's inputs by name."""
        return self._split(batch)[0]

    def columns(self, batch: CollatedBatch) -> dict[str, Any]:
        """Return a batch's inputs, labels and weights by name.

        Raises
        ------
        DataError
            If the batch lacks a label, or has another form.
        """
        inputs, found = self._split(batch)
        made = {**inputs, **require(found, self.labels, "label")}
        if self.weight is not None:
            made[self.weight] = batch.weights
        return made

    def _split(self, batch: CollatedBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        left_out = [] if self.weight is None else [self.weight]
        return split_batch(batch.value, self.features, self.labels, left_out)


def require(found: Mapping[str, Any], names: Sequence[str], role: str) -> dict[str, Any]:
    """Return the inputs or labels of a batch, in the order of the names.

    Raises
    ------
    DataError
        If one is missing.
    """
    for name in names:
        if name not in found:
            raise DataError(
                f"collate_fn returned no {role} {name!r}. Return a dict with {name!r}, or a tuple "
                "(inputs, labels).",
                param="label_cols" if role == "label" else None,
            )
    return {name: found[name] for name in names}


def split_batch(
    value: Any, features: Sequence[str], labels: Sequence[str], left_out: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of a collated batch by name, and the labels that it has.

    In a dict, each entry that is no label is an input: those that are named like features first,
    in their order. Without names, inputs and labels are named by position.

    Parameters
    ----------
    value : tensor, mapping or sequence
        The batch: inputs, or a pair of inputs and labels.
    features, labels : sequence of str
        The feature and label columns.
    left_out : sequence of str
        Entries that are neither inputs nor labels.

    Raises
    ------
    DataError
        If the batch has another form.
    """
    found: dict[str, Any] = {}
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise DataError(
                f"collate_fn returned a {type(value).__name__} of {len(value)}. {_EXPECTED}"
            )
        value, targets = value
        found = {} if targets is None else _by_name(targets, labels, "label")
    inputs = _by_name(value, features, "input")
    found = {name: inputs[name] for name in labels if name in inputs} | found
    names = [*(name for name in features if name in inputs), *inputs]
    others = {*labels, *left_out}
    return {name: inputs[name] for name in dict.fromkeys(names) if name not in others}, found


def check_without_labels(
    collate: Collate, rows: RowTable, features: Sequence[str], labels: Sequence[str]
) -> None:
    """Check that no input becomes a label in batches of rows without labels, as for predictions.

    Parameters
    ----------
    collate : Collate
        The maker of batches.
    rows : RowTable
        Rows with all columns.
    features, labels : sequence of str
        The feature and label columns.

    Raises
    ------
    ParamError
        If the function returns two inputs as a pair, whose second entry are the labels.
    """
    try:
        alone = collate(RowTable(rows.table.select(features))).value
    except Exception:
        return  # the function needs labels, and does not predict
    if not isinstance(alone, (tuple, list)) or len(alone) != 2 or alone[1] is None:
        return
    with_labels = split_batch(collate(rows).value, features, labels)[0]
    if len(with_labels) > len(split_batch(alone, features, labels)[0]):
        raise ParamError(
            f"collate_fn: expected the same inputs for rows without labels, found "
            f"{len(with_labels)} inputs with labels, and without them a pair, whose second entry "
            "are labels. Return the inputs a and b as ((a, b), None), or return a dict."
        )


def _by_name(value: Any, names: Sequence[str], role: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        named = dict(value)
    else:
        entries = value if isinstance(value, (tuple, list)) else [value]
        known = len(entries) == len(names)
        named = {
            names[number] if known else f"{role}_{number}": each
            for number, each in enumerate(entries)
        }
    for name, entry in named.items():
        if not is_array(entry):
            raise DataError(
                f"collate_fn returned {type(entry).__name__} as the {role} {name!r}. {_EXPECTED}"
            )
    return named
