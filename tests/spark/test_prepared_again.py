"""prepare_data: which datasets are used again, listed and cleared."""

from __future__ import annotations

import datetime
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from in_turn import InTurnBackend
from preparing import index_of, jobs_of, make_estimator, numbers, read
from pyarrow import parquet
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

from hvd_estimators import (
    Store,
    clear_prepared_data,
    clear_training_cache,
    list_prepared_data,
    prepare_data,
)
from hvd_estimators.prepare import dataframe as prepare

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _clear() -> Any:
    yield
    clear_training_cache()


def test_the_same_rows_are_written_once(spark: Any, store: Any, tmp_path: Path) -> None:
    numbers(spark).write.parquet(str(tmp_path / "files"))

    def from_files() -> Any:
        return spark.read.parquet(str(tmp_path / "files")).where("x > 10")

    for make in (lambda: numbers(spark), from_files):
        first = index_of(store, make())
        assert index_of(store, make()) == first
        assert index_of(store, make().where("id < 50")) != first
    assert len(list_prepared_data(store)) == 3


def test_an_assembled_frame_is_recognised(spark: Any, store: Any) -> None:
    assembler = VectorAssembler(inputCols=["x", "id"], outputCol="features")
    frame = assembler.transform(numbers(spark))
    first = index_of(store, frame)
    assert index_of(store, frame) == first
    assert index_of(store, assembler.transform(numbers(spark))) != first


def test_columns_that_swap_their_names_are_other_rows(spark: Any, store: Any) -> None:
    base = spark.range(10).select(F.col("id").alias("p"), (F.col("id") * 10).alias("q"))
    (one,) = read(store, base.select(F.col("p").alias("a"), F.col("q").alias("b")), ["a"])
    (two,) = read(store, base.select(F.col("p").alias("b"), F.col("q").alias("a")), ["a"])
    assert (sorted(one["b"]), sorted(two["b"])) == ([10 * i for i in range(10)], list(range(10)))


@pytest.mark.parametrize(
    "options",
    [
        {"validation": 0.25},
        {"validation": 0.2, "random_seed": 8},
        {"validation": "held_out"},
        {"validation": None},
        {"labels": ["x"]},
        {"feature_columns": ["x"]},
        {"sample_weight_col": "x"},
        {"compress_sparse": True},
        {"partitions_per_process": 2},
        {"check_finite": True},
    ],
)
def test_another_option_is_another_dataset(spark: Any, store: Any, options: Any) -> None:
    frame = numbers(spark)
    basis = {"validation": 0.2, "random_seed": 7}
    first = index_of(store, frame, **basis)
    assert index_of(store, frame, **basis) == first
    assert index_of(store, frame, **{**basis, **options}) != first


def test_another_store_is_another_dataset(spark: Any, store: Any, tmp_path: Path) -> None:
    other = Store.create(str(tmp_path / "other"))
    assert index_of(store, numbers(spark)) != index_of(other, numbers(spark))
    assert len(list_prepared_data(store)) == len(list_prepared_data(other)) == 1


@pytest.mark.parametrize("reread", [False, True])
@pytest.mark.parametrize("change", ["rewrite", "add", "remove"])
def test_files_that_change_are_read_again(
    spark: Any, store: Any, tmp_path: Path, change: str, reread: bool
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()

    def write(name: str, ids: Any) -> None:
        parquet.write_table(pa.table({"id": ids, "x": [i * 1.0 for i in ids]}), folder / name)

    write("a.parquet", [1, 2, 3])
    write("b.parquet", [4, 5])
    frame = spark.read.parquet(str(folder))
    first = index_of(store, frame)
    assert index_of(store, frame) == first

    if change == "rewrite":
        write("b.parquet", [6, 7])
    elif change == "add":
        write("c.parquet", [6])
    else:
        (folder / "b.parquet").unlink()
    if not reread and change == "remove":
        # Spark itself looks for the file that it listed.
        with pytest.raises(Exception, match=r"b\.parquet"):
            index_of(store, frame)
        return
    frame = spark.read.parquet(str(folder)) if reread else frame
    expected = sorted(row["id"] for row in frame.collect())
    # Spark reads the files that it listed: one that is new is none of them.
    assert (index_of(store, frame) == first) == (change == "add" and not reread)
    (found,) = read(store, frame)
    assert sorted(found["id"]) == expected
    if reread:
        wanted = {"rewrite": [1, 2, 3, 6, 7], "add": [1, 2, 3, 4, 5, 6], "remove": [1, 2, 3]}
        assert expected == wanted[change]


def test_a_frame_that_reads_only_a_part_of_its_file_is_none_that_reads_all(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"

    def frame(rows: int) -> Any:
        path.write_text("".join(f"{i},{i}.5\n" for i in range(rows)))
        return spark.read.schema("id int, x double").csv(str(path))

    short, long = frame(2), frame(9)
    assert short.sameSemantics(long)
    # Spark reads as many bytes as there were when it listed the file.
    assert short.count() < long.count()
    first = index_of(store, short)
    assert index_of(store, long) != first
    (found,) = read(store, long)
    assert sorted(found["id"]) == list(range(9))


def test_a_rewrite_of_equal_size_with_the_time_restored_is_noticed(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"

    def write(values: list[float]) -> Any:
        table = pa.table({"id": [1, 2, 3], "x": values})
        parquet.write_table(table, path, compression="none", use_dictionary=False)
        return path.stat()

    before = write([1.0, 2.0, 3.0])
    first = index_of(store, spark.read.parquet(str(path)))
    assert index_of(store, spark.read.parquet(str(path))) == first
    after = write([5.0, 6.0, 7.0])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (after.st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    (found,) = read(store, spark.read.parquet(str(path)))
    assert sorted(found["x"]) == [5.0, 6.0, 7.0]


def test_cached_rows_are_used_again_as_long_as_they_are_the_same_cached_rows(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"

    def frame() -> Any:
        return spark.read.parquet(str(path)).where("x > 0")

    def xs() -> list[float]:
        return sorted(read(store, frame())[0]["x"])

    parquet.write_table(pa.table({"id": [1, 2], "x": [1.0, 2.0]}), path)
    cached = frame().cache()
    cached.count()
    parquet.write_table(pa.table({"id": [3, 4, 5], "x": [3.0, 4.0, 5.0]}), path)
    # Spark takes the frame for the cached one, which has the rows of before.
    assert xs() == sorted(row["x"] for row in frame().collect()) == [1.0, 2.0]
    first = index_of(store, frame())
    assert index_of(store, frame()) == first
    for _ in range(2):
        cached.unpersist(blocking=True)
        assert xs() == [3.0, 4.0, 5.0]
        cached = frame().cache()
        # Not the cached rows of before, even where Spark plans the same.
        assert index_of(store, frame()) not in {first}
        first = index_of(store, frame())
    cached.unpersist()


@pytest.mark.parametrize(
    "kind", ["rdd", "python function", "clock", "shuffled noise", "numbered", "subquery", "uuid"]
)
def test_rows_that_may_be_others_are_prepared_each_time_and_deleted(
    spark: Any, store: Any, kind: str
) -> None:
    base = numbers(spark)
    frame = {
        "rdd": lambda: spark.createDataFrame([(1, 2.0)], "id int, x double"),
        "python function": lambda: base.select("id", F.udf(lambda v: v, "double")("x")),
        "clock": lambda: base.select("id", F.unix_timestamp().alias("x")),
        "shuffled noise": lambda: base.repartition(2).select("id", F.rand().alias("x")),
        "numbered": lambda: base.select("id", F.monotonically_increasing_id().alias("x")),
        "subquery": lambda: base.drop("held_out").where("x >= (select min(id) from range(9))"),
        "uuid": lambda: base.select("id", F.hash(F.expr("uuid()")).alias("x")),
    }[kind]()
    first = index_of(store, frame)
    assert index_of(store, frame) != first
    assert list(Path(store.prefix_path).iterdir()) == []


def test_a_frame_without_a_plan_here_is_prepared_each_time(
    spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvd_estimators.prepare import lineage as plans

    # As a DataFrame of Spark Connect, which has no _jdf.
    monkeypatch.setattr(plans, "_analyzed", lambda df: None)
    frame = numbers(spark)
    assert index_of(store, frame, validation=0.2) != index_of(store, frame, validation=0.2)
    assert list_prepared_data(store) == []


def test_two_threads_write_once(spark: Any, store: Any) -> None:
    frame = numbers(spark)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(index_of(store, frame))) for _ in "ab"]
    assert jobs_of(spark, lambda: run_all(threads)) <= 1
    assert len(found) == 2
    assert len(set(found)) == 1
    assert [dataset.index for dataset in list_prepared_data(store)] == found[:1]


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_write_that_fails_in_one_thread_is_done_by_the_other(
    spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = numbers(spark)
    both_asked, written = threading.Barrier(2), []
    real_write, real_plan = prepare.write_dataset, prepare.source_plan

    def plan(df: Any) -> Any:
        try:
            return real_plan(df)
        finally:
            both_asked.wait(60)

    def write(store: Any, index: str, *args: Any, **kwargs: Any) -> Any:
        written.append(index)
        manifest = real_write(store, index, *args, **kwargs)
        if len(written) == 1:
            raise OSError("the disk is full")
        return manifest

    monkeypatch.setattr(prepare, "source_plan", plan)
    monkeypatch.setattr(prepare, "write_dataset", write)
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(index_of(store, frame))
        except OSError as error:
            results.append(str(error))

    run_all([threading.Thread(target=run) for _ in "ab"])
    assert sorted(results) == sorted(["the disk is full", written[1]])
    assert [dataset.index for dataset in list_prepared_data(store)] == written[1:]


def test_datasets_are_listed_and_cleared(spark: Any, store: Any) -> None:
    frame = numbers(spark).withColumn("v", array_to_vector(F.array("x", "x")))
    before = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=2)
    with prepare_data(
        1, store, frame, ["id"], ["v"], validation="held_out", compress_sparse=True
    ) as index:
        (dataset,) = list_prepared_data(store)
        assert clear_prepared_data(store) == []
    assert (dataset.index, dataset.rows, dataset.validation_rows) == (index, 160, 40)
    assert dataset.columns == ("v", "id")
    files = Path(store.prefix_path).rglob("*")
    sizes = [f.stat().st_size for f in files if f.is_file() and f.suffix != ".owner"]
    assert dataset.num_bytes == sum(sizes)
    assert before < dataset.created < datetime.datetime.now(datetime.timezone.utc)
    assert clear_prepared_data(store) == [dataset]
    assert list(Path(store.prefix_path).iterdir()) == []


def test_what_is_being_written_is_not_listed(
    spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(*args: Any) -> str:
        # Who writes is told first. The manifest comes last, when the files are there.
        if ".probe-" not in args[1]:
            seen.append((len(list(Path(store.prefix_path).rglob("*.parquet"))), *look_at(store)))
        return real(*args)

    real = Store.write_text
    monkeypatch.setattr(Store, "write_text", look)
    for validation in (None, "held_out"):
        index_of(store, numbers(spark), validation=validation)
        clear_training_cache()
    found = [(files > 0, listed, cleared) for files, listed, cleared in seen]
    assert found == [(False, [], []), (True, [], [])] * 2


def look_at(store: Any) -> tuple[Any, Any]:
    return list_prepared_data(store), clear_prepared_data(store)


def test_a_cross_validation_with_parallel_fits_writes_each_fold_once(
    spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = []
    real_write = prepare.write_dataset

    def write(store: Any, index: str, *args: Any, **kwargs: Any) -> Any:
        written.append(index)
        return real_write(store, index, *args, **kwargs)

    monkeypatch.setattr(prepare, "write_dataset", write)
    rows = spark.range(60).select((F.col("id") / 60).alias("x"), (F.col("id") / 30).alias("y"))
    rows.write.parquet(str(tmp_path / "rows"))
    # Folds are cached, by Spark, while they are trained on.
    frame = spark.read.parquet(str(tmp_path / "rows"))
    estimator = make_estimator(store, num_proc=None, backend=InTurnBackend())
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2])
    validator = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid.addGrid(estimator.learning_rate, [0.01, 0.02]).build(),
        evaluator=RegressionEvaluator(predictionCol="y__output", labelCol="y"),
        numFolds=3,
        seed=3,
        parallelism=2,
        collectSubModels=True,
    )
    found = validator.fit(frame)
    lengths = [[len(m.getHistory()) for m in fold] for fold in found.subModels]
    assert [sorted(fold) for fold in lengths] == [[1, 1, 2, 2]] * 3
    assert np.isfinite(found.avgMetrics).all()
    # Each fold once, for four fits, and all rows for the best.
    assert len(written) == len(set(written)) == 4
