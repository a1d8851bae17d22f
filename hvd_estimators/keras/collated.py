"""Batches of rows of any length as columns, from a collate function or padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.exceptions import DataError
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.collate_fn import BatchNames


@dataclass(frozen=True)
class CollatedColumns:
    """Conversion of collated batches to columns of the types that the dry run has found.

    Attributes
    ----------
    names : BatchNames
        Names of inputs, labels and weights.
    like : mapping of str to array
        The columns of a batch without rows.
    """

    names: BatchNames
    like: Mapping[str, Array]

    @staticmethod
    def of(batch: CollatedBatch, names: BatchNames) -> CollatedColumns:
        """Return the conversion for all batches, given one with rows."""
        features = tuple(names.inputs(batch))
        like = {name: _plain(array)[:0] for name, array in names.columns(batch).items()}
        return CollatedColumns(BatchNames(features, names.labels, names.weight), like)

    def columns(self, batch: CollatedBatch) -> Columns:
        """Return the columns of a batch.

        Raises
        ------
        DataError
            If it has other entries, types or dimensions than in the dry run.
        """
        if not batch.rows:
            return dict(self.like)
        given = self.names.columns(batch)
        if given.keys() != self.like.keys():
            raise DataError(
                f"collate_fn returned the entries {', '.join(given)}, and {', '.join(self.like)} "
                "in the dry run. Return the same entries for all rows."
            )
        return {name: _alike(name, given[name], like) for name, like in self.like.items()}


def _plain(array: Array) -> Array:
    array = np.asarray(array)
    # Text of any length.
    return array.astype(object) if array.dtype.kind in "SU" else array


def _alike(name: str, given: Array, like: Array) -> Array:
    array = _plain(given)
    is_same = array.ndim == like.ndim and np.can_cast(array.dtype, like.dtype, "same_kind")
    if not is_same:
        raise DataError(
            f"collate_fn returned {name!r} with {array.ndim} dimensions of type {array.dtype}, and "
            f"with {like.ndim} of {like.dtype} in the dry run. Return arrays of one type."
        )
    return array.astype(like.dtype, copy=False)
