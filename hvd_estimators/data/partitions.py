"""Hive partitions: columns whose values are in file paths, as in ``day=3/a.parquet``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ColumnError, DataError

__all__ = ["check_partition", "partition_column", "partition_spec", "partition_values"]

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


def partition_spec(name: str, values: Mapping[str, str]) -> ColumnSpec:
    """Return the spec of a partition column.

    Parameters
    ----------
    name : str
        The column's name.
    values : mapping of str to str
        File to the value in its path.

    Returns
    -------
    ColumnSpec
        With dtype ``int64`` if all values are integers, ``float64`` otherwise.

    Raises
    ------
    ColumnError
        If a value is not a number.
    DataError
        If a value is Hive's null.
    """
    dtypes = {_dtype(name, value, file) for file, value in values.items()}
    return ColumnSpec(name, "partition", "int64" if dtypes == {"int64"} else "float64")


def check_partition(spec: ColumnSpec, values: Mapping[str, str], file: str) -> None:
    """Check that a file's path contains a valid value of a partition column.

    Raises
    ------
    ColumnError
        If the path has no value, or if the value does not fit the column's dtype.
    DataError
        If the value is Hive's null.
    """
    if spec.name not in values:
        raise ColumnError(
            f"The file {file!r} has no column {spec.name!r}: expected it in the path, as in "
            f"'{spec.name}=1/', where other files have it. Move the file into such a folder."
        )
    dtype = _dtype(spec.name, values[spec.name], file)
    if spec.dtype == "int64" and dtype != "int64":
        raise ColumnError(
            f"Column {spec.name!r} has the value {values[spec.name]!r} in the path {file!r}; "
            "expected an integer, as in the other files. Write the partitions with one type."
        )


def partition_column(spec: ColumnSpec, file: str, rows: int) -> npt.NDArray[np.generic]:
    """Return the partition value in a file's path, repeated for each of its rows.

    Raises
    ------
    ColumnError, DataError
        See `check_partition`.
    """
    values = partition_values(file)
    check_partition(spec, values, file)
    text = values[spec.name]
    value = int(text) if spec.dtype == "int64" else float(text)
    return np.full(rows, value, spec.dtype)


def _dtype(name: str, value: str, file: str) -> str:
    if value == _NULL:
        raise DataError(
            f"Column {name!r} is null in all rows of {file!r}, as the path says; remove these rows "
            "before training."
        )
    if not _NUMBER.fullmatch(value):
        raise ColumnError(
            f"Column {name!r} is a partition with the value {value!r} (path {file!r}); expected "
            "numbers. Store a number in the files instead, such as that of "
            "pyspark.ml.feature.StringIndexer, or leave it out."
        )
    if _INTEGER.fullmatch(value) and -(2**63) <= int(value) < 2**63:
        return "int64"
    return "float64"
