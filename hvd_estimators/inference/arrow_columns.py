"""Arrow UDFs: support in PySpark, and columns that reach a UDF in Arrow's format.

Spark 4.1 and later have Arrow UDFs. Before Spark 4.1, a batch's columns also reach the Python
worker in Arrow's format, but PySpark converts them to pandas. The conversion makes a Python object
for each row of an array, and NaN of nulls. PySpark has no public way to skip the conversion, so
`unconverted` replaces the converting method while a UDF of this package runs. If PySpark lacks that
method, the columns arrive as pandas series.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from hvd_estimators.inference.arguments import VECTOR

__all__ = ["can_leave_unconverted", "sees_arrow", "takes_arrow", "unconverted", "vector_parts"]

ARROW_UDF = "arrow_udf"


_MODULE = "pyspark.sql.pandas.serializers"


_SERIALIZER = "ArrowStreamPandasUDFSerializer"


_CONVERT = "arrow_to_pandas"


def takes_arrow() -> bool:
    """Return whether PySpark has Arrow UDFs (since 4.1); otherwise pandas UDFs are used."""
    return hasattr(F, ARROW_UDF)


def can_leave_unconverted() -> bool:
    """Return whether this PySpark's pandas UDFs can receive Arrow columns."""
    return callable(getattr(_serializer(), _CONVERT, None))


def sees_arrow() -> bool:
    """Return whether this package's UDFs receive Arrow columns. Runs on the driver."""
    return takes_arrow() or can_leave_unconverted()


def vector_parts(column: Column) -> Column:
    """Return ML vectors as the struct in which Spark stores them. Runs on the driver.

    Since Spark 4.1 the JVM computes the size of a batch after each row. For that, it searches
    backwards for the last list that is not null. Dense vectors have null indices, so the time
    would grow with the square of the rows. Empty lists in place of null indices avoid the search.
    """
    parts = F.unwrap_udt(column)
    if not takes_arrow():
        return parts
    indices = F.coalesce(parts["indices"], F.array().cast("array<int>"))
    fields = {**{name: parts[name] for name in VECTOR}, "indices": indices}
    struct = F.struct(*(field.alias(name) for name, field in fields.items()))
    return F.when(column.isNotNull(), struct)


@contextlib.contextmanager
def unconverted() -> Iterator[None]:
    """Make PySpark pass the columns of batches in Arrow's format. Runs on executors.

    The patch affects no other UDF. Spark runs a UDF that takes an iterator of batches as the only
    UDF of its Python worker.
    """
    serializer: Any = _serializer()
    convert = getattr(serializer, _CONVERT, None)
    is_own = _CONVERT in vars(serializer or object)

    def leave(self: Any, column: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(column, pa.ChunkedArray):
            return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pa.Array) or convert is None:
            return column
        return convert(self, column, *args, **kwargs)

    if convert is None:
        yield
        return
    setattr(serializer, _CONVERT, leave)
    try:
        yield
    finally:
        if is_own:
            setattr(serializer, _CONVERT, convert)
        else:
            delattr(serializer, _CONVERT)


def _serializer() -> Any:
    try:
        return getattr(importlib.import_module(_MODULE), _SERIALIZER, None)
    except ImportError:
        return None
