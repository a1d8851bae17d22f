"""The UDF that predicts on batches of rows.

`hvd_estimators.model` creates the UDF, its input columns and its output columns. `make_udf` runs
on the driver, the UDF on executors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import pandas_udf

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickling import first_imports, loads
from hvd_estimators.data.arrays import Array
from hvd_estimators.inference import arrow_batches, pandas_batches
from hvd_estimators.inference.arrow_columns import ARROW_UDF, sees_arrow, takes_arrow, unconverted
from hvd_estimators.inference.batch import BatchPredictor, Predictor, known_sizes, one_ahead
from hvd_estimators.inference.broadcast import Hashed, Sent, received
from hvd_estimators.inference.output_columns import DOUBLE, OutputType, to_column
from hvd_estimators.inference.payload import Payload, as_bytes
from hvd_estimators.inference.resources import task_resources
from hvd_estimators.inference.sql import SqlForm, spark_type
from hvd_estimators.inference.worker import cached_predictor, predictor_key

__all__ = ["make_udf"]

Send = Callable[[str, Hashed], Sent]
"""Function from a role and hashed bytes to the form a UDF carries; see `SharedBytes.send`."""


def make_udf(
    document: bytes | LocalFile,
    load: Callable[[Payload], Predictor],
    inference: BatchPredictor,
    send: Send,
    has_empty_rows: bool = False,
    form: SqlForm | None = None,
    vectors: Mapping[str, T.DataType] | None = None,
    kinds: Sequence[OutputType | None] = (),
    columns: Sequence[str] = (),
) -> Callable[..., Column]:
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
    has_empty_rows : bool
        Whether a further, last column is true for rows and false for empty rows. The UDF skips
        empty rows; their output is null.
    form : SqlForm, optional
        Signature of the UDF in SQL. Default: the signature for `transform`, which knows the types
        of columns.
    vectors : mapping, optional
        Fields that are ML vectors instead of arrays, to the vectors' type. Only Arrow UDFs can
        return ML vectors.
    kinds : sequence of OutputType or None
        Type of each output, in the order of the fields. None and further fields mean the default
        type.
    columns : sequence of str
        Names of the output columns, for messages.
    """
    vectors = vectors or {}
    as_vectors = frozenset(vectors)
    hashed = Hashed.of(document)
    model = send("model", hashed)
    steps = send("steps", Hashed.of(cloudpickle.dumps((*first_imports(), load, inference))))
    key = predictor_key(hashed, load)
    fields = inference.fields
    names = list(fields if form is None else form.types)
    kinds = [*kinds, *[None] * (len(fields) - len(kinds))]
    called = [*columns, *names[len(columns) :]]
    single = len(fields) == 1
    return_type: T.DataType
    if form is not None:
        return_type = form.returned
    else:
        typed = [
            vectors.get(name) or spark_type(kind, shape)
            for (name, shape), kind in zip(fields.items(), kinds, strict=True)
        ]
        of_struct = [T.StructField(*named) for named in zip(names, typed, strict=True)]
        return_type = typed[0] if single else T.StructType(of_struct)
    results: Any = arrow_batches if takes_arrow() else pandas_batches
    columns_form = contextlib.nullcontext if takes_arrow() or not sees_arrow() else unconverted

    def predict(batches: Any) -> Any:
        with columns_form():
            yield from predicted(batches)

    def predicted(batches: Any) -> Any:
        with received(steps) as pickled:
            *_, load, inference = loads(as_bytes(pickled))
        resources = task_resources(TaskContext.get())
        predictor = cached_predictor(key, model, load, resources)

        def begin(batch: Any) -> Callable[[], Any]:
            # PySpark passes one column directly, and several columns as a tuple.
            columns = list(batch) if isinstance(batch, tuple) else [batch]
            is_row = None
            batches_of: Any = arrow_batches if _are_arrows(columns) else pandas_batches
            if form is not None:
                columns = batches_of.arguments(columns, inference.columns, form.text)
            if has_empty_rows:
                *columns, marks = columns
                is_row = np.asarray(marks, bool)
            arrays, valid = batches_of.to_arrays(inference, columns, is_row)
            begun = _begin(inference, predictor, arrays)

            def finish() -> Any:
                outputs = zip(names, begun(), fields.values(), kinds, called, strict=True)
                return results.to_result(
                    {
                        name: arrow_batches.to_vectors(output, valid)
                        if name in as_vectors
                        else to_column(output, shape, valid, kind or DOUBLE, column)
                        for name, output, shape, kind, column in outputs
                    }
                )

            return finish

        yield from one_ahead(map(begin, batches), predictor)

    # PySpark infers the kind of UDF from the type hints.
    given = len(inference.columns) + bool(inference.flagged) + has_empty_rows
    column: Any = pa.Array if takes_arrow() else pd.Series
    taken: Any = column if given == 1 else tuple[column, ...]
    result: Any = column if single or takes_arrow() else pd.DataFrame
    predict.__annotations__ = {"batches": Iterator[taken], "return": Iterator[result]}
    make: Any = getattr(F, ARROW_UDF) if takes_arrow() else pandas_udf
    udf: Callable[..., Column] = make(predict, return_type)
    return udf


def _are_arrows(columns: Sequence[Any]) -> bool:
    return all(isinstance(column, pa.Array) for column in columns)


def _begin(
    inference: BatchPredictor, predictor: Predictor, arrays: dict[str, Array]
) -> Callable[[], list[Array]]:
    if len(next(iter(arrays.values()))):
        return inference.begin(predictor, arrays)
    nothing = [np.zeros((0, *known_sizes(shape))) for shape in inference.fields.values()]
    return lambda: nothing
