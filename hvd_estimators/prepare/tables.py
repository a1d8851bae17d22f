"""Files of the tables in Spark's catalogs. Runs on the driver.

Spark, or the log of a Delta or Iceberg table, says which files hold a table's rows, and how many
rows of each file the table shows. Ranks then read the files themselves, so nothing is copied.
"""

from __future__ import annotations

import functools
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
from hvd_estimators.data.tables import Table, TableFile, read_log
from hvd_estimators.data.types import TextColumns, text_options
from hvd_estimators.exceptions import ParamError
from hvd_estimators.prepare.schema import fields_by_name, quoted, stored_column, unused_name
from hvd_estimators.store.base import Store

_BY_PATH = re.compile(r"(delta|iceberg)\.`(.+)`", re.IGNORECASE)
"""Spark's name of a table by its path."""

_SNAPSHOT = re.compile(r"\bcurrent-snapshot-id=(\d+)")

_MAPPING = re.compile(r"delta\.columnMapping\.mode=(?!none\b)\w+")


@dataclass(frozen=True)
class FoundFiles:
    """The files that hold the chosen rows of a table.

    Attributes
    ----------
    files : mapping of str to TableFile
        URL, not percent-encoded, or full path of each file.
    columns : mapping of str to ColumnSpec
        The partition columns that have their values from paths, by name.
    is_one_folder : bool
        The table has one folder. False if its partitions may be anywhere.
    """

    files: Mapping[str, TableFile]
    columns: Mapping[str, ColumnSpec]
    is_one_folder: bool = False


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
        Its name, or ``delta.`` or ``iceberg.`` and its path in backticks.
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
        formats other than Parquet, Delta and Iceberg, and for Delta tables that map columns.
    ColumnError
        If a needed partition column has a type that is not supported for training.
    StoreError
        See `read_log`, which replaces Spark's job for Iceberg, and where Spark lacks Delta.
    """
    by_path = _BY_PATH.fullmatch(table.strip())
    read = functools.partial(_log_of, session, store_at, names, allow_text)
    if by_path is not None and by_path[1].lower() == "iceberg":
        return read("iceberg", by_path[2])
    try:
        details, partitions = _describe(session, table)
        if details.get("Provider", "").lower() == "iceberg":
            current = _SNAPSHOT.search(details.get("Table Properties", ""))
            return read(
                "iceberg",
                # Spark shows URLs with few slashes, whose characters are not escaped.
                re.sub("^file:/*", "/", details["Location"]),
                f"spark.table({table!r})",
                int(current[1]) if current else None,
            )
        _check_format(table, details)
        frame = session.table(table)
        fields = fields_by_name(frame)
    except (PySparkException, Py4JError) as error:
        if by_path is None:
            raise ParamError(
                "table: expected the name of a table, or where this Spark lacks Delta or Iceberg "
                f"delta.`path` or iceberg.`path`, found {table!r}, and Spark says: "
                f"{_first_line(error)}"
            ) from error
        return read("delta", by_path[2])
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
        described = Table(table, remedy)
        files = {
            unquote(url): TableFile(described, count, dict(zip(needed, values, strict=True)))
            for url, *values, count in counted
        }
        if "" in files:
            raise ParamError(f"table: Spark reads {table!r} without naming its files. {remedy}")
        return FoundFiles(files, columns)

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
        f"table: expected a table of Parquet files, or of Delta or Iceberg, but {table!r} "
        f"{problem}. Train on its DataFrame: fit(spark.table({table!r}))."
    )


def _log_of(
    session: SparkSession,
    store_at: Callable[[str], Store],
    names: Iterable[str],
    allow_text: TextColumns,
    kind: str,
    path: str,
    frame: str = "",
    snapshot: int | None = None,
) -> Find:
    """Return a function that finds files of a table by its log.

    A condition chooses files by their partition columns. See `read_log`.
    """
    store = store_at(path)
    log = read_log(store, kind, store.get_full_path(path), frame, snapshot)
    fields = {field.name: field for field in T.StructType.fromJson(json.loads(log.schema))}
    partitions = list(next(iter(log.files.values())).values) if log.files else []
    needed = [] if log.has_columns else [fields[name] for name in names if name in partitions]
    columns = _partition_columns(needed, allow_text)

    def find(param: str, where: str | Column | None) -> FoundFiles:
        files = log.files
        if where is not None and files:
            key = T.StructField(unused_name("file", partitions), T.StringType())
            schema = T.StructType([key, *(fields[name] for name in partitions)])
            rows: Any = [(file, *found.values.values()) for file, found in files.items()]
            try:
                frame = session.createDataFrame(rows, schema).where(where)
                chosen = frame.select(key.name).collect()
            except AnalysisException as error:
                by = f"{path}, by its partition columns ({', '.join(partitions) or 'none'}),"
                remedy = next(iter(files.values())).table.remedy
                raise _wrong_condition(by, param, where, error, remedy) from error
            files = {row[0]: files[row[0]] for row in chosen}
        return FoundFiles(files, columns, is_one_folder=True)

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
    table: str, param: str, where: str | Column | None, error: AnalysisException, remedy: str = ""
) -> ParamError:
    reason = f"{_first_line(error)} {remedy}".strip()
    return ParamError(f"{param}: Spark cannot choose rows of {table} with {where!r}: {reason}")


def _first_line(error: Exception) -> str:
    """Return Spark's message, which begins with its class of the error in brackets."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if re.search(r"\[[A-Z_.]+\]", line)), lines[0])
    return re.sub(r"^.*?(?=\[[A-Z_.]+\])", "", told).partition("; line ")[0]
