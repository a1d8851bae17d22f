"""Transformation of rows by a user's function, between reading and batching.

The readers use it on ranks; the driver uses it for its dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array, Columns, as_array, num_rows, take
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import DataError, ParamError

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
BatchFunction = Callable[[dict[str, Array]], Mapping[str, Any]]


FIRST_ROWS = 32
"""Number of rows that are transformed first, to measure their size."""

_MOST_SHOWN = 200
"""Maximum number of characters of a row in messages."""


@dataclass(frozen=True)
class EditedField:
    """A field that a transformation adds or changes.

    Attributes
    ----------
    name : str
        Name of the field.
    dtype : str
        NumPy name of the type to which values are cast.
    shape : tuple of int or None, or None
        Shape of a row. A None element means any length; None instead of the tuple means any shape.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Transformation:
    """A user's function of rows or batches, with the processing of its output fields.

    Attributes
    ----------
    row_function : callable or None
        Maps a row (a dict of values) to a row.
    batch_function : callable or None
        Maps columns (a dict of arrays, rows first) to columns with the same number of rows. Used
        instead of ``row_function``. Both functions may edit their input arrays.
    edited : tuple of EditedField
        Fields that are cast and checked.
    removed : tuple of str
        Fields that are dropped.
    needed : tuple of str
        Fields that must be numeric in the result. Other fields with text are dropped.
    all_needed : bool
        Whether all of ``needed`` must be present.
    text : tuple of str
        Fields of ``needed`` that may be text. Their values are Python objects.
    inputs : InputColumns or None
        The model's inputs. Columns of matrices are stacked at the end. None stacks none.
    """

    row_function: RowFunction | None = None
    batch_function: BatchFunction | None = None
    edited: tuple[EditedField, ...] = ()
    removed: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    all_needed: bool = True
    text: tuple[str, ...] = ()
    inputs: InputColumns | None = None

    def __call__(self, columns: Columns) -> dict[str, Array]:
        """Return the transformed columns.

        Raises
        ------
        DataError
            If the function returns another number of rows, rows with different fields or shapes, or
            a field that does not match its declaration.
        """
        rows = num_rows(columns)
        # Input arrays are read-only if they are Arrow memory or cached for other passes. Functions
        # may edit their inputs, so pass copies.
        columns = {
            name: array if array.flags.writeable else array.copy()
            for name, array in columns.items()
        }
        if self.batch_function is not None:
            returned = _checked(self.batch_function(columns), "transformation_batch_fn")
            arrays = {name: self._array(name, column) for name, column in returned.items()}
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
                # NumPy's own text types are as long as the longest text, so they differ between
                # parts.
                arrays[name] = arrays[name].astype(object)
        for name in self.needed:
            if name not in arrays:
                if self.all_needed:
                    raise _missing(name, arrays)
            elif not self._is_usable(name, arrays[name]):
                raise DataError(
                    f"Column {name!r} is {arrays[name].dtype.name} after the transformation. Make "
                    "numbers of it.",
                    column=name,
                )
        usable = {name: array for name, array in arrays.items() if self._is_usable(name, array)}
        return usable if self.inputs is None else self.inputs.stack(usable)

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
        return {
            name: _stack([self._array(name, row[name]) for row in transformed], name)
            for name in names
        }

    def _array(self, name: str, values: Any) -> Array:
        return as_array(values) if name in self.text else np.asarray(values)


class Transformed:
    """Transform parts one after another, and check that all have the same fields and types.

    Parameters
    ----------
    transformation : Transformation
        Applied to every part.
    """

    def __init__(self, transformation: Transformation) -> None:
        self._transformation = transformation
        is_batch = transformation.batch_function is not None
        self._name = "transformation_batch_fn" if is_batch else "transformation_fn"
        self._rows = 0
        self._first: dict[str, Array] | None = None

    def parts(self, columns: Columns, num_bytes: int) -> Iterator[dict[str, Array]]:
        """Transform rows in steps whose results take about ``num_bytes`` each.

        Raises
        ------
        DataError
            If the fields, types or shapes of the rows differ from the first rows.
        """
        rows, start, step = num_rows(columns), 0, FIRST_ROWS
        while start < rows:
            given = take(columns, slice(start, start + step))
            part = self._transformation(given)
            self.check(part, given)
            yield part
            start += step
            size = sum(array.nbytes for array in part.values()) / num_rows(part)
            step = max(int(num_bytes / max(size, 1)), 1)

    def check(self, part: Columns, given: Columns) -> None:
        """Check the next transformed rows, of which ``given`` are the originals; see `parts`."""
        first = self._rows
        self._rows += num_rows(part)
        if self._first is None:
            # Copies, because views would keep the memory of the first rows.
            self._first = {name: array[:0].copy() for name, array in part.items()}
            return
        where = f"rows {first} to {self._rows - 1} that were read, {_described(given, 0)}"
        if part.keys() != self._first.keys():
            raise _other_fields(self._name, self._first, part, where)
        for name, like in self._first.items():
            array = part[name]
            if (array.dtype, array.shape[1:]) != (like.dtype, like.shape[1:]):
                raise DataError(
                    f"{self._name} returned {_form(like)} for {name!r} in the first rows, and "
                    f"{_form(array)} in {where}. Return one type and shape for all rows, or name "
                    "the field's type in transformation_edit_fields, which casts to it."
                )


def make_transformation(
    get: Callable[[str], Any], needed: Sequence[str], text: Sequence[str] = ()
) -> Transformation | None:
    """Return the transformation that the params define, or None.

    Parameters
    ----------
    get : callable
        Returns the value of a param by name.
    needed : sequence of str
        Fields that must be present and numeric in the result.
    text : sequence of str
        Fields of ``needed`` that may be text.

    Raises
    ------
    ParamError
        If the params are invalid or contradict each other.
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
                "transformation_edit_fields and transformation_removed_fields describe "
                "a transformation, and none is set. Set transformation_fn."
            )
        return None
    return Transformation(by_row, by_batch, edited, removed, tuple(needed), text=tuple(text))


def edited_fields(given: Sequence[Any] | None) -> tuple[EditedField, ...]:
    """Parse ``transformation_edit_fields``: tuples ``(name, dtype, shape)``, or longer ones.

    Further elements of a tuple are ignored. Petastorm's ``(name, dtype, shape, nullable)`` tuples
    and ``UnischemaField`` have this form.

    Raises
    ------
    ParamError
        If an entry does not have this form.
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


def _stack(arrays: Sequence[Array], name: str) -> Array:
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
        or any(
            expected not in (None, size) for size, expected in zip(shape, field.shape, strict=True)
        )
    ):
        raise DataError(
            f"Column {field.name!r} has rows of shape {shape} after the transformation; "
            f"transformation_edit_fields says {field.shape}.",
            column=field.name,
        )
    return array.astype(field.dtype, copy=False)


def _other_fields(
    function: str, expected: Iterable[str], returned: Iterable[str], where: str
) -> DataError:
    names, returned_names = list(expected), list(returned)
    missing = [repr(name) for name in names if name not in returned_names]
    added = [repr(name) for name in returned_names if name not in names]
    differences = [
        *([f"lack {', '.join(missing)}"] if missing else []),
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
