"""A model's inputs: single columns, and matrices of several columns of numbers.

``feature_cols`` names both: ``[["a", "b", "c"], "image"]`` is a matrix with three columns, and an
image. Parquet files, DataFrames and transformations have the single columns. Readers and
predictors stack them, so that models and their trainers only see inputs. Imports no PySpark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.data.manifest import ColumnSpec, JoinedSpec
from hvd_estimators.exceptions import ColumnError, listed

MATRIX_NAME = "features"
"""Name of the only matrix without a name; several are numbered."""

_MOST_SHOWN = 8
"""Maximum number of columns in a suggestion."""


@dataclass(frozen=True)
class InputColumns:
    """The inputs of a model, in order, and the columns that each is made of.

    Attributes
    ----------
    by_name : mapping of str to tuple of str
        Name of each input to its columns. A single column is an input of the same name.
    matrices : mapping of str to tuple of str
        The inputs among them that are matrices.
    kept : frozenset of str
        Columns of matrices that are also needed alone, for example as labels.
    """

    by_name: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    matrices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: Sequence[Any] | None, kept: Iterable[str] = ()) -> InputColumns:
        """Return the inputs that a value of ``feature_cols`` describes.

        Parameters
        ----------
        given : sequence
            Names of columns; lists of names, which are matrices; and dicts of one matrix's name to
            its columns.
        kept : iterable of str
            Columns that are also needed alone.
        """
        given = given or ()
        num_unnamed = sum(isinstance(entry, (list, tuple)) for entry in given)
        numbers = iter(range(num_unnamed))
        by_name: dict[str, tuple[str, ...]] = {}
        matrices: dict[str, tuple[str, ...]] = {}
        for entry in given:
            if isinstance(entry, str):
                by_name[entry] = (entry,)
                continue
            if isinstance(entry, Mapping):
                ((name, columns),) = entry.items()
            else:
                number = next(numbers)
                name = MATRIX_NAME if num_unnamed == 1 else f"{MATRIX_NAME}_{number}"
                columns = entry
            by_name[name] = matrices[name] = tuple(columns)
        return cls(by_name, matrices, frozenset(kept))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(self.by_name)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of all inputs, each once."""
        return tuple(dict.fromkeys(c for columns in self.by_name.values() for c in columns))

    def specs(self, specs: Sequence[ColumnSpec]) -> tuple[ColumnSpec, ...]:
        """Return columns with a `JoinedSpec` in place of each matrix's columns.

        Raises
        ------
        ColumnError
            If a column of a matrix is missing or does not hold one number per row.
        """
        stacked = self._stacked()
        known = {spec.name: spec for spec in specs}
        made = []
        for matrix, names in self.matrices.items():
            for name in names:
                if name not in known:
                    raise ColumnError(
                        f"the data has no column {name!r} for {_shown(names)}; its "
                        f"columns are {listed(known)}.",
                        param="feature_cols",
                        column=name,
                    )
                spec = known[name]
                if not spec.is_number:
                    raise _not_a_number(name, names, spec.shape or "text")
            members = tuple(known[name] for name in names)
            dtype = np.result_type(*(spec.dtype for spec in members)).name
            made.append(JoinedSpec(matrix, "matrix", dtype, (len(names),), members=members))
        return (*(spec for spec in specs if spec.name not in stacked), *made)

    def stack(self, columns: Columns) -> dict[str, Array]:
        """Return columns with a matrix in place of each matrix's columns.

        Raises
        ------
        ColumnError
            See `specs`.
        """
        stacked = self._stacked()
        made = {name: array for name, array in columns.items() if name not in stacked}
        for matrix, names in self.matrices.items():
            arrays = []
            for name in names:
                if name not in columns:
                    raise ColumnError(
                        f"there is no column {name!r} for {_shown(names)}; there are "
                        f"{listed(columns)}.",
                        param="feature_cols",
                        column=name,
                    )
                array = columns[name]
                if array.dtype.kind not in "biuf" or array.size != len(array):
                    held = array.shape[1:] if array.dtype.kind in "biuf" else array.dtype.name
                    raise _not_a_number(name, names, held)
                arrays.append(array.reshape(-1))
            made[matrix] = np.stack(arrays, axis=1)
        return made

    def _stacked(self) -> set[str]:
        """Return the columns that are needed only in a matrix."""
        return {name for names in self.matrices.values() for name in names} - self.kept


def matrix_hint(row_shapes: Mapping[str, Sequence[int]]) -> str:
    """Return the nested spelling of ``feature_cols`` for a model with fewer inputs, as a sentence.

    Parameters
    ----------
    row_shapes : mapping of str to sequence of int
        Each input's name and the shape of a row.

    Returns
    -------
    str
        The sentence, with a space before it; empty if fewer than two inputs are single numbers.
    """
    numbers = [name for name, shape in row_shapes.items() if tuple(shape) in ((), (1,))]
    if len(numbers) < 2:
        return ""
    entries = [
        _shown(numbers) if name == numbers[0] else json.dumps(name, ensure_ascii=False)
        for name in row_shapes
        if name == numbers[0] or name not in numbers
    ]
    return (
        f" feature_cols=[{', '.join(entries)}] makes one input of shape (rows, {len(numbers)}) of "
        f"the {len(numbers)} columns of numbers."
    )


def _shown(names: Sequence[str]) -> str:
    """Return a list of columns as text, shortened if it is long."""
    shown = [json.dumps(name, ensure_ascii=False) for name in names[:_MOST_SHOWN]]
    return f"[{', '.join(shown)}{', ...' if len(names) > _MOST_SHOWN else ''}]"


def _not_a_number(name: str, names: Sequence[str], found: Any) -> ColumnError:
    held = f"rows of shape {tuple(found)}" if isinstance(found, (tuple, list)) else found
    return ColumnError(
        f"expected one number per row in each column of {_shown(names)}, and "
        f"{name!r} holds {held}. Name it outside of the list, as another input.",
        param="feature_cols",
        column=name,
    )
