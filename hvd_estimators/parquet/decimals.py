"""Decimals of Arrow as doubles: the same in training, `transform` and `load_predictor`."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["without_decimals"]


def without_decimals(column: pa.Array) -> pa.Array:
    """Return a column with the nearest double for each decimal, in lists, too.

    Spark's cast gives the same. Arrow's own cast is often off in the last bit.
    """
    kinds = pa.types
    if kinds.is_dictionary(column.type) and kinds.is_decimal(column.type.value_type):
        column = column.dictionary_decode()
    if not kinds.is_decimal(_leaf(column.type)):
        return column
    # Text in between: Arrow reads the nearest double from it.
    text = column.cast(_with_leaf(column.type, pa.string()))
    return text.cast(_with_leaf(column.type, pa.float64()))


def _leaf(data_type: pa.DataType) -> pa.DataType:
    while _is_list(data_type):
        data_type = data_type.value_type
    return data_type


def _with_leaf(data_type: pa.DataType, leaf: pa.DataType) -> pa.DataType:
    """Return a type with another one in its innermost lists."""
    if not _is_list(data_type):
        return leaf
    inner = _with_leaf(data_type.value_type, leaf)
    field = data_type.value_field.with_type(inner)
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(field, data_type.list_size)
    return pa.large_list(field) if pa.types.is_large_list(data_type) else pa.list_(field)


def _is_list(data_type: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(data_type) for is_kind in kinds)
