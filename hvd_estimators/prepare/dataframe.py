"""DataFrame to Parquet: checks the options, selects columns and rows, and writes them.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators._util.documents import to_python
from hvd_estimators._util.spark_session import is_connect
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.types import TextColumns, text_options
from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.prepare.connectors import check_connector
from hvd_estimators.prepare.datasets import acquire
from hvd_estimators.prepare.schema import (
    StoredColumn,
    fields_by_name,
    is_frame,
    quoted,
    require_columns,
    require_frame,
    stored_column,
    unused_name,
)
from hvd_estimators.prepare.write import ROW_GROUP_BYTES, Shuffle, Validation, write_dataset
from hvd_estimators.store import Store
from hvd_estimators.store.base import as_store

logger = logging.getLogger(__name__)

_USUAL_WIDTH = 64
"""Assumed number of elements of an array or a text."""


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Store | str,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[Any] | None = None,
    validation: float | str | DataFrame | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    random_seed: int | None = None,
    check_finite: bool = False,
    allow_text: TextColumns = False,
    shuffle_on_write: bool = True,
) -> Iterator[str]:
    """Write a DataFrame as Parquet files that ranks read.

    Each call writes the rows, which several fits in the block can use. The dataset is deleted when
    the block ends (see `list_prepared_data` and `clear_prepared_data`).

    Parameters
    ----------
    num_processes : int
        Number of ranks that will train on the data.
    store : Store or str
        Store to which the data is written, or its path or URL.
    df : DataFrame
        The rows; evaluated at most once, or again if the storage was unavailable meanwhile.
    label_columns, feature_columns, sample_weight_col
        The columns to write. ``feature_columns=None`` selects all other columns. Lists of columns
        within the list are accepted as in ``feature_cols``; the files have the single columns.
    validation : float, str or DataFrame, optional
        The fraction of rows for validation (chosen at random, by the seed). Or the name of a column
        that is true, or above zero, for these rows. Or a DataFrame of these rows, with the same
        columns and types.
    compress_sparse : bool
        Write vectors as indices and values of the nonzero elements.
    partitions_per_process : int
        Maximum number of files per rank (on each side of a split). Without ``shuffle_on_write``
        there is a file for each partition of ``df``, because Spark joins partitions in any order.
    verbose : int
        Above zero, logs paths and row counts.
    random_seed : int, optional
        Seed of the split and of the order. Default: 0. The same rows in the same partitions are
        split and ordered in the same way.
    check_finite : bool
        Reject NaN and infinity. This includes infinity from a vector's number that is too large for
        a 32-bit float.
    allow_text : bool or dict
        Also write columns of strings and bytes, for a ``transformation_fn`` or a model that
        converts them to numbers. A dict contains the columns, each with whether bytes are accepted
        as well, or with "any" for values of any type and length, for ``collate_fn`` or ``padding``.
    shuffle_on_write : bool
        Write the rows in random order. Training that reads the files in order, through a small
        buffer, is then training in random order, even if the rows were sorted. False writes the
        rows in their original order, which is faster. Ranks then shuffle the rows as they read
        them, as far as memory allows.

    Yields
    ------
    str
        The dataset's index, for ``fit_on_parquet(dataset_idx=…)``.

    Raises
    ------
    ParamError
        If ``validation`` or a number is out of range.
    ColumnError
        If a column is missing, or its type cannot be used for training.
    DataError
        If there are no rows (for training or for validation). Also for nulls, for ragged arrays,
        and with ``check_finite`` for numbers that are not finite. Columns of any type may be ragged
        and have nulls.
    StoreError
        If the store cannot be written to.
    """
    # Arithmetic in a notebook may give NumPy scalars, which the JVM does not accept.
    num_processes, partitions_per_process, validation, random_seed = to_python(
        (num_processes, partitions_per_process, validation, random_seed)
    )
    _check_numbers(num_processes, partitions_per_process, validation)
    store = as_store(store)
    require_frame("df", df)
    label_columns = list(label_columns or [])
    if label_columns:
        require_columns(df, "label_columns", label_columns)
    extra = [sample_weight_col] if sample_weight_col else []
    if isinstance(validation, str):
        require_columns(df, "validation", [validation])
    if feature_columns is None:
        left_out = {*label_columns, *extra, *([validation] if isinstance(validation, str) else [])}
        feature_columns = [name for name in df.columns if name not in left_out]
    feature_columns = InputColumns.of(feature_columns).columns
    require_columns(df, "feature_columns", feature_columns)
    require_columns(df, "sample_weight_col", extra) if extra else None
    names = list(dict.fromkeys([*feature_columns, *label_columns, *extra]))
    if is_frame(validation):
        require_frame("validation", validation)
        df, validation = _with_validation_rows(df, validation, names)
    columns: list[StoredColumn] = []
    fields, used_names = fields_by_name(df), set(names)
    for name in names:
        text = text_options(allow_text, name)
        column = stored_column(
            fields[name], compress_sparse=compress_sparse, used_names=used_names, **text
        )
        columns.append(column)
        used_names.update(column.spec.stored_names)
    if extra and columns[names.index(extra[0])].spec.kind != "scalar":
        raise ColumnError(
            f"expected a column of numbers, found {extra[0]!r} of type "
            f"{fields[extra[0]].dataType.simpleString()}.",
            param="sample_weight_col",
            column=extra[0],
        )
    seed = random_seed or 0
    split = _validation(df, validation, seed)
    max_files = num_processes * partitions_per_process
    plan = _analyzed_plan(df)
    shuffle: Shuffle | None = None
    if shuffle_on_write:
        rows = _estimated_rows(plan)
        shuffle = Shuffle(seed, _num_files(rows, columns, num_processes, max_files))
    by_position = shuffle is not None or (split is not None and split.by_position)
    store.check_data()

    def write(index: str) -> None:
        check_connector(df.sparkSession, store)
        manifest = write_dataset(
            store,
            index,
            df,
            columns,
            split,
            shuffle,
            in_order=by_position and _keeps_order(plan),
            check_finite=check_finite,
        )
        logger.log(
            logging.INFO if verbose else logging.DEBUG,
            "Prepared %d training and %d validation rows under %s (dataset %s)",
            manifest.train.rows,
            manifest.validation_rows,
            store.folder,
            index,
        )

    with acquire(store, write) as index:
        yield index


def _with_validation_rows(
    df: DataFrame, rows: DataFrame, names: Sequence[str]
) -> tuple[DataFrame, str]:
    """Return the rows of two DataFrames, and the column that is true for rows of the second.

    Raises
    ------
    ColumnError
        If the second one lacks a column, or has it with another type.
    """
    require_columns(rows, "validation", names)
    schemas = fields_by_name(df), fields_by_name(rows)
    for name in names:
        own, other = (fields[name].dataType.simpleString() for fields in schemas)
        if own != other:
            raise ColumnError(
                f"validation: the column {name!r} has type {other}, but type {own} in the training "
                "rows. Cast it to that type."
            )
    mark = unused_name("validation", names)
    selected = [quoted(name) for name in names]
    both = [
        frame.select(*selected, F.lit(is_validation).alias(mark))
        for frame, is_validation in ((df, False), (rows, True))
    ]
    return both[0].union(both[1]), mark


def _check_numbers(
    num_processes: int, partitions_per_process: int, validation: float | str | DataFrame | None
) -> None:
    numbers = {"num_processes": num_processes, "partitions_per_process": partitions_per_process}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ParamError(f"{name}: expected a whole number, found {value!r}.")
        if value < 1:
            raise ParamError(f"{name}: expected 1 or more, found {value}.")
    if validation is None or isinstance(validation, str) or is_frame(validation):
        return
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise ParamError(
            f"validation: expected a fraction, a column's name or a DataFrame, found "
            f"{validation!r}."
        )
    if not 0 <= validation < 1:
        raise ParamError(
            f"validation: expected a fraction from 0 to less than 1, found {validation}."
        )


def _validation(df: DataFrame, validation: float | str | None, seed: int) -> Validation | None:
    """Return the split of the rows; None without validation."""
    if not validation:
        return None
    if not isinstance(validation, str):
        return Validation(F.rand(seed) < float(validation), by_position=True)
    data_type = df.schema[validation].dataType
    column = df[quoted(validation)]
    if isinstance(data_type, T.BooleanType):
        return Validation(column)
    if isinstance(data_type, (T.FloatType, T.DoubleType)):
        # Spark treats NaN as greater than any number.
        return Validation(F.when(~F.isnan(column), column > 0))
    if isinstance(data_type, T.NumericType):
        return Validation(column > 0)
    raise ColumnError(
        f"validation: column {validation!r} has type {data_type.simpleString()}; expected a "
        "boolean, or a number that is above zero for rows to validate on."
    )


def _num_files(
    rows: float | None, columns: Sequence[StoredColumn], num_processes: int, max_files: int
) -> int:
    """Return the number of files for shuffled rows: a row group each, if there are few rows.

    The result must not depend on the number of partitions or cores, so that the same rows give the
    same files.
    """
    if rows is None:
        return max_files
    shapes = (() if column.spec.kind == "scalar" else (_USUAL_WIDTH,) for column in columns)
    row_bytes = sum(
        replace(column.spec, shape=shape).row_bytes
        for column, shape in zip(columns, shapes, strict=True)
    )
    return min(max(math.ceil(rows * row_bytes / ROW_GROUP_BYTES), num_processes), max_files)


_ORDERED_NODES = {
    *("Expand", "Filter", "Generate", "LocalRelation", "LogicalRDD", "LogicalRelation", "Project"),
    *("Range", "ResolvedHint", "Sample", "SubqueryAlias", "Union", "View"),
}
"""Plan nodes whose rows Spark evaluates in the same order each time."""

_UNKNOWN_BYTES = 2**63 - 1
"""Size that Spark assumes for a source of unknown size."""


def _keeps_order(plan: Any) -> bool:
    """Return whether rows always come in the same order, which is not the case after a shuffle."""
    if plan is None:
        return False
    try:
        nodes = [plan]
        # Not `plan.toJSON()`, which describes each column of each node.
        for node in nodes:
            name = node.getClass().getSimpleName()
            is_random = name == "LogicalRDD" and (
                node.rdd().outputDeterministicLevel().toString() != "DETERMINATE"
            )
            if name == "LogicalRelation":  # of files, or of a database in any order
                is_random = node.relation().getClass().getSimpleName() != "HadoopFsRelation"
            if name not in _ORDERED_NODES or is_random:
                return False
            children = node.children()
            nodes += map(children.apply, range(children.size()))
        return bool(plan.subqueriesAll().isEmpty())
    except Py4JError:
        # This version of Spark has different internals.
        return False


def _estimated_rows(plan: Any) -> float | None:
    """Return an estimate of the maximum number of rows, from the plan alone; None if unknown.

    Cached data does not change the result.
    """
    if plan is None:
        return None
    try:
        size = float(str(plan.stats().sizeInBytes()))
        # Spark counts 8 bytes per row in addition to its columns.
        return None if size >= _UNKNOWN_BYTES else size / (8 + plan.schema().defaultSize())
    except (Py4JError, TypeError):
        return None


def _analyzed_plan(df: DataFrame) -> Any:
    """Return the analyzed plan in the JVM; None with Spark Connect."""
    if is_connect(df.sparkSession):
        return None
    frame: Any = df
    return frame._jdf.queryExecution().analyzed()
