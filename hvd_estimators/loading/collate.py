"""Batches that a function of the user makes of rows, in place of arrays by column.

The readers use it on ranks, the driver for its dry run, and predictors for their rows.
"""

from __future__ import annotations

import abc
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.data.rows import RowTable, column_values, one_array
from hvd_estimators.exceptions import DataError

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
    """

    rows: int
    value: Any = None
    weights: Any = None

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

    @property
    def takes_nulls(self) -> bool:
        """True if rows may hold nulls."""
        return False

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
            raise DataError(f"Column {self.weight!r} holds nulls; fill or drop them.")
        return np.array(column_values(one_array(column)), np.float64)
