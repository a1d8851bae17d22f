"""A user's function that transforms rows between reading and batching.

Used on both sides: by the readers, and by the driver's dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array, Columns, num_rows, take
from hvd_estimators.exceptions import DataError, ParamError

__all__ = [
    "EditedField",
    "RowFunction",
    "Transformation",
    "Transformed",
    "edited_fields",
    "make_transformation",
]

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
BatchFunction = Callable[[dict[str, Array]], Mapping[str, Any]]


_FIRST_ROWS = 32
"""How many rows are transformed first, to see how large they become."""

_MOST_SHOWN = 200
"""How many characters of a row messages show."""


@dataclass(frozen=True)
class EditedField:
    """A field that a transformation adds or changes.

    Attributes
    ----------
    name : str
        Its name.
    dtype : str
        NumPy name of the type that its values are cast to.
    shape : tuple of int or None, or None
        Shape of a row; None stands for any length, and instead of the tuple for any shape.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Transformation:
    """A function of rows or of batches, and what is done with the fields that it returns.

    Attributes
    ----------
    row_function : callable or None
        Row (a dict of values) to row.
    batch_function : callable or None
        Columns (a dict of arrays, rows first) to columns of as many rows; instead of
        ``row_function``. Both may edit the arrays that they are given.
    edited : tuple of EditedField
        Fields that are cast and checked.
    removed : tuple of str
        Fields that are dropped.
    needed : tuple of str
        Fields that must be numbers in the end. Text among the others is dropped.
    all_needed : bool
        Whether all of these must be there.
    text : tuple of str
        Those of the needed fields that may be text, and then are Python objects.
    """

    row_function: RowFunction | None = None
    batch_function: BatchFunction | None = None
    edited: tuple[EditedField, ...] = ()
    removed: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    all_needed: bool = True
    text: tuple[str, ...] = ()

    def __call__(self, columns: Columns) -> dict[str, Array]:
        """Return the transformed columns.

        Raises
        ------
        DataError
            If the function does not return as many rows, all with the same fields, if rows of a
            field differ in shape, or if a field is not as it was declared.
        """
        rows = num_rows(columns)
        # What was read is Arrow's memory or kept for other passes, and therefore read-only; but
        # functions may edit what they are given.
        columns = {
            name: array if array.flags.writeable else array.copy()
            for name, array in columns.items()
        }
        if self.batch_function is not None:
            found = _checked(self.batch_function(columns), "transformation_batch_fn")
            arrays = {name: np.asarray(column) for name, column in found.items()}
            for name, array in arrays.items():
                if array.ndim == 0 or len(array) != rows:
                    raise DataError(
                        f"transformation_batch_fn returned {array.shape} for {name!r} of {rows} "
                        "rows. Return as many rows as are given."
                    )
        else:
            arrays = self._by_row(columns, rows)
        for name in self.removed:
            arrays.pop(name, None)
        for field in self.edited:
            if field.name not in arrays:
                raise _missing(field.name, arrays)
            arrays[field.name] = _as_declared(arrays[field.name], field)
        for name in self.text:
            if name in arrays and arrays[name].dtype.kind in "OSU":
                # As long as the longest text, arrays of NumPy's own types differ from part to part.
                arrays[name] = arrays[name].astype(object)
        for name in self.needed:
            if name not in arrays:
                if self.all_needed:
                    raise _missing(name, arrays)
            elif not self._is_usable(name, arrays[name]):
                raise DataError(
                    f"Column {name!r} is {arrays[name].dtype.name} after the transformation. Make "
                    "numbers of it."
                )
        return {name: array for name, array in arrays.items() if self._is_usable(name, array)}

    def _is_usable(self, name: str, array: Array) -> bool:
        if name in self.text and array.dtype.hasobject:
            return all(isinstance(value, (str, bytes)) for value in array.flat)
        return array.dtype.kind in "biuf"

    def _by_row(self, columns: Columns, rows: int) -> dict[str, Array]:
        function = self.row_function
        assert function is not None
        transformed = [
            _checked(function({name: array[i] for name, array in columns.items()}))
            for i in range(rows)
        ]
        names = list(transformed[0]) if transformed else []
        for i, row in enumerate(transformed):
            if row.keys() != transformed[0].keys():
                raise _other_fields("transformation_fn", names, row, _described(columns, i))
        return {name: _stack([row[name] for row in transformed], name) for name in names}


class Transformed:
    """Transforms part after part, and ensures that all have the same fields of the same types.

    Parameters
    ----------
    transformation : Transformation
        What is applied to every part.
    """

    def __init__(self, transformation: Transformation) -> None:
        self._transformation = transformation
        self._name = (
            "transformation_fn"
            if transformation.batch_function is None
            else "transformation_batch_fn"
        )
        self._rows = 0
        self._first: dict[str, Array] | None = None

    def parts(self, columns: Columns, num_bytes: int) -> Iterator[dict[str, Array]]:
        """Transform some rows at a time, about as many as a number of bytes holds.

        Raises
        ------
        DataError
            If the rows have other fields, or fields of another type or shape, than the first.
        """
        rows, start, step = num_rows(columns), 0, _FIRST_ROWS
        while start < rows:
            part = self._transformation(take(columns, slice(start, start + step)))
            self._check(part, columns, start)
            yield part
            start += step
            size = sum(array.nbytes for array in part.values()) / num_rows(part)
            step = max(int(num_bytes / max(size, 1)), 1)

    def _check(self, part: Columns, columns: Columns, start: int) -> None:
        first = self._rows
        self._rows += num_rows(part)
        if self._first is None:
            self._first = take(part, slice(0, 0))
            return
        where = f"rows {first} to {self._rows - 1} that were read, {_described(columns, start)}"
        if part.keys() != self._first.keys():
            raise _other_fields(self._name, self._first, part, where)
        for name, like in self._first.items():
            found = part[name]
            if (found.dtype, found.shape[1:]) != (like.dtype, like.shape[1:]):
                raise DataError(
                    f"{self._name} returned {_form(like)} for {name!r} in the first rows, and "
                    f"{_form(found)} in {where}. Return one type and shape for all rows, or name "
                    "the field's type in transformation_edit_fields, which casts to it."
                )


def make_transformation(
    get: Callable[[str], Any], needed: Sequence[str], text: Sequence[str] = ()
) -> Transformation | None:
    """Return what is made of rows, as params say; None if nothing.

    Parameters
    ----------
    get : callable
        The name of a param to its value.
    needed : sequence of str
        Fields that must be there, and numbers, in the end.
    text : sequence of str
        Those that may be text, too.

    Raises
    ------
    ParamError
        If the params do not go together.
    """
    by_row, by_batch = get("transformation_fn"), get("transformation_batch_fn")
    for name, function in (("transformation_fn", by_row), ("transformation_batch_fn", by_batch)):
        if function is not None and not callable(function):
            raise ParamError(f"{name}: expected a callable, found {function!r}.")
    if by_row is not None and by_batch is not None:
        raise ParamError(
            "transformation_fn and transformation_batch_fn are both set. Set one of them."
        )
    edited = edited_fields(get("transformation_edit_fields"))
    removed = tuple(get("transformation_removed_fields") or ())
    if by_row is None and by_batch is None:
        if edited or removed:
            raise ParamError(
                "transformation_edit_fields and transformation_removed_fields tell of a "
                "transformation, and there is none. Set transformation_fn."
            )
        return None
    return Transformation(by_row, by_batch, edited, removed, tuple(needed), text=tuple(text))


def edited_fields(given: Sequence[Any] | None) -> tuple[EditedField, ...]:
    """Read ``transformation_edit_fields``: ``(name, dtype, shape)``, with or without more entries.

    Petastorm's fields, ``(name, dtype, shape, nullable)`` and ``UnischemaField``, are such.

    Raises
    ------
    ParamError
        If an entry is not of that form.
    """
    fields = []
    if isinstance(given, str) or not isinstance(given or (), Iterable):
        raise ParamError(
            "transformation_edit_fields: expected a list of entries such as ('image', 'float32', "
            f"(28, 28)), found {given!r}."
        )
    for entry in given or ():
        try:
            name, dtype, shape = tuple(entry)[:3]
            sizes = None if shape is None else tuple(shape)
            fields.append(EditedField(str(name), np.dtype(dtype).name, sizes))
        except (TypeError, ValueError):
            raise ParamError(
                "transformation_edit_fields: expected entries such as ('image', 'float32', "
                f"(28, 28)), found {entry!r}."
            ) from None
    return tuple(fields)


def _checked(returned: Any, name: str = "transformation_fn") -> Mapping[str, Any]:
    if not isinstance(returned, Mapping):
        raise DataError(f"{name} returned {type(returned).__name__}. Return a dict.")
    return returned


def _stack(values: Sequence[Any], name: str) -> Array:
    arrays = [np.asarray(value) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise DataError(
            f"transformation_fn returned rows of shapes {shapes[0]} and {shapes[1]} for {name!r}. "
            "Pad or cut them to one shape."
        )
    return np.stack(arrays)


def _as_declared(array: Array, field: EditedField) -> Array:
    shape = array.shape[1:]
    if field.shape is not None and (
        len(shape) != len(field.shape)
        or any(wanted not in (None, size) for size, wanted in zip(shape, field.shape, strict=True))
    ):
        raise DataError(
            f"Column {field.name!r} has rows of shape {shape} after the transformation; "
            f"transformation_edit_fields says {field.shape}."
        )
    return array.astype(field.dtype, copy=False)


def _other_fields(
    function: str, wanted: Iterable[str], found: Iterable[str], where: str
) -> DataError:
    names, others = list(wanted), list(found)
    lacking = [repr(name) for name in names if name not in others]
    added = [repr(name) for name in others if name not in names]
    differences = [
        *([f"lack {', '.join(lacking)}"] if lacking else []),
        *([f"have {', '.join(added)} besides"] if added else []),
    ]
    return DataError(
        f"{function} returned other fields for some rows than for the first: {where}, "
        f"{' and '.join(differences)} (text does not count). Return the same fields for all rows."
    )


def _form(array: Array) -> str:
    return f"{array.dtype.name} of shape {array.shape[1:]}"


def _described(columns: Columns, row: int) -> str:
    """Describe a row by its values."""
    values = repr({name: array[row] for name, array in columns.items()})
    return f"beginning with {values[:_MOST_SHOWN]}{'...' if len(values) > _MOST_SHOWN else ''}"


def _missing(name: str, arrays: Mapping[str, Array]) -> DataError:
    return DataError(
        f"The transformation leaves no field {name!r}; its fields are {', '.join(arrays)}."
    )
