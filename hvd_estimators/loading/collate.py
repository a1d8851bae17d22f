"""Batches that a function of the user makes of rows, in place of arrays by column.

The readers use it on ranks, the driver for its dry run, and predictors for their rows.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.data.rows import Row, RowTable, column_values, one_array
from hvd_estimators.exceptions import DataError, ParamError

_lock = threading.RLock()
"""Held during calls of the user's function. Tokenizers, for example, allow one thread at a time."""


@dataclass(frozen=True)
class CollatedBatch:
    """Batch of some rows, in the form of the user.

    Attributes
    ----------
    rows : int
        Number of rows that the batch was made of.
    value : object
        The batch, with arrays in place of tensors while readers hold it. None without rows.
    weights : array or None
        Sample weight of each row.
    parts : tuple of CollatedBatch
        The batch in parts, which a model gets one after another; empty for a batch in one part.
    """

    rows: int
    value: Any = None
    weights: Any = None
    parts: tuple[CollatedBatch, ...] = ()

    @property
    def passes(self) -> tuple[CollatedBatch, ...]:
        """The parts, or the batch itself."""
        return self.parts or (self,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each batch, as in `hvd_estimators.loading.shuffle.Chunk`."""
        return (self.rows,)


@dataclass(frozen=True)
class Collate(abc.ABC):
    """Maker of batches from rows; a framework implements `make`.

    Attributes
    ----------
    weight : str or None
        Column with the weight of each row.
    """

    weight: str | None

    takes_nulls: ClassVar[bool] = False
    """True if rows may hold nulls."""

    @abc.abstractmethod
    def make(self, rows: RowTable) -> Any:
        """Return the batch of one or more rows, with arrays in place of tensors."""

    def __call__(self, rows: RowTable) -> CollatedBatch:
        """Return the batch of some rows.

        Raises
        ------
        DataError
            If the user's function returns no batch, or a sample weight is null.
        """
        if not len(rows):
            return CollatedBatch(0)
        with _lock:
            value = self.make(rows)
        return CollatedBatch(len(rows), value, self._weights(rows))

    def _weights(self, rows: RowTable) -> Array | None:
        if self.weight is None or self.weight not in rows.table.column_names:
            return None
        column = rows.table.column(self.weight)
        if column.null_count:
            raise DataError(
                f"Column {self.weight!r} holds nulls; fill or drop them.", column=self.weight
            )
        return np.array(column_values(one_array(column)), np.float64)


@dataclass(frozen=True)
class BoundedCollate:
    """Maker of batches in parts of a bounded size, as training gets them.

    Attributes
    ----------
    collate : Collate
        Makes each part.
    size_fn : callable
        Returns the size of a row, such as its number of tokens.
    limit : float
        Largest size of a part: its rows times the size of the largest one, as after padding.
    """

    collate: Collate
    size_fn: Callable[[Row], float]
    limit: float

    def __call__(self, rows: RowTable) -> CollatedBatch:
        """Return the batch of some rows, with rows of similar size in a part.

        A row that is larger than the limit is a part by itself.
        """
        parts = [rows[part] for part in self._split(self.sizes(rows))]
        if len(parts) <= 1:
            return self.collate(rows)
        return CollatedBatch(len(rows), parts=tuple(map(self.collate, parts)))

    def sizes(self, rows: RowTable) -> Array:
        """Return the size of each row.

        Raises
        ------
        ParamError
            If the user's function fails, or returns something other than a positive number.
        """
        given = rows.to_rows()
        try:
            with _lock:
                sizes = [self.size_fn(row) for row in given]
            made = np.array(sizes, np.float64)
        except Exception as error:
            raise ParamError(
                f"batch_size_fn failed with {type(error).__name__}: {error}. It gets a row as a "
                "dict of column to value, and returns its size, such as "
                'lambda row: len(row["tokens"]).'
            ) from error
        if made.shape != (len(given),) or not (made > 0).all() or not np.isfinite(made).all():
            raise ParamError(
                f"batch_size_fn: expected a positive number for each row, found {sizes[:5]}. "
                "Return the size of the row, such as its number of tokens, at least 1."
            )
        return made

    def _split(self, sizes: Array) -> list[Array]:
        """Return the positions of each part's rows, the smallest rows first."""
        order = np.argsort(sizes, kind="stable")
        starts = [0]
        for end, size in enumerate(sizes[order].tolist()):
            if end > starts[-1] and (end + 1 - starts[-1]) * size > self.limit:
                starts.append(end)
        return np.split(order, starts[1:])
