"""Column types of Spark and Arrow, and the NumPy types in which readers deliver them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ColumnError, DataError

__all__ = [
    "SPARK_DTYPES",
    "column_spec",
    "is_bytes",
    "is_level",
    "is_list_view",
    "num_leaves",
    "text_options",
    "without_decimals",
]


SPARK_DTYPES: Mapping[str, str] = {
    "ByteType": "int8",
    "ShortType": "int16",
    "IntegerType": "int32",
    "LongType": "int64",
    "FloatType": "float32",
    "DoubleType": "float64",
    "BooleanType": "bool",
    "DecimalType": "float64",
}
"""Spark's scalar types by class name, since ranks have no PySpark, and their NumPy names."""


def without_decimals(column: pa.Array) -> pa.Array:
    """Convert decimals in a column, or in its lists, to the nearest doubles.

    The result equals that of Spark's cast. Arrow's own cast is often wrong in the last bit.
    """
    kinds = pa.types
    if kinds.is_dictionary(column.type) and kinds.is_decimal(column.type.value_type):
        column = column.dictionary_decode()
    if not kinds.is_decimal(_leaf(column.type)):
        return column
    # Cast via strings, because Arrow parses a string to the nearest double.
    text = column.cast(_with_leaf(column.type, pa.string()))
    return text.cast(_with_leaf(column.type, pa.float64()))


def _leaf(data_type: pa.DataType) -> pa.DataType:
    while _is_any_list(data_type):
        data_type = data_type.value_type
    return data_type


def _with_leaf(data_type: pa.DataType, leaf: pa.DataType) -> pa.DataType:
    """Return a type with its innermost list element type replaced."""
    if not _is_any_list(data_type):
        return leaf
    inner = _with_leaf(data_type.value_type, leaf)
    field = data_type.value_field.with_type(inner)
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(field, data_type.list_size)
    return pa.large_list(field) if pa.types.is_large_list(data_type) else pa.list_(field)


def _is_any_list(data_type: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(data_type) for is_kind in kinds)


def _one_of(*names: str) -> Callable[[pa.DataType], bool]:
    # Only newer versions of PyArrow have some of these predicates.
    predicates = [getattr(pa.types, name) for name in names if hasattr(pa.types, name)]
    return lambda data_type: any(predicate(data_type) for predicate in predicates)


is_list_view = _one_of("is_list_view", "is_large_list_view")


is_bytes = _one_of("is_binary", "is_large_binary", "is_binary_view", "is_fixed_size_binary")


_is_string = _one_of("is_string", "is_large_string", "is_string_view")


_is_list = _one_of("is_list", "is_large_list", "is_list_view", "is_large_list_view")


def column_spec(
    name: str,
    data_type: pa.DataType,
    file: str,
    *,
    allow_text: bool = False,
    bytes_as_text: bool = True,
) -> ColumnSpec:
    """Return the spec of a column with an Arrow type.

    Numbers and booleans keep their type, decimals become 64-bit floats, and bytes become arrays of
    unsigned 8-bit integers. A dictionary-encoded column is treated like its values.

    Parameters
    ----------
    name : str
        The column's name.
    data_type : pyarrow.DataType
        The column's type.
    file : str
        The file that contains the column; for messages.
    allow_text : bool
        Accept strings, and bytes without a fixed size, as text.
    bytes_as_text : bool
        Whether ``allow_text`` includes bytes. If not, they become arrays.

    Returns
    -------
    ColumnSpec
        Dimensions that the type does not specify are -1.

    Raises
    ------
    ColumnError
        If the type is not supported for training.
    DataError
        If the type is Arrow's null type, which means that all values are null.
    """
    leaf, shape = data_type, []
    while True:
        if pa.types.is_fixed_size_list(leaf):
            shape.append(leaf.list_size)
        elif _is_list(leaf):
            shape.append(-1)
        else:
            break
        leaf = leaf.value_type
        while is_level(leaf):
            leaf = leaf[0].type
    if pa.types.is_dictionary(leaf):
        leaf = leaf.value_type
    is_text = _is_string(leaf) or (
        bytes_as_text and is_bytes(leaf) and not pa.types.is_fixed_size_binary(leaf)
    )
    if allow_text and is_text and not shape:
        return ColumnSpec(name, "text", "object")
    if is_bytes(leaf):
        shape.append(leaf.byte_width if pa.types.is_fixed_size_binary(leaf) else -1)
        dtype = "uint8"
    elif pa.types.is_boolean(leaf):
        dtype = "bool"
    elif pa.types.is_decimal(leaf):
        dtype = "float64"
    elif pa.types.is_integer(leaf) or pa.types.is_floating(leaf):
        dtype = leaf.to_pandas_dtype().__name__
    elif pa.types.is_null(leaf):
        raise DataError(
            f"Column {name!r} holds nothing but nulls in {file!r} (its type there is {data_type}); "
            "fill or drop them before training."
        )
    else:
        raise ColumnError(
            f"Column {name!r} has type {data_type} in {file!r}; expected a number, a boolean, "
            f"bytes, or lists of these: {_remedy(leaf, data_type)}, or leave it out."
        )
    return ColumnSpec(name, "array" if shape else "scalar", dtype, tuple(shape))


def text_options(allow_text: bool | Mapping[str, bool], name: str) -> dict[str, Any]:
    """Return the text options of `column_spec` for one column.

    Parameters
    ----------
    allow_text : bool or mapping
        Whether all columns may be text, or a mapping from each text column to whether its bytes
        count as text.
    name : str
        The column.
    """
    if isinstance(allow_text, bool):
        return {"allow_text": allow_text, "bytes_as_text": True}
    return {"allow_text": name in allow_text, "bytes_as_text": allow_text.get(name, True)}


def is_level(element: pa.DataType) -> bool:
    """Return whether a list's element type is an artificial struct of Spark's legacy format.

    With ``spark.sql.parquet.writeLegacyFormat``, nested lists lack a level for their elements.
    PyArrow therefore reads the inner list as a struct with a single field.
    """
    return (
        pa.types.is_struct(element)
        and element.num_fields == 1
        and element[0].name in ("array", "bag")
    )


def num_leaves(data_type: pa.DataType) -> int:
    """Return the number of Parquet columns that store a column of this type."""
    if isinstance(data_type, pa.BaseExtensionType):
        return num_leaves(data_type.storage_type)
    if pa.types.is_struct(data_type):
        return sum(num_leaves(data_type[i].type) for i in range(data_type.num_fields))
    if pa.types.is_map(data_type):
        return num_leaves(data_type.key_type) + num_leaves(data_type.item_type)
    if _is_list(data_type) or pa.types.is_fixed_size_list(data_type):
        return num_leaves(data_type.value_type)
    return 1


def _remedy(leaf: pa.DataType, data_type: pa.DataType) -> str:
    if _is_string(leaf) and pa.types.is_dictionary(data_type):
        return "store the codes of its categories instead (in pandas, frame[column].cat.codes)"
    if _is_string(leaf):
        return (
            "store numbers instead, such as those of pyspark.ml.feature.StringIndexer or "
            "pandas.factorize"
        )
    if pa.types.is_temporal(leaf):
        return "store a number instead, such as the seconds since a moment, or the day of the year"
    if pa.types.is_struct(leaf):
        return "store the fields that are needed as columns of their own"
    if pa.types.is_map(leaf):
        return "store the values that are needed as columns of their own"
    if isinstance(leaf, pa.BaseExtensionType):
        return f"store it as the type that it is made of, {leaf.storage_type}"
    return "store it as one of these"
