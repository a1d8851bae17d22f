"""Types of columns: from Arrow to the specs that training reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ColumnError, DataError

__all__ = [
    "column_spec",
    "is_bytes",
    "is_level",
    "is_list_view",
    "num_leaves",
    "text_options",
    "without_decimals",
]


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
    while _is_any_list(data_type):
        data_type = data_type.value_type
    return data_type


def _with_leaf(data_type: pa.DataType, leaf: pa.DataType) -> pa.DataType:
    """Return a type with another one in its innermost lists."""
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
    # Predicates of types that only newer versions of PyArrow have.
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
    """Describe a column by its Arrow type.

    Numbers and booleans keep their type, decimals become 64-bit floats, and bytes become arrays
    of unsigned 8-bit integers. A dictionary-encoded column is treated like its values.

    Parameters
    ----------
    name : str
        The column's name.
    data_type : pyarrow.DataType
        Its type.
    file : str
        The file that has it; for messages.
    allow_text : bool
        Take strings as text, and bytes, too, except those of a fixed size.
    bytes_as_text : bool
        Whether this includes bytes; if not, they become arrays.

    Returns
    -------
    ColumnSpec
        Dimensions that the type does not tell are -1.

    Raises
    ------
    ColumnError
        If the type cannot be trained on.
    DataError
        If the type says that there are only nulls.
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
    """Return the options of `column_spec` for text in one column.

    Parameters
    ----------
    allow_text : bool or mapping
        Whether text is taken in all columns; or the columns with text, each with whether bytes
        count as text.
    name : str
        The column.
    """
    if isinstance(allow_text, bool):
        return {"allow_text": allow_text, "bytes_as_text": True}
    return {"allow_text": name in allow_text, "bytes_as_text": allow_text.get(name, True)}


def is_level(element: pa.DataType) -> bool:
    """Return whether the elements of a list are a level of Spark's old format, not structs.

    With ``spark.sql.parquet.writeLegacyFormat`` a list in a list has no level of its own for its
    elements, and PyArrow takes the inner list for a struct that holds nothing else.
    """
    return (
        pa.types.is_struct(element)
        and element.num_fields == 1
        and element[0].name in ("array", "bag")
    )


def num_leaves(data_type: pa.DataType) -> int:
    """Return how many Parquet columns hold a column of this type."""
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
