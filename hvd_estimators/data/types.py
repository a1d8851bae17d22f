"""Column types of Spark, Arrow and Hive partitions, and their NumPy types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ColumnError, DataError

SPARK_DTYPES: Mapping[str, str] = {
    "ByteType": "int8",
    "ShortType": "int16",
    "IntegerType": "int32",
    "LongType": "int64",
    "FloatType": "float32",
    "DoubleType": "float64",
    "BooleanType": "bool",
}
"""Spark's scalar types by class name, since ranks have no PySpark, and their NumPy names."""

VECTOR_FIELDS = ("type", "size", "indices", "values")
"""Fields of the struct in which Spark stores ML vectors."""

DENSE = 1
"""Value of the field ``type`` for dense vectors; sparse vectors have 0."""


def is_vector(data_type: pa.DataType) -> bool:
    """Return whether a type is the struct in which Spark stores ML vectors."""
    return pa.types.is_struct(data_type) and {field.name for field in data_type} == set(
        VECTOR_FIELDS
    )


def decimal_dtype(precision: int, scale: int) -> str:
    """Return the type of a decimal column: 64-bit integers if they hold all of its numbers."""
    return "int64" if scale == 0 and precision <= _INT64_DIGITS else "float64"


_INT64_DIGITS = 18
"""Number of decimal digits that a 64-bit integer always holds."""


def without_decimals(column: pa.Array) -> pa.Array:
    """Convert decimals to integers or the nearest doubles, and return other columns unchanged.

    The result equals Spark's cast. Arrow's own cast is often wrong in the last bit.
    """
    if not pa.types.is_decimal(column.type):
        return column
    if decimal_dtype(column.type.precision, column.type.scale) == "int64":
        return column.cast(pa.int64())
    # Cast via strings, because Arrow parses a string to the nearest double.
    return column.cast(pa.string()).cast(pa.float64())


def _one_of(*names: str) -> Callable[[pa.DataType], bool]:
    # Only newer versions of PyArrow have some of these predicates.
    predicates = [getattr(pa.types, name) for name in names if hasattr(pa.types, name)]
    return lambda data_type: any(predicate(data_type) for predicate in predicates)


is_list_view = _one_of("is_list_view", "is_large_list_view")


is_bytes = _one_of("is_binary", "is_large_binary", "is_binary_view", "is_fixed_size_binary")


is_number = _one_of("is_integer", "is_floating", "is_boolean", "is_decimal")


is_string = _one_of("is_string", "is_large_string", "is_string_view")


def is_list(data_type: pa.DataType) -> bool:
    """Return whether a type is one of Arrow's list types."""
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, is_list_view)
    return any(is_kind(data_type) for is_kind in kinds)


def column_spec(
    name: str,
    data_type: pa.DataType,
    file: str,
    *,
    allow_text: bool = False,
    bytes_as_text: bool = True,
    allow_any: bool = False,
) -> ColumnSpec:
    """Return the spec of a column with an Arrow type.

    Numbers and booleans keep their type, and bytes become arrays of unsigned 8-bit integers.
    Decimals become 64-bit floats, or integers, see `decimal_dtype`. A dictionary-encoded column is
    treated like its values.

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
    allow_any : bool
        Accept values of any type and length, and nulls.

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
        elif is_list(leaf):
            shape.append(-1)
        else:
            break
        leaf = leaf.value_type
        while is_level(leaf):
            leaf = leaf[0].type
    if pa.types.is_dictionary(leaf):
        leaf = leaf.value_type
    if allow_any:
        return ColumnSpec(name, "any", _dtype_name(leaf))
    is_text = is_string(leaf) or (
        bytes_as_text and is_bytes(leaf) and not pa.types.is_fixed_size_binary(leaf)
    )
    if allow_text and is_text and not shape:
        return ColumnSpec(name, "text", "object")
    if is_bytes(leaf):
        shape.append(leaf.byte_width if pa.types.is_fixed_size_binary(leaf) else -1)
        dtype = "uint8"
    elif is_number(leaf):
        dtype = _dtype_name(leaf)
    elif pa.types.is_null(leaf):
        raise DataError(
            f"Column {name!r} holds nothing but nulls in {file!r} (its type there is {data_type}); "
            "fill or drop them before training.",
            column=name,
        )
    else:
        raise ColumnError(
            f"Column {name!r} has type {data_type} in {file!r}; expected a number, a boolean, "
            f"bytes, or lists of these: {_remedy(leaf, data_type)}, or leave it out. A collate_fn "
            "takes it unchanged.",
            column=name,
        )
    is_whole = pa.types.is_decimal(leaf) and leaf.scale == 0
    return ColumnSpec(name, "array" if shape else "scalar", dtype, tuple(shape), is_whole=is_whole)


TextColumns = bool | Mapping[str, bool | Literal["any"]]
"""True if all columns may be text, or a mapping from each column that may be more than numbers.

A mapping's value specifies whether bytes count as text, or is "any" for values of any type and
length.
"""


def text_options(allow_text: TextColumns, name: str) -> dict[str, Any]:
    """Return the options of `column_spec` for one column.

    Parameters
    ----------
    allow_text : bool or mapping
        See `TextColumns`.
    name : str
        The column.
    """
    if isinstance(allow_text, bool):
        return {"allow_text": allow_text, "bytes_as_text": True}
    value = allow_text.get(name)
    if value == "any":
        return {"allow_any": True}
    return {"allow_text": value is not None, "bytes_as_text": value is not False}


def _dtype_name(leaf: pa.DataType) -> str:
    """Return the NumPy name of a type of numbers; "object" for other types."""
    if pa.types.is_decimal(leaf):
        return decimal_dtype(leaf.precision, leaf.scale)
    if not is_number(leaf):
        return "object"
    return "bool" if pa.types.is_boolean(leaf) else str(leaf.to_pandas_dtype().__name__)


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
    if is_list(data_type):
        return num_leaves(data_type.value_type)
    return 1


def _remedy(leaf: pa.DataType, data_type: pa.DataType) -> str:
    if is_string(leaf) and pa.types.is_dictionary(data_type):
        return "store the codes of its categories instead (in pandas, frame[column].cat.codes)"
    if is_string(leaf):
        return (
            "store numbers instead, for example from pyspark.ml.feature.StringIndexer or "
            "pandas.factorize"
        )
    if pa.types.is_temporal(leaf):
        return "store a number instead, such as the seconds since a moment, or the day of the year"
    if pa.types.is_struct(leaf):
        return "store the needed fields as separate columns"
    if pa.types.is_map(leaf):
        return "store the needed values as separate columns"
    if isinstance(leaf, pa.BaseExtensionType):
        return f"store it as the type that it is made of, {leaf.storage_type}"
    return "store it as one of these"


# A Hive partition is a column whose values are in file paths, as in ``day=3/a.parquet``.
_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def partition_values(path: str) -> dict[str, str]:
    """Return the partition values in a path by column; the deepest folder wins.

    Names and values are unquoted, because Hive and Spark write ``%3A`` for a colon.
    """
    values = {}
    for folder in path.split("/")[:-1]:
        name, _, value = folder.partition("=")
        if name and name != folder:
            values[unquote(name)] = unquote(value)
    return values


def partition_spec(
    name: str, values: Mapping[str, str], known: ColumnSpec | None = None
) -> ColumnSpec:
    """Return the spec of a partition column.

    Parameters
    ----------
    name : str
        The column's name.
    values : mapping of str to str
        File to the value in its path.
    known : ColumnSpec, optional
        The column as a table's catalog describes it. Default: the column's dtype is ``int64`` if
        all values are integers, ``float64`` otherwise.

    Returns
    -------
    ColumnSpec
        With the range of the values if they are numbers.

    Raises
    ------
    ColumnError
        If a value does not have the column's type.
    DataError
        If a value is Hive's null.
    """
    if known is None:
        dtypes = {_inferred_dtype(name, value, file) for file, value in values.items()}
        known = ColumnSpec(name, "partition", "int64" if dtypes == {"int64"} else "float64")
    parsed = [partition_value(known, value, file) for file, value in values.items()]
    if known.dtype == "object" or not all(map(math.isfinite, parsed)):
        return known
    return replace(known, range=(min(parsed), max(parsed)))


def check_partition(spec: ColumnSpec, values: Mapping[str, str], file: str) -> None:
    """Check that a file's path contains a valid value of a partition column.

    Raises
    ------
    ColumnError
        If the path has no value, or if the value does not have the column's type.
    DataError
        If the value is Hive's null.
    """
    if spec.name not in values:
        raise ColumnError(
            f"The file {file!r} has no column {spec.name!r}: expected it in the path, as in "
            f"'{spec.name}=1/', where other files have it. Move the file into such a folder.",
            column=spec.name,
        )
    partition_value(spec, values[spec.name], file)


def partition_column(spec: ColumnSpec, file: str, rows: int) -> npt.NDArray[np.generic]:
    """Return the partition value in a file's path, repeated for each of its rows.

    Raises
    ------
    ColumnError, DataError
        See `check_partition`.
    """
    values = partition_values(file)
    check_partition(spec, values, file)
    return np.full(rows, partition_value(spec, values[spec.name], file), spec.dtype)


def partition_value(spec: ColumnSpec, text: str, file: str) -> Any:
    """Return a partition value in a file's path as the column's type.

    Raises
    ------
    ColumnError, DataError
        See `check_partition`.
    """
    if text == _NULL:
        raise DataError(
            f"Column {spec.name!r} is null in all rows of {file!r}, as the path says; remove these "
            "rows before training.",
            column=spec.name,
        )
    if spec.dtype == "object":
        return text
    try:
        if spec.dtype == "bool":
            return {"true": True, "false": False}[text.lower()]
        if spec.dtype.startswith("float"):
            return float(text)
        number, limits = int(text), np.iinfo(spec.dtype)
        if limits.min <= number <= limits.max:
            return number
        raise OverflowError
    except (KeyError, ValueError, OverflowError):
        expected = {"bool": "true or false"}.get(
            spec.dtype, "a number" if spec.dtype.startswith("float") else "an integer"
        )
        raise ColumnError(
            f"Column {spec.name!r} has the value {text!r} in the path {file!r}; expected "
            f"{expected}, as in the other files. Write the partitions with one type.",
            column=spec.name,
        ) from None


def _inferred_dtype(name: str, value: str, file: str) -> str:
    if value != _NULL and not _NUMBER.fullmatch(value):
        raise ColumnError(
            f"Column {name!r} is a partition with the value {value!r} (path {file!r}); expected "
            "numbers. Store a number in the files instead, for example from "
            "pyspark.ml.feature.StringIndexer, or leave it out.",
            column=name,
        )
    if _INTEGER.fullmatch(value) and -(2**63) <= int(value) < 2**63:
        return "int64"
    return "float64"
