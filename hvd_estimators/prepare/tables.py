"""Files of the tables in Spark's catalogs. Runs on the driver.

Spark, or the log of a Delta table, says which files hold a table's rows, and how many rows of each
file the table shows. Ranks then read the files themselves, so nothing is copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.tables import TableFile, read_delta_log
from hvd_estimators.data.types import TextColumns, text_options
from hvd_estimators.exceptions import ParamError
from hvd_estimators.prepare.schema import fields_by_name, quoted, stored_column, unused_name
from hvd_estimators.store.base import Store

_DELTA_PATH = re.compile(r"delta\.`(.+)`", re.IGNORECASE)
"""Spark's name of a Delta table by its path."""

_MAPPING = re.compile(r"delta\.columnMapping\.mode=(?!none\b)\w+")


@dataclass(frozen=True)
class FoundFiles:
    """The files that hold the chosen rows of a table.

    Attributes
    ----------
    files : mapping of str to TableFile
        URL, not percent-encoded, or full path of each file.
    columns : mapping of str to ColumnSpec
        The needed partition columns, by name.
    remedy : str
        What to do if the files cannot be read one by one.
    """

    files: Mapping[str, TableFile]
    columns: Mapping[str, ColumnSpec]
    remedy: str


Find = Callable[[str, "str | Column | None"], FoundFiles]
"""Finds files of a table, given the name of a parameter, for messages, and its condition."""


def describe_table(
    session: SparkSession,
    table: str,
    names: Iterable[str],
    allow_text: TextColumns,
    store_at: Callable[[str], Store],
) -> Find:
    """Return a function that finds files of a table, which is described once.

    One Spark job for each condition counts the rows of each file.

    Parameters
    ----------
    session : SparkSession
        Knows the table.
    table : str
        Its name, or ``delta.`` and its path in backticks.
    names : iterable of str
        The columns that training needs.
    allow_text : bool or mapping
        See `text_options`.
    store_at : callable
        Returns the store that opens a path.

    Raises
    ------
    ParamError
        If Spark does not know the table or, later, a column in a condition. Also for views, for
        formats other than Parquet and Delta, and for Delta tables that map columns.
    ColumnError
        If a needed partition column has a type that is not supported for training.
    StoreError
        See `read_delta_log`, which replaces Spark's job where Spark lacks Delta.
    """
    by_path = _DELTA_PATH.fullmatch(table.strip())
    try:
        details, partitions = _describe(session, table)
        _check_format(table, details)
        frame = session.table(table)
        fields = fields_by_name(frame)
    except (PySparkException, Py4JError) as error:
        if by_path is None:
            raise ParamError(
                "table: expected the name of a table, or for a Delta table that this Spark cannot "
                f"read, delta.`path`, found {table!r}, and Spark says: {_first_line(error)}"
            ) from error
        return _log_of(session, by_path[1], names, allow_text, store_at)
    needed = [name for name in names if name in partitions]
    columns = _partition_columns((fields[name] for name in needed), allow_text)
    is_delta = details["Provider"].lower() == "delta"

    def find(param: str, where: str | Column | None) -> FoundFiles:
        remedy = f"Train on its DataFrame: fit(spark.table({table!r}))."
        if where is not None:
            remedy = (
                f"{param} may choose only whole files, such as partitions, and no file may have "
                f"rows that the table hides. Change {param}, or train on the DataFrame: "
                f"fit(spark.table({table!r}).where({where!r}))."
            )
        elif is_delta:
            remedy = (
                "It hides the others by deletion vectors. Rewrite the files: REORG TABLE "
                f"{table} APPLY (PURGE). Or train on the DataFrame: fit(spark.table({table!r}))."
            )
        try:
            rows = frame if where is None else frame.where(where)
            keys = [F.input_file_name(), *(F.col(quoted(name)) for name in needed)]
            # Not by their names, because columns may have the same ones.
            counted = rows.groupBy(*keys).count().toDF(*map(str, range(len(keys) + 1))).collect()
        except AnalysisException as error:
            raise _wrong_condition(table, param, where, error) from error
        files = {
            unquote(url): TableFile(count, dict(zip(needed, values, strict=True)))
            for url, *values, count in counted
        }
        if "" in files:
            raise ParamError(f"table: Spark reads {table!r} without naming its files. {remedy}")
        return FoundFiles(files, columns, remedy)

    return find


def _describe(session: SparkSession, table: str) -> tuple[dict[str, str], list[str]]:
    """Return details of a table (none for a temporary view), and its partition columns."""
    rows = [(row[0], row[1]) for row in session.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()]
    heads = [name for name, _ in rows]

    def below(head: str) -> list[tuple[str, str]]:
        first = heads.index(head) + 1 if head in heads else len(heads)
        return rows[first : [*heads, ""].index("", first)] if first < len(heads) else []

    details = dict(below("# Detailed Table Information"))
    return details, [name for name, _ in below("# Partition Information")[1:]]


def _check_format(table: str, details: Mapping[str, str]) -> None:
    """Check that Parquet files store the rows of a table, under the names of its columns."""
    provider = details.get("Provider", "").lower()
    if not details or "VIEW" in details.get("Type", ""):
        problem = "is a view, whose rows Spark computes"
    elif provider == "delta" and _MAPPING.search(details.get("Table Properties", "")):
        problem = "is a Delta table with column mapping: its files name columns otherwise"
    elif provider == "hive" and "parquet" not in details.get("InputFormat", "").lower():
        problem = f"has the format {details.get('InputFormat')}"
    elif provider not in ("parquet", "delta", "hive"):
        problem = f"has the format {provider or 'of its catalog'}"
    else:
        return
    raise ParamError(
        f"table: expected a table of Parquet files, or a Delta table, but {table!r} {problem}. "
        f"Train on its DataFrame: fit(spark.table({table!r}))."
    )


def _log_of(
    session: SparkSession,
    path: str,
    names: Iterable[str],
    allow_text: TextColumns,
    store_at: Callable[[str], Store],
) -> Find:
    """Return a function that finds files of a Delta table that this Spark cannot read.

    A condition chooses files by their partition columns.
    """
    store = store_at(path)
    root = store.get_full_path(path)
    log = read_delta_log(store, root)
    all_files = {f"{root}/{name}": file for name, file in log.files.items()}
    fields = {field.name: field for field in T.StructType.fromJson(json.loads(log.schema))}
    partitions = list(next(iter(all_files.values())).values) if all_files else []
    columns = _partition_columns((fields[n] for n in names if n in partitions), allow_text)

    def find(param: str, where: str | Column | None) -> FoundFiles:
        files = all_files
        if where is not None and files:
            key = T.StructField(unused_name("file", partitions), T.StringType())
            schema = T.StructType([key, *(fields[name] for name in partitions)])
            rows: Any = [(file, *found.values.values()) for file, found in files.items()]
            try:
                frame = session.createDataFrame(rows, schema).where(where)
                chosen = frame.select(key.name).collect()
            except AnalysisException as error:
                by = f"{path}, by its partition columns,"
                raise _wrong_condition(by, param, where, error) from error
            files = {row[0]: files[row[0]] for row in chosen}
        return FoundFiles(files, columns, "Write the table again.")

    return find


def _partition_columns(
    fields: Iterable[T.StructField], allow_text: TextColumns
) -> dict[str, ColumnSpec]:
    columns = {}
    for field in fields:
        options = text_options(allow_text, field.name)
        if options.get("allow_any"):
            # A path states numbers and text, and not a value of any other type.
            options = {"allow_text": True, "bytes_as_text": False}
        spec = stored_column(field, **options).spec
        columns[spec.name] = replace(spec, kind="partition")
    return columns


def _wrong_condition(
    table: str, param: str, where: str | Column | None, error: AnalysisException
) -> ParamError:
    return ParamError(
        f"{param}: Spark cannot choose rows of {table} with {where!r}: {_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    """Return Spark's message, which begins with its class of the error in brackets."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if re.search(r"\[[A-Z_.]+\]", line)), lines[0])
    return re.sub(r"^.*?(?=\[[A-Z_.]+\])", "", told).partition("; line ")[0]
