"""Data that transform() sends to executors: batches of bounded size, and each model once."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broadcasts import broadcast_files
from estimators import Noting
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.inference import frame as frames_of_udfs
from hvd_estimators.inference.udf import MOST_ARGUMENTS
from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.versions]

WIDTH = 50


def make_frame(spark: Any, rows: int) -> Any:
    """Return rows whose ``x`` holds the row's number 50 times, and a vector of the same size."""
    schema = T.StructType(
        [
            T.StructField("Odd `name.", T.LongType(), False),
            T.StructField("x", T.ArrayType(T.ArrayType(T.DoubleType(), False), False), False),
            T.StructField("z", T.DoubleType()),
            T.StructField("v", VectorUDT(), True, {"kept": 1}),
            T.StructField("text", T.StringType(), False),
        ]
    )
    values = [
        (i, [[float(i)] * 10] * (WIDTH // 10), 0.5, Vectors.dense([float(i)] * WIDTH), f"row {i}")
        for i in range(rows)
    ]
    return spark.createDataFrame(values, schema).coalesce(1)


def make_model(module: torch.nn.Module, feature: str, **params: Any) -> TorchModel:
    return TorchModel(
        model=module,
        feature_columns=[feature, "z"],
        label_columns=["y"],
        output_shapes=[[]],
        **params,
    )


@pytest.mark.parametrize("feature", ["x", "v"])
def test_batches_of_large_rows_are_bounded_by_bytes(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    monkeypatch.setattr(frames_of_udfs, "BATCH_BYTES", 20_000)
    rows, setting = 120, "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(setting)
    frame = make_frame(spark, rows)
    notes = tmp_path / "notes"

    predicted = make_model(Noting(notes), feature).transform(frame)

    assert not notes.exists()
    # No filter removes the rows that bound the batches before the model has run.
    chosen = predicted.where(
        "y__output >= 0 and text like 'row%' and size(x) > 0 and v is not null"
    )
    found = chosen.collect()
    # The number of rows in 20,000 bytes: of each, the array or vector and the output count.
    most = 20_000 // (WIDTH * 8 + 8) + 1
    forward_passes = list(map(int, notes.read_text().split()))
    assert sum(forward_passes) == rows
    assert most - 2 <= max(forward_passes) <= most
    np.testing.assert_allclose(
        [row["y__output"] for row in found], np.arange(rows) * WIDTH + 0.5, rtol=1e-6
    )
    given = [row.asDict() for row in frame.collect()]
    assert [{name: row[name] for name in frame.columns} for row in found] == given
    assert predicted.schema.fields[:-1] == frame.schema.fields
    assert predicted.columns == [*frame.columns, "y__output"]
    assert spark.conf.get(setting) == before
    # Filters do not see these rows, either.
    reciprocal = F.udf(lambda output, x: 1 / int(output * len(x) > 0), "double")
    assert predicted.where(reciprocal("y__output", "x") == 1).count() == rows
    notes.unlink()
    assert predicted.count() == rows
    assert not notes.exists()


def test_rows_waiting_for_predictions_hold_no_other_large_values(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_of_udfs, "BATCH_BYTES", 20_000)
    model = make_model(Noting(tmp_path / "notes"), "x")
    predicted = model.transform(make_frame(spark, 3)).select("y__output")
    plan = predicted._jdf.queryExecution().executedPlan().toString()
    # Outermost first. A row waits for its prediction with all columns from below the UDF. Empty
    # rows are generated there (Generate), and emptied before Spark can defer that (Expand).
    udf = plan.index("EvalPython")
    made = plan.index("Generate", udf)
    assert "Expand" in plan[udf:made], plan


def test_columns_of_numbers_need_no_empty_rows_but_large_outputs_do(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = spark.range(2).selectExpr(*(f"id as c{n}" for n in range(20)))
    monkeypatch.setattr(frames_of_udfs, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(frames_of_udfs, "NUMBERS_BYTES", 10_000 * 8 * 4)
    assert frames_of_udfs.pad_large_rows(frame, frame.columns, {}, output_items=1) is None

    padded = frames_of_udfs.pad_large_rows(frame, frame.columns, {}, output_items=9)
    assert padded is not None
    assert padded.frame.count() == 2 * 3  # 9 numbers, of 4 for each


@pytest.mark.parametrize("has_large_rows", [False, True])
def test_many_columns_arrive_with_their_types_and_nulls(
    spark: Any, monkeypatch: pytest.MonkeyPatch, has_large_rows: bool
) -> None:
    rows, width = 50, 3 * (MOST_ARGUMENTS // 2)
    kinds = ("double", "tinyint", "bigint", "float", "boolean")
    null_if = "if(id = 7 and {n} = 60, null, cast((id + {n}) % 100 as {kind})) as c{n}"
    columns = [null_if.format(n=n, kind=kinds[n % 5]) for n in range(width)]
    frame = spark.range(rows).selectExpr("id", *columns, "array(double(id), 1.0) as x")
    if has_large_rows:
        monkeypatch.setattr(frames_of_udfs, "BATCH_BYTES", 10_000 * 8)
    names = [f"c{n}" for n in range(width)]

    class Weighted(torch.nn.Module):
        def forward(self, wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return wide @ torch.arange(1.0, width + 1) + 1000 * x[:, 0]

    predicted = TorchModel(
        model=Weighted(),
        feature_columns=[names, "x"],
        label_columns=["y"],
        output_shapes=[[]],
        handleInvalid="keep",
    ).transform(frame)

    found = predicted.orderBy("id").toPandas()["y__output"].to_numpy()
    numbers = (np.arange(rows)[:, None] + np.arange(width)) % 100.0
    numbers[:, 4::5] = numbers[:, 4::5] != 0
    expected = numbers @ np.arange(1.0, width + 1) + 1000 * np.arange(rows)
    expected[7] = np.nan
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert predicted.drop("y__output").collect() == frame.collect()


class Large(torch.nn.Module):
    """Lookup in a table of two megabytes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.full([2**19], value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[x.long()].squeeze(-1)


def test_a_model_is_sent_once_and_deleted_with_its_last_plan(spark: Any) -> None:
    def collected() -> None:
        gc.collect()
        spark.sparkContext._jvm.System.gc()

    def is_in_memory(number: int) -> bool:
        context = spark.sparkContext
        block = context._jvm.org.apache.spark.storage.BroadcastBlockId(number, "")
        java = context._jvm.java.lang
        # Py4J would load the types of all methods of SparkEnv, and PySpark 4.3 lacks some.
        loaded = java.Thread.currentThread().getContextClassLoader().loadClass
        kind = java.invoke.MethodType.methodType(loaded("org.apache.spark.storage.BlockManager"))
        blocks = java.invoke.MethodHandles.publicLookup().findVirtual(
            loaded("org.apache.spark.SparkEnv"), "blockManager", kind
        )
        manager = blocks.invokeWithArguments([context._jsc.sc().env()])
        return bool(manager.getStatus(block).isDefined())

    def make(value: float) -> TorchModel:
        return TorchModel(
            model=Large(value),
            feature_columns=["id"],
            label_columns=["y"],
            output_shapes=[[]],
            input_shapes=[[-1, 1]],
        )

    def new_files() -> int:
        # Files of other tests may still disappear meanwhile.
        return len(broadcast_files(spark) - before)

    collected()
    before = broadcast_files(spark)
    model = make(1.5)
    frames = [model.transform(spark.range(3)) for _ in range(3)]
    frames.append(model.copy({"outputCols": ["other"]}).transform(spark.range(4)))
    assert new_files() == 1
    number = model._shared._last["model"][1].parts[0]._jbroadcast.id()
    assert is_in_memory(number)

    # Plans need the file after the model is deleted, and so do derived plans.
    derived = frames[0].select(F.sum("y__output").alias("sum"))
    del model, frames
    collected()
    assert derived.collect() == [(4.5,)]
    assert derived.collect() == [(4.5,)]
    other = make(2.5).transform(spark.range(2))
    assert new_files() == 2
    assert [row[1] for row in other.collect()] == [2.5, 2.5]

    del derived, other
    deadline = time.monotonic() + 30
    # Threads of Spark keep references to the last query until they handle another one.
    while (new_files() or is_in_memory(number)) and time.monotonic() < deadline:
        spark.range(1).count()
        collected()
    assert new_files() == 0
    assert not is_in_memory(number)
