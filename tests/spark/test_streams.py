"""transform() on streaming DataFrames: lazy, exactly once, with large models, in pipelines."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from broadcasts import broadcast_files
from pyspark.ml import PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidatorModel
from pyspark.sql import functions as F

from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference import broadcast
from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark

FILES, ROWS = 3, 5
SCHEMA = "id long, a double, b double, word string"
COMMON: dict[str, Any] = {"feature_columns": ["features"], "label_columns": ["y"]}


@pytest.fixture(scope="module")
def source(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of Parquet files, one per micro-batch, with IDs that count from 0."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(FILES):
        spark.range(number * ROWS, (number + 1) * ROWS, 1, 1).select(
            "id",
            F.col("id").cast("double").alias("a"),
            (F.col("id") * 0.5).alias("b"),
            F.format_string("row %s", "id").alias("word"),
        ).write.mode("append").parquet(str(folder))
    return str(folder)


def read(spark: Any, source: str) -> Any:
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(source)
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(stream)


class Lookup(torch.nn.Module):
    """Look up 1000 * id in a table and add id / 2; fail on an ID while a file exists."""

    def __init__(self, fuse: Path | None = None, width: int = 100) -> None:
        super().__init__()
        self.fuse = fuse
        self.table = torch.nn.Embedding.from_pretrained(1000.0 * torch.arange(width)[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fuse is not None and self.fuse.exists() and (x[:, 0] == 2 * ROWS).any():
            raise ValueError("the fuse has blown")
        return self.table(x[:, 0].long())[:, 0] + x[:, 1]


def expected(rows: int = FILES * ROWS) -> dict[int, float]:
    return {number: 1000.5 * number for number in range(rows)}


def run(frame: Any, folder: Path, sink: str = "parquet") -> list[int]:
    """Write all new rows to a sink, and return the number of rows of each micro-batch."""
    writer = frame.writeStream.format(sink).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.option("path", str(folder / "out")).start()
    query.awaitTermination(120)
    return [progress["numInputRows"] for progress in query.recentProgress]


def written(spark: Any, folder: Path) -> list[Any]:
    return spark.read.parquet(str(folder / "out")).collect()


def test_restarted_queries_write_each_row_once(spark: Any, source: str, tmp_path: Path) -> None:
    fuse = tmp_path / "fuse"
    fuse.touch()
    model = TorchModel(model=Lookup(fuse), input_shapes=[[-1, 2]], **COMMON)
    model.write().overwrite().save(str(tmp_path / "model"))
    stream = read(spark, source)
    predicted = model.transform(stream)
    assert predicted.isStreaming
    with pytest.raises(Exception, match="the fuse has blown"):
        run(predicted.select("id", "word", "y__output"), tmp_path)
    assert len(written(spark, tmp_path)) == 2 * ROWS

    fuse.unlink()
    # Another session, a reloaded model and a filter, like in a new application.
    other = spark.newSession()
    loaded = TorchModel.load(str(tmp_path / "model"))
    predicted = loaded.transform(read(other, source)).where("y__output >= 0")
    assert run(predicted.select("id", "word", "y__output"), tmp_path) == [ROWS]
    rows = written(spark, tmp_path)
    assert sorted((row.id, row.y__output) for row in rows) == sorted(expected().items())
    assert all(row.word == f"row {row.id}" for row in rows)


def test_streams_keep_models_that_the_driver_has_deleted(
    spark: Any, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "PART_BYTES", 500_000)
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(source)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    # 1.2 MB, in three parts.
    before = broadcast_files(spark)
    model = TorchModel(model=Lookup(width=300_000), input_shapes=[[-1, 2]], **COMMON)
    best = PipelineModel([assembler, model])
    predicted = CrossValidatorModel(best, [0.0]).transform(stream).drop("features")
    del best, model
    gc.collect()
    spark.sparkContext._jvm.System.gc()
    assert run(predicted, tmp_path) == [ROWS] * FILES
    assert len(broadcast_files(spark) - before) == 3
    assert {row.id: row.y__output for row in written(spark, tmp_path)} == expected()


class Stepping(torch.nn.Module):
    """Return the rows, doubled."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 2 * features


def test_stateful_queries_work_and_no_job_infers_shapes(
    spark: Any, source: str, tmp_path: Path
) -> None:
    jobs = spark.sparkContext.statusTracker()
    # The watermark starts at 0, so only timestamps after it are not late.
    stream = read(spark, source).withColumn("at", F.timestamp_seconds(F.col("id") + 1))
    words = spark.range(FILES * ROWS).withColumnRenamed("id", "other")
    before = set(jobs.getJobIdsForGroup(None))
    model = LightningModel(model=Stepping(), input_shapes=[[-1, 2]], **COMMON)
    predicted = model.transform(stream.withWatermark("at", "1 second"))
    assert set(jobs.getJobIdsForGroup(None)) == before
    joined = predicted.join(words, F.col("id") == F.col("other")).dropDuplicates(["id", "at"])
    run(joined.select("id", "y__output"), tmp_path)
    found = {row.id: row.y__output.toArray().tolist() for row in written(spark, tmp_path)}
    assert found == {number: [2.0 * number, 1.0 * number] for number in range(FILES * ROWS)}


def test_transform_works_on_micro_batches(spark: Any, source: str, tmp_path: Path) -> None:
    found: dict[int, float] = {}
    model = LightningModel(model=Lookup(width=300_000), input_shapes=[[-1, 2]], **COMMON)
    before = broadcast_files(spark)
    sent: set[Path] = set()

    def predict(batch: Any, number: int) -> None:
        predicted = model.transform(batch).persist()
        found.update({row.id: row.y__output for row in predicted.collect()})
        assert predicted.where("y__output >= 0").count() == ROWS
        sent.update(broadcast_files(spark) - before)
        predicted.unpersist()

    writer = read(spark, source).writeStream.foreachBatch(predict).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.awaitTermination(120)
    assert found == expected()
    assert len(sent) == 1


def test_unknown_shapes_must_be_set_on_streams(spark: Any, source: str) -> None:
    stream = spark.readStream.schema("id long, x array<double>").parquet(source)
    model = LightningModel(model=Stepping(), feature_columns=["x"], label_columns=["y"])
    with pytest.raises(ParamError, match="Set output_shapes"):
        model.transform(stream)
    assert model.setOutputShapes([[2]]).transform(stream).isStreaming
