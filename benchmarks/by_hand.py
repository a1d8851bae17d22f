"""Hand-written inference without this package, for `benchmarks.transform`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from pyspark.ml.functions import array_to_vector, predict_batch_udf, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

__all__ = [
    "forward_seconds",
    "in_own_workers",
    "map_in_arrow",
    "moved_alone",
    "predict_batches",
]

OUTPUT = "label__output"
_VALUES = "values"


def map_in_arrow(
    spark: SparkSession, net: torch.nn.Module, features: str, shape: tuple[int, ...], outputs: int
) -> Callable[[DataFrame], DataFrame]:
    """Return a `mapInArrow` over dense vectors, or arrays of floats, of one size."""
    model = spark.sparkContext.broadcast(_pickled(net))

    def infer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        torch.set_num_threads(1)
        net = cloudpickle.loads(model.value)
        for batch in batches:
            column = batch.column(features)
            lists = column.field(_VALUES) if pa.types.is_struct(column.type) else column
            rows = lists.flatten().to_numpy().reshape(-1, *shape)
            with torch.inference_mode():
                found = net(torch.from_numpy(rows.astype(np.float32))).numpy().astype(np.float64)
            values = pa.array(found.reshape(-1))
            if outputs > 1:
                ends = np.arange(0, found.size + 1, outputs, dtype=np.int32)
                values = pa.ListArray.from_arrays(ends, values)
            names = [*batch.schema.names, OUTPUT]
            yield pa.RecordBatch.from_arrays([*batch.columns, values], names=names)

    def transform(frame: DataFrame) -> DataFrame:
        data_type = T.ArrayType(T.DoubleType()) if outputs > 1 else T.DoubleType()
        schema = T.StructType([*frame.schema.fields, T.StructField(OUTPUT, data_type)])
        return _with_vector(frame.mapInArrow(infer, schema), outputs)

    return transform


def predict_batches(
    spark: SparkSession, net: torch.nn.Module, features: str, shape: tuple[int, ...], outputs: int
) -> Callable[[DataFrame], DataFrame]:
    """Return the same with PySpark's `predict_batch_udf`."""
    model = spark.sparkContext.broadcast(_pickled(net))

    def make() -> Callable[[Any], Any]:
        torch.set_num_threads(1)
        net = cloudpickle.loads(model.value)

        def predict(rows: Any) -> Any:
            with torch.inference_mode():
                found = net(torch.from_numpy(rows)).numpy()
            return found if outputs > 1 else found.reshape(-1)

        return predict

    result = T.ArrayType(T.FloatType()) if outputs > 1 else T.FloatType()
    udf = predict_batch_udf(
        make, return_type=result, batch_size=10_000, input_tensor_shapes=[list(shape)]
    )

    def transform(frame: DataFrame) -> DataFrame:
        is_vector = isinstance(frame.schema[features].dataType, VectorUDT)
        column = vector_to_array(features, "float32") if is_vector else frame[features]
        return _with_vector(frame.withColumn(OUTPUT, udf(column)), outputs)

    return transform


def in_own_workers(
    spark: SparkSession, transform: Callable[[DataFrame], DataFrame]
) -> Callable[[DataFrame], DataFrame]:
    """Return the same in separate Python workers.

    Workers of a session serve all of its queries. Work that this package saves in its workers
    therefore also makes the tasks of other contenders cheaper.
    """

    def call(frame: DataFrame) -> DataFrame:
        # Spark uses separate workers for separate environments.
        spark.sparkContext.environment["HVD_BENCHMARK"] = "by hand"
        try:
            return transform(frame)
        finally:
            del spark.sparkContext.environment["HVD_BENCHMARK"]

    return call


def moved_alone(frame: DataFrame) -> DataFrame:
    """Transfer all columns to Python, and the first one back."""
    first = frame.columns[0]

    def give(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.select([first])

    return frame.mapInArrow(give, frame.select(first).schema)


def forward_seconds(
    net: torch.nn.Module, shape: tuple[int, ...], rows: int, batch_rows: int, processes: int
) -> float:
    """Return the seconds of forward passes alone, of the slowest of one process per core."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = [
            pool.submit(_forward, _pickled(net), shape, rows // processes, batch_rows)
            for _ in range(processes)
        ]
        return max(job.result() for job in jobs)


def _forward(pickled: bytes, shape: tuple[int, ...], rows: int, batch_rows: int) -> float:
    torch.set_num_threads(1)
    net = cloudpickle.loads(pickled)
    batch = torch.rand(batch_rows, *shape)
    with torch.inference_mode():
        net(batch)
        begin = time.perf_counter()
        for start in range(0, rows, batch_rows):
            net(batch[: min(batch_rows, rows - start)])
        return time.perf_counter() - begin


def _with_vector(frame: DataFrame, outputs: int) -> DataFrame:
    return frame.withColumn(OUTPUT, array_to_vector(OUTPUT)) if outputs > 1 else frame


def _pickled(net: torch.nn.Module) -> bytes:
    # The other processes do not have this package.
    module = sys.modules[type(net).__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(net)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return pickled
