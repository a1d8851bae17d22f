"""Arrow UDFs: which PySpark has them, and which columns they take as they are stored."""

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
    """Return whether there are Arrow UDFs, as in Spark 4.1; pandas' otherwise."""
    return hasattr(F, ARROW_UDF)


def can_leave_unconverted() -> bool:
    """Return whether PySpark is one whose pandas UDFs can be given Arrow's columns."""
    return callable(getattr(_serializer(), _CONVERT, None))


def sees_arrow() -> bool:
    """Return whether columns reach a UDF of ours as Arrow's. Runs on the driver."""
    return takes_arrow() or can_leave_unconverted()


def vector_parts(column: Column) -> Column:
    """Return ML vectors as the struct that they are stored as. Runs on the driver.

    Since Spark 4.1 the JVM asks for the size of a batch after each row, for which it goes back to
    the last list that was not null: where dense vectors' indices are null, in time that grows with
    the square of the rows. Empty ones are not passed over again.
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
    """Let PySpark give the columns of batches as Arrow's. Runs on executors.

    Of a Python worker's UDFs one of ours is the only one as long as it runs: Spark gives a worker
    no other beside one that takes an iterator of batches.
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
