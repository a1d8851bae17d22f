"""The UDF that predicts on batches of rows.

`hvd_estimators.model` creates the UDF, its input columns and its output columns. `make_udf` runs
on the driver, the UDF on executors. `transform` converts columns in the JVM, where their types are
known. The argument types of a UDF in SQL are known only when a batch arrives.

Columns travel in Arrow's format. Spark 4.1 and later have Arrow UDFs. In PySpark 3.5 and 4.0 a
pandas UDF is used. There, a batch's columns also reach the Python worker in Arrow's format, but
PySpark converts them to pandas, with a Python object for each array and NaN for nulls. PySpark has
no public way to skip the conversion, so `_unconverted` replaces the converting method while a UDF
of this package runs. The results go back as pandas objects that PySpark does not convert.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyspark
from pyspark import TaskContext
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import pandas_udf

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import first_imports
from hvd_estimators.data.arrays import Array, to_vectors
from hvd_estimators.data.rows import one_array
from hvd_estimators.data.types import (
    VECTOR_FIELDS,
    is_bytes,
    is_list,
    is_number,
    is_string,
    is_vector,
)
from hvd_estimators.exceptions import ColumnError, DependencyError, ParamError, listed
from hvd_estimators.inference.batch import BatchPredictor, Predictor, is_scalar, one_ahead
from hvd_estimators.inference.broadcast import Hashed, Payload, Sent
from hvd_estimators.inference.output_columns import DOUBLE, OutputType, as_doubles, to_column
from hvd_estimators.inference.worker import (
    cached_predictor,
    predictor_key,
    task_resources,
    unpickled,
)

if TYPE_CHECKING:
    from pyspark.sql._typing import UserDefinedFunctionLike

Send = Callable[[str, Hashed], Sent]
"""Function from a role and hashed bytes to the form a UDF carries; see `SharedBytes.send`."""

_ARROW_UDF = "arrow_udf"

_MODULE = "pyspark.sql.pandas.serializers"

_SERIALIZER = "ArrowStreamPandasUDFSerializer"

_CONVERT = "arrow_to_pandas"


@dataclass(frozen=True)
class Output:
    """One field of a UDF's result.

    Attributes
    ----------
    field : str
        Name of the field.
    column : str
        Name of the output column, for messages.
    shape : tuple of int
        Shape of a row.
    kind : OutputType or None
        Type of the values; None for the default type.
    spark_type : DataType
        Spark's type of the field.
    is_vector : bool
        Whether the output column holds ML vectors. Arrow UDFs return these. Pandas UDFs return
        arrays, which the caller converts.
    """

    field: str
    column: str
    shape: tuple[int, ...]
    kind: OutputType | None
    spark_type: T.DataType
    is_vector: bool = False

    def converter(self) -> Callable[[Array, Array | None], pa.Array]:
        """Return the conversion of the output and a mask of its rows to a column."""
        # The function goes to executors, and Spark's type stays here.
        shape, kind, column = self.shape, self.kind or DOUBLE, self.column
        if self.is_vector and has_arrow_udfs():
            return lambda array, valid: to_vectors(as_doubles(array, column), valid)
        return lambda array, valid: to_column(array, shape, valid, kind, column)


def has_arrow_udfs() -> bool:
    """Return whether PySpark has Arrow UDFs (since 4.1); otherwise pandas UDFs are used."""
    return hasattr(F, _ARROW_UDF)


def vector_parts(column: Column) -> Column:
    """Return ML vectors as the struct in which Spark stores them. Runs on the driver.

    Since Spark 4.1 the JVM computes the size of a batch after each row. For that, it searches
    backwards for the last list that is not null. Dense vectors have null indices, so the time
    would grow with the square of the rows. Empty lists in place of null indices avoid the search.
    """
    parts = F.unwrap_udt(column)
    if not has_arrow_udfs():
        return parts
    indices = F.coalesce(parts["indices"], F.array().cast("array<int>"))
    fields = {**{name: parts[name] for name in VECTOR_FIELDS}, "indices": indices}
    struct = F.struct(*(field.alias(name) for name, field in fields.items()))
    return F.when(column.isNotNull(), struct)


MOST_ARGUMENTS = 100
"""Maximum number of columns that are separate arguments of a UDF in `transform`."""


def packed(columns: Sequence[Column | str]) -> list[Column | str]:
    """Return the arguments of a UDF: many columns, given by quoted name or not, as one struct.

    In each task, Spark compares each argument with all arguments before it.
    """
    if len(columns) <= MOST_ARGUMENTS:
        return list(columns)
    names = [column for column in columns if isinstance(column, str)]
    if len(names) == len(columns):
        return [F.expr(f"struct({', '.join(names)})")]
    # Arrow takes no two fields of one name.
    field = f"__{uuid.uuid4().hex}"
    return [
        F.struct(
            *(
                column if isinstance(column, str) else column.alias(f"{field}_{index}")
                for index, column in enumerate(columns)
            )
        )
    ]


def make_udf(
    document: bytes | LocalFile,
    load: Callable[[Payload], Predictor],
    inference: BatchPredictor,
    send: Send,
    outputs: Sequence[Output],
    *,
    has_empty_rows: bool = False,
    is_packed: bool = False,
    sql_text: Sequence[str] | None = None,
) -> UserDefinedFunctionLike:
    """Return a UDF from columns to the output, or to a struct if there are several fields.

    Parameters
    ----------
    document : bytes or LocalFile
        The serialized predictor.
    load : callable
        Loads the predictor.
    inference : BatchPredictor
        Predicts on a batch.
    send : callable
        Sends large payloads to the executors.
    outputs : sequence of Output
        The fields of the result, in the order of ``inference.fields``.
    has_empty_rows : bool
        Whether a further, last column is true for rows and false for empty rows. The UDF skips
        empty rows; their output is null.
    is_packed : bool
        Whether the columns are the fields of one struct; see `packed`.
    sql_text : sequence of str, optional
        For a UDF in SQL, which does not know the types of its arguments: the columns that may be
        text. Default: the columns have the types that `transform` gives them.

    Raises
    ------
    DependencyError
        If this PySpark cannot pass columns to a UDF in Arrow's format.
    """
    is_arrow_udf = has_arrow_udfs()
    if not is_arrow_udf and not callable(getattr(_serializer(), _CONVERT, None)):
        raise DependencyError(
            f"Predictions need columns in Arrow's format, which PySpark {pyspark.__version__} does "
            "not pass to UDFs. Install PySpark 3.5, 4.0, or 4.1 and later, as Apache releases them."
        )
    hashed = Hashed.of(document)
    model = send("model", hashed)
    steps = send("steps", Hashed.of(cloudpickle.dumps((*first_imports(), load, inference))))
    key = predictor_key(hashed, load)
    columns_form = contextlib.nullcontext if is_arrow_udf else _unconverted
    to_result = _to_struct if is_arrow_udf else _to_pandas
    converters = {output.field: output.converter() for output in outputs}

    def predict(batches: Any) -> Any:
        with columns_form():
            yield from predicted(batches)

    def predicted(batches: Any) -> Any:
        *_, load, inference = unpickled(steps)
        predictor = cached_predictor(key, model, load, task_resources(TaskContext.get()))

        def begin(batch: Any) -> Callable[[], Any]:
            # PySpark passes one column directly, and several columns as a tuple.
            columns = list(batch) if isinstance(batch, tuple) else [batch]
            if is_packed:
                columns = columns[0].flatten()
            if sql_text is not None:
                text = None if inference.collate is not None else sql_text
                columns = sql_arguments(columns, inference.columns, text)
            is_row = np.asarray(columns.pop(), bool) if has_empty_rows else None
            arrays, valid = inference.read(columns, is_row)
            finish_batch = inference.begin(predictor, arrays)

            def finish() -> Any:
                made = zip(converters.items(), finish_batch(), strict=True)
                return to_result({field: convert(array, valid) for (field, convert), array in made})

            return finish

        yield from one_ahead(map(begin, batches), predictor)

    is_single = len(outputs) == 1
    return_type = (
        outputs[0].spark_type
        if is_single
        else T.StructType([T.StructField(output.field, output.spark_type) for output in outputs])
    )
    # PySpark infers the kind of UDF from the type hints.
    column: Any = pa.Array if is_arrow_udf else pd.Series
    is_one = is_packed or len(inference.columns) + has_empty_rows == 1
    argument: Any = column if is_one else tuple[column, ...]
    result: Any = column if is_single or is_arrow_udf else pd.DataFrame
    predict.__annotations__ = {"batches": Iterator[argument], "return": Iterator[result]}
    make: Any = getattr(F, _ARROW_UDF) if is_arrow_udf else pandas_udf
    udf: UserDefinedFunctionLike = make(predict, return_type)
    return udf


def _to_struct(columns: dict[str, pa.Array]) -> pa.Array:
    """Return an Arrow UDF's result: one column, or a struct of several."""
    names, arrays = list(columns), list(columns.values())
    return arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, names)


def _to_pandas(columns: dict[str, pa.Array]) -> pd.Series | pd.DataFrame:
    """Return a pandas UDF's result: one column as a series, several as a frame.

    The columns must have the UDF's types.
    """
    series = {
        name: _Converted(pd.arrays.ArrowExtensionArray(column)) for name, column in columns.items()
    }
    return next(iter(series.values())) if len(series) == 1 else _ConvertedFields(series)


class _Converted(pd.Series):
    """Arrow column that PySpark writes unchanged: NaN as a number, null as null.

    PySpark converts lists by applying a function to each list, which makes a Python object of each
    number. This column needs no conversion.
    """

    @property
    def _constructor(self) -> Any:
        return _Converted

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Return the column unchanged."""
        return self


class _ConvertedFields(pd.DataFrame):
    """Arrow columns as the fields of a struct."""

    @property
    def _constructor_sliced(self) -> Any:
        return _Converted


@contextlib.contextmanager
def _unconverted() -> Iterator[None]:
    """Make PySpark before 4.1 pass the columns of batches in Arrow's format. Runs on executors.

    The patch affects no other UDF. Spark runs a UDF that takes an iterator of batches as the only
    UDF of its Python worker.
    """
    serializer = _serializer()
    convert = getattr(serializer, _CONVERT)
    is_own = _CONVERT in vars(serializer)

    def leave(self: Any, column: Any, *args: Any, **kwargs: Any) -> Any:
        return one_array(column)

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


_TYPES: dict[str, type[T.DataType]] = {
    made().simpleString(): made
    for made in (
        *(T.ByteType, T.ShortType, T.IntegerType, T.LongType),
        *(T.FloatType, T.DoubleType, T.BooleanType),
    )
}
"""Spark's name of each type of `OutputType.element`, to its class."""


def active_session() -> SparkSession:
    """Return the active session, in which UDFs are created.

    Raises
    ------
    ParamError
        If there is no active session.
    DependencyError
        If the session uses Spark Connect, and this PySpark is too old for Spark Connect.
    """
    session = SparkSession.getActiveSession()
    if session is None:
        raise ParamError(
            "as_udf: there is no active Spark session. Start one with "
            "SparkSession.builder.getOrCreate()."
        )
    is_connect(session)
    return session


def checked_name(session: SparkSession, name: Any) -> str:
    """Check and return the name of a SQL function.

    Raises
    ------
    ParamError
        If the name is not text or is blank, or if it would hide one of Spark's own functions.
    """
    if not isinstance(name, str) or not name.strip():
        raise ParamError(f"name: expected a name of a function, found {name!r}.")
    own = session.sql("show system functions").collect() if name.isidentifier() else ()
    if name.lower() in {row[0].lower() for row in own}:
        raise ParamError(
            f"name: {name!r} is one of Spark's own functions, which would be hidden. Set another "
            "name."
        )
    return name


def spark_type(kind: OutputType | None, shape: tuple[int, ...]) -> T.DataType:
    """Return Spark's type of an output column; doubles, or arrays of them, if no type is set."""
    kind = kind or OutputType(depth=0 if is_scalar(shape) else len(shape))
    data_type = _TYPES[kind.element]()
    for _ in range(kind.depth):
        data_type = T.ArrayType(data_type)
    return data_type


def sql_arguments(
    given: Sequence[pa.Array], columns: Sequence[str], text: Sequence[str] | None
) -> list[pa.Array]:
    """Check that the arguments of a UDF in SQL are numbers, arrays of numbers, vectors or text.

    Parameters
    ----------
    given : sequence of pa.Array
        The arguments.
    columns : sequence of str
        Names of the arguments, by position.
    text : sequence of str, or None
        Names of the arguments that may be text. None accepts any types.

    Raises
    ------
    ParamError
        If the number of arguments is wrong.
    ColumnError
        If the model cannot take values of an argument's type.
    """
    if len(given) != len(columns):
        raise ParamError(
            f"The UDF takes {len(columns)} columns, {listed(columns)}, found {len(given)}. Call "
            "it with the model's feature columns, in their order."
        )
    if text is None:
        return list(given)
    return [
        _argument(values, name, name in text) for values, name in zip(given, columns, strict=True)
    ]


def _argument(column: pa.Array, name: str, is_text: bool) -> pa.Array:
    data_type = leaf = column.type
    while is_list(leaf):
        leaf = leaf.value_type
    if is_vector(data_type) or is_number(leaf):
        return column
    if is_text and (is_string(data_type) or is_bytes(data_type)):
        return column
    raise ColumnError(
        f"Argument {name!r} has type {data_type}; the UDF takes numbers, booleans, vectors and "
        "arrays of numbers. Convert it in the query, or select other columns."
    )
