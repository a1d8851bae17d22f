"""What transform() sends to the executors: rows in batches of bounded size, and a model once."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broadcasts import broadcast_files
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.inference import broadcast
from hvd_estimators.inference import frame as frames_of_udfs
from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark

WIDTH = 50


class Noting(torch.nn.Module):
    """Sums each row, and notes in a file how many rows a forward pass has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{len(x)}\n")
        return x.flatten(1).sum(1) + z.squeeze(-1)


def make_frame(spark: Any, rows: int) -> Any:
    """Return rows whose ``x`` has 50 times the row's number, and a vector as large."""
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
    # No filter takes the rows that bound the batches away before the model has run.
    chosen = predicted.where(
        "y__output >= 0 and text like 'row%' and size(x) > 0 and v is not null"
    )
    found = chosen.collect()
    # 20,000 bytes hold so many rows of these sizes: the array or vector, a number and the output.
    most = 20_000 // (WIDTH * 8 + 16) + 1
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
    # Nor does one see them.
    reciprocal = F.udf(lambda output, x: 1 / int(output * len(x) > 0), "double")
    assert predicted.where(reciprocal("y__output", "x") == 1).count() == rows
    notes.unlink()
    assert predicted.count() == rows
    assert not notes.exists()


def test_rows_that_wait_for_predictions_hold_nothing_large_but_their_own(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_of_udfs, "BATCH_BYTES", 20_000)
    model = make_model(Noting(tmp_path / "notes"), "x")
    predicted = model.transform(make_frame(spark, 3)).select("y__output")
    plan = predicted._jdf.queryExecution().executedPlan().toString()
    # Outermost first. A row waits for its prediction with all that comes from below the UDF: empty
    # ones are made there (Generate), and emptied before Spark can put that off (Expand).
    udf = plan.index("EvalPython")
    made = plan.index("Generate", udf)
    assert "Expand" in plan[udf:made], plan


def test_rows_that_are_known_to_be_small_travel_as_they_are(spark: Any, tmp_path: Path) -> None:
    frame, notes = make_frame(spark, 30), tmp_path / "notes"
    sizes = {"x": {"max_size": WIDTH, "dtype": "float64"}}
    plans = [
        str(model.transform(frame)._jdf.queryExecution().optimizedPlan())
        for model in (
            make_model(Noting(notes), "x", _metadata=sizes),
            make_model(Noting(notes), "x", input_shapes=[[5, 10], [1]]),
            make_model(Noting(notes), "x", input_shapes=[[-1, 5, -1], [1]]),
            make_model(Noting(notes), "x"),
        )
    ]
    assert ["__empty_" in plan for plan in plans] == [False, False, True, True]


def test_nulls_of_rows_are_found_among_empty_ones(spark: Any, tmp_path: Path) -> None:
    frame = make_frame(spark, 5).withColumn("v", F.when(F.col("text") != "row 3", F.col("v")))
    model = make_model(Noting(tmp_path / "notes"), "v").setHandleInvalid("error")
    predicted = model.transform(frame)

    with pytest.raises(Exception, match="Column 'v' holds nulls"):
        predicted.collect()


class Large(torch.nn.Module):
    """Two megabytes that are looked up."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.full([2**19], value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[x.long()].squeeze(-1)


def test_a_model_is_sent_once_and_its_file_goes_with_what_needs_it(spark: Any) -> None:
    def collected() -> None:
        gc.collect()
        broadcast._registry.sweep(spark.sparkContext, collect=True)

    def make(value: float) -> TorchModel:
        return TorchModel(
            model=Large(value),
            feature_columns=["id"],
            label_columns=["y"],
            output_shapes=[[]],
            input_shapes=[[-1, 1]],
        )

    def new_files() -> int:
        # Those of other tests may still go meanwhile.
        return len(broadcast_files(spark) - before)

    collected()
    before = broadcast_files(spark)
    model = make(1.5)
    frames = [model.transform(spark.range(3)) for _ in range(3)]
    frames.append(model.copy({"outputCols": ["other"]}).transform(spark.range(4)))
    assert new_files() == 1

    # Without the model, plans need it; also those that are made of them.
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
    # Spark's own threads hold on to what has just run for a moment.
    while new_files() and time.monotonic() < deadline:
        collected()
    assert new_files() == 0
