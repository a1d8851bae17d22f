"""Hand-written inference without this package, for `benchmarks.transform`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from benchmarks import common

OUTPUT = "label__output"
_VALUES = "values"


def map_in_arrow(
    spark: SparkSession,
    net: torch.nn.Module,
    features: str,
    shape: tuple[int, ...],
    outputs: int,
    device: str = "cpu",
) -> Callable[[DataFrame], DataFrame]:
    """Return a `mapInArrow` over dense vectors, or arrays of floats, of one size."""
    model = spark.sparkContext.broadcast(_pickled(net))

    def infer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        torch.set_num_threads(1)
        net = cloudpickle.loads(model.value).to(device)
        for batch in batches:
            column = batch.column(features)
            lists = column.field(_VALUES) if pa.types.is_struct(column.type) else column
            rows = lists.flatten().to_numpy().reshape(-1, *shape).astype(np.float32)
            with torch.inference_mode():
                output = net(torch.from_numpy(rows).to(device)).cpu()
            found = output.numpy().astype(np.float64)
            values = pa.array(found.reshape(-1))
            if outputs > 1:
                ends = np.arange(0, found.size + 1, outputs, dtype=np.int32)
                values = pa.ListArray.from_arrays(ends, values)
            names = [*batch.schema.names, OUTPUT]
            yield pa.RecordBatch.from_arrays([*batch.columns, values], names=names)

    def transform(frame: DataFrame) -> DataFrame:
        data_type = T.ArrayType(T.DoubleType()) if outputs > 1 else T.DoubleType()
        schema = T.StructType([*frame.schema.fields, T.StructField(OUTPUT, data_type)])
        found = frame.mapInArrow(infer, schema)
        return found.withColumn(OUTPUT, array_to_vector(OUTPUT)) if outputs > 1 else found

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


def _pickled(net: torch.nn.Module) -> bytes:
    # The other processes do not have this package.
    cloudpickle.register_pickle_by_value(common)
    try:
        pickled: bytes = cloudpickle.dumps(net)
    finally:
        cloudpickle.unregister_pickle_by_value(common)
    return pickled
