"""Arrow's lists and bytes as elements and offsets. Imports no PySpark."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hvd_estimators.data.types import is_bytes, is_list_view

Array = npt.NDArray[Any]


def split_lists(column: pa.Array) -> tuple[Array, pa.Array]:
    """Split a column of lists or bytes into its elements and the offsets of the rows in them.

    The first offset is 0, and the last one is the number of elements. The elements of a null row
    are arbitrary.
    """
    if is_bytes(column.type):
        return _split_bytes(column)
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        elements = column.values.slice(column.offset * size, len(column) * size)
        return np.arange(len(column) + 1) * size, elements
    if is_list_view(column.type):
        # Rows of list views can overlap and can be in any order.
        sizes = column.sizes.to_numpy()
        if column.null_count:
            sizes = np.where(column.is_valid().to_numpy(zero_copy_only=False), sizes, 0)
        return np.append(0, np.cumsum(sizes)), column.flatten()
    offsets = column.offsets.to_numpy()
    if not len(offsets):  # an empty column
        return np.zeros(1, np.int64), column.values.slice(0, 0)
    elements = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return offsets - offsets[0], elements


def _split_bytes(column: pa.Array) -> tuple[Array, pa.Array]:
    """Implement `split_lists` for bytes, which Arrow cannot view as lists."""
    if pa.types.is_fixed_size_binary(column.type):
        size, data = column.type.byte_width, 1
        offsets = (column.offset + np.arange(len(column) + 1)) * size
    else:
        if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
            column = column.cast(pa.large_binary())
        dtype, data = np.int64 if pa.types.is_large_binary(column.type) else np.int32, 2
        # An empty column may have no offsets.
        offsets = np.frombuffer(column.buffers()[1] or b"", dtype)[column.offset :]
        offsets = offsets[: len(column) + 1] if len(column) else np.zeros(1, dtype)
    start, stop = int(offsets[0]), int(offsets[-1])
    if start == stop:
        return offsets - start, pa.array([], pa.uint8())
    buffer = column.buffers()[data].slice(start, stop - start)
    elements = pa.Array.from_buffers(pa.uint8(), stop - start, [None, buffer])
    return offsets - start, elements
