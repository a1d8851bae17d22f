"""Batches of a UDF bounded by bytes: rows that are large count for several. Runs on the driver.

Spark fills an Arrow batch with a number of rows (10,000 by default, see
``spark.sql.execution.arrow.maxRecordsPerBatch``), whatever their size, in the JVM's direct memory:
10,000 images are some GB. That number is the session's, read whenever a DataFrame is run, so no
DataFrame has one of its own. What it can have are more rows: after each row come as many empty ones
as make its share of a batch what its bytes are of `BATCH_BYTES`. The UDF skips the empty rows, and
they are dropped behind it. They must not be dropped before: a filter that goes below the UDF has to
find the same in them as in their row. Filters on what is emptied in them stay above.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.inference.opaque import computed_here, with_opaque
from hvd_estimators.prepare.column_names import clashing, quoted

__all__ = ["BATCH_BYTES", "Spread", "spread"]

BATCH_BYTES = 32 * 2**20
"""Bytes of values that a batch has at most, or a single row."""

_ITEM_BYTES = 8
# Rows of a known size are taken for small ones if they are much smaller than those that count for
# one: what is predicted on may be larger than what was trained on.
_MARGIN = 4
# Text of so many bytes is copied to the empty rows, so that filters on names and paths go below the
# UDF. On columns that hold longer text they may take empty rows away.
_SHORT_BYTES = 256
_TEXT = (T.StringType, T.BinaryType)


@dataclass(frozen=True)
class Spread:
    """A DataFrame with empty rows in it.

    Attributes
    ----------
    frame : DataFrame
        The rows, all columns included, and empty ones.
    marker : str
        A column of it that is 0 for the former and more for the latter.
    emptied : tuple of StructField
        The columns that hold nothing in empty rows. Text does if it is long.
    """

    frame: DataFrame
    marker: str
    emptied: tuple[T.StructField, ...] = ()

    @property
    def is_row(self) -> Column:
        """Whether a row is none of the empty ones."""
        return F.col(self.marker) == 0

    def without_empty_rows(self, column: Column, name: str) -> DataFrame:
        """Return the rows alone, with a further column that is computed of all, empty ones too.

        No filter on it sees what it holds for empty rows.
        """
        hidden, is_row = f"{name}_hidden", f"{name}_is_row"
        frame = self.frame.select("*", column.alias(hidden))
        frame = with_opaque(frame, self.is_row, is_row)
        frame = with_opaque(frame, F.col(hidden), name)
        shown = {}
        for index, field in enumerate(self.emptied):
            made = f"{name}_{index}"
            frame = with_opaque(frame, F.col(quoted(field.name)), made)
            shown[field.name] = F.col(made).alias(field.name, metadata=field.metadata)
        frame = frame.withColumns(shown) if shown else frame
        made_names = [f"{name}_{index}" for index in range(len(shown))]
        return frame.where(is_row).drop(self.marker, hidden, is_row, *made_names)


def spread(
    dataset: DataFrame,
    columns: Sequence[str],
    known_sizes: Mapping[str, int | None],
    output_items: int,
) -> Spread | None:
    """Return a DataFrame with empty rows in it; None where rows are small.

    Parameters
    ----------
    dataset : DataFrame
        What is predicted on.
    columns : sequence of str
        What a UDF is given of it.
    known_sizes : mapping
        Column to the numbers in a row, where that is known.
    output_items : int
        Numbers that the UDF returns for a row.
    """
    max_rows = int(str(dataset.sparkSession.conf.get(_MAX_ROWS)))
    if max_rows <= 0:
        return None  # all rows of a partition, however many
    counted_as_one = BATCH_BYTES / max_rows
    types = {name: dataset.schema[name].dataType for name in columns}
    sizes = [_known_items(types[name], known_sizes.get(name)) for name in columns]
    if None not in sizes:
        known = sum(size for size in sizes if size is not None) + output_items
        if known * _ITEM_BYTES * _MARGIN <= counted_as_one:
            return None
    total = F.lit(output_items * _ITEM_BYTES)
    for name, data_type in types.items():
        total = total + _num_bytes(F.col(quoted(name)), data_type)
    count = F.least(F.ceil(total / F.lit(counted_as_one)), F.lit(max_rows))
    marker = f"__empty_{uuid.uuid4().hex}"
    numbers = F.sequence(F.lit(0), F.greatest(count, F.lit(1)).cast("int") - 1)
    frame = dataset.select("*", F.explode(numbers).alias(marker))
    is_row = Spread(frame, marker).is_row
    large = [
        field
        for field in dataset.schema
        if _may_be_large(field.dataType)
        and len(clashing(dataset, field.name, dataset.columns)) == 1
    ]
    emptied = {}
    for field in large:
        column, kept = F.col(quoted(field.name)), is_row
        if isinstance(field.dataType, _TEXT):
            kept = is_row | (F.octet_length(column) <= _SHORT_BYTES)
        value = F.when(kept, column).otherwise(_empty(field))
        emptied[field.name] = value.alias(field.name, metadata=field.metadata)
    nested = tuple(field for field in large if not isinstance(field.dataType, _TEXT))
    if emptied:
        frame = computed_here(frame.withColumns(emptied))
    return Spread(frame, marker, nested)


_MAX_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def _known_items(data_type: T.DataType, known: int | None) -> int | None:
    """Return how many numbers a value is; None if that is not known."""
    if isinstance(data_type, _TEXT):
        return None
    return known if _may_be_large(data_type) else 1


def _may_be_large(data_type: T.DataType) -> bool:
    large = (T.ArrayType, T.MapType, T.StructType, T.StringType, T.BinaryType, T.UserDefinedType)
    return isinstance(data_type, large)


def _num_bytes(column: Column, data_type: T.DataType) -> Column:
    """Return about how many bytes a value has in a batch."""
    if isinstance(data_type, VectorUDT):
        raw = F.unwrap_udt(column)
        length = F.coalesce(raw["size"], F.size(raw["values"]))
        return _or_none(length) * _ITEM_BYTES
    if isinstance(data_type, T.ArrayType):
        # Of nested arrays the first one tells: all have to have the same length.
        first = F.try_element_at(column, F.lit(1))
        return _or_none(F.size(column)) * _num_bytes(first, data_type.elementType)
    if isinstance(data_type, _TEXT):
        return _or_none(F.octet_length(column))
    return F.lit(_ITEM_BYTES).cast("long")


def _or_none(length: Column) -> Column:
    return F.greatest(F.coalesce(length, F.lit(0)), F.lit(0)).cast("long")


def _empty(field: T.StructField) -> Column:
    """Return what an empty row has, lest a column that has no nulls seem to have some."""
    data_type: Any = field.dataType
    if field.nullable or isinstance(data_type, T.UserDefinedType):
        return F.lit(None)
    if isinstance(data_type, T.ArrayType):
        return F.array().cast(data_type)
    if isinstance(data_type, _TEXT):
        return F.lit("").cast(data_type)
    return F.lit(None)
