"""Rows of zeros to try a model with, so that no row need be computed for that. On the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pyspark.sql import DataFrame

from hvd_estimators.loading.transformation import EditedField
from hvd_estimators.parquet.columns import Array
from hvd_estimators.prepare.attributes import vector_width
from hvd_estimators.prepare.schema import stored_column

__all__ = ["known_shapes", "rows_of_zeros"]

_ROWS = 2
"""As many as show which dimension counts the rows."""


def rows_of_zeros(
    columns: Sequence[str], shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str]
) -> dict[str, Array] | None:
    """Return two rows of zeros as a UDF would be given them.

    Parameters
    ----------
    columns : sequence of str
        The columns.
    shapes : mapping
        Column to the shape of a row, as far as that is known.
    dtypes : mapping
        Column to the name of its NumPy type; "object" for text, of which there are no zeros.

    Returns
    -------
    dict of str to array, or None
        None if the shape or type of a column is not known.
    """
    zeros = {}
    for name in columns:
        if name not in shapes or dtypes.get(name, "object") == "object":
            return None
        zeros[name] = np.zeros((_ROWS, *shapes[name]), dtypes[name])
    return zeros


def known_shapes(
    columns: Sequence[str],
    metadata: Mapping[str, Mapping[str, Any]],
    edited: Sequence[EditedField] = (),
    dataset: DataFrame | None = None,
    allow_text: bool = False,
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return what is known of columns without running anything: their shapes and their types.

    Parameters
    ----------
    columns : sequence of str
        The columns.
    metadata : mapping
        What is known from training, see `column_metadata`.
    edited : sequence of EditedField
        What a transformation makes of columns, where they come as it leaves them.
    dataset : DataFrame, optional
        What is predicted on.
    allow_text : bool
        Whether columns may be text.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name in columns:
        # Models of horovod.spark say less.
        entry = metadata.get(name, {})
        if isinstance(entry.get("shape"), (list, tuple)) and None not in entry["shape"]:
            shapes[name] = tuple(entry["shape"])
        if "dtype" in entry:
            dtypes[name] = entry["dtype"]
    for field in edited:
        if field.name in columns:
            shapes.pop(field.name, None)
            dtypes[field.name] = field.dtype
            if field.shape is not None and None not in field.shape:
                shapes[field.name] = tuple(size for size in field.shape if size is not None)
    for name in columns if dataset is not None else ():
        assert dataset is not None
        spec = stored_column(dataset, name, allow_text=allow_text).spec
        dtypes[name] = spec.dtype
        # Where the DataFrame's type says more than the training's, or something else.
        width = vector_width(dataset, name)
        if not spec.shape:
            shapes[name] = ()
        elif spec.kind == "vector" and width:
            shapes[name] = (width,)
        elif len(shapes.get(name, ())) != len(spec.shape):
            shapes.pop(name, None)
    return shapes, dtypes
