"""Files that prepare_data writes, and data that it rejects."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from estimators import line_estimator
from parquet_files import damage_last_page
from preparing import index_of, numbers, read
from pyarrow import parquet
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from hvd_estimators import (
    clear_prepared_data,
    clear_training_cache,
    list_prepared_data,
    prepare_data,
)
from hvd_estimators.data.remote_reads import _VERIFY_PAGES
from hvd_estimators.exceptions import ColumnError, DataError, StoreError
from hvd_estimators.prepare import write
from hvd_estimators.prepare.dataframe import _analyzed_plan, _keeps_order
from hvd_estimators.prepare.datasets import load_manifest

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("cleared_cache")]


# Written values.


@pytest.mark.versions
def test_types_are_kept_and_vectors_are_32_bit_floats(spark: Any, store: Any) -> None:
    schema = (
        "id int, i8 byte, i16 short, i64 long, f32 float, f64 double, flag boolean, "
        "money decimal(10,2), list array<float>, nested array<array<double>>, "
        "prices array<decimal(6,1)>"
    )
    rows = [
        (i, i, -i, i * 2**40, i / 3, i / 3, i % 2 == 0, Decimal(i) / 4, [i / 3, 0.5],
         [[i / 3, 1.0, 2.0], [3.0, 4.0, -i / 7]], [Decimal(i), Decimal("0.5")])
        for i in range(20)
    ]  # fmt: skip
    frame = spark.createDataFrame(rows, schema)
    frame = frame.withColumn("v", array_to_vector(F.array(F.col("f64"), F.lit(0.1))))
    (found,) = read(store, frame)
    order = np.argsort(found["id"])
    expected = {
        "id": ("int32", lambda r: r[0]),
        "i8": ("int8", lambda r: r[1]),
        "i16": ("int16", lambda r: r[2]),
        "i64": ("int64", lambda r: r[3]),
        "f32": ("float32", lambda r: r[4]),
        "f64": ("float64", lambda r: r[5]),
        "flag": ("bool", lambda r: r[6]),
        "money": ("float64", lambda r: float(r[7])),
        "list": ("float32", lambda r: r[8]),
        "nested": ("float64", lambda r: r[9]),
        "prices": ("float64", lambda r: [float(p) for p in r[10]]),
        "v": ("float32", lambda r: [r[5], 0.1]),
    }
    assert set(found) == set(expected)
    for name, (dtype, value) in expected.items():
        assert found[name].dtype == dtype, name
        wanted = np.array([value(row) for row in rows], dtype)
        np.testing.assert_array_equal(found[name][order], wanted, err_msg=name)


SPARSE = [
    Vectors.dense([0.0, 1.5, 0.0, -2.0]),
    Vectors.sparse(4, {3: 0.1}),
    Vectors.sparse(4, [0, 2], [0.0, 7.0]),  # an explicit zero
    Vectors.sparse(4, {}),
    Vectors.dense([0.0, 0.0, 0.0, 0.0]),
    Vectors.dense([1.0, 2.0, 3.0, 4.0]),
    Vectors.sparse(4, {1: 1e-60}),  # zero as a 32-bit float
    Vectors.sparse(4, {0: float("nan"), 1: float("-inf")}),
]


@pytest.mark.parametrize("compress", [False, True])
def test_sparse_and_dense_vectors_round_trip(spark: Any, store: Any, compress: bool) -> None:
    rows = list(enumerate(SPARSE * 3))
    frame = spark.createDataFrame(rows, ["id", "v"]).repartition(3)
    (found,) = read(store, frame, compress_sparse=compress)
    expected = np.array([v.toArray() for v in SPARSE * 3]).astype(np.float32)
    assert found["v"].dtype == np.float32
    np.testing.assert_array_equal(found["v"][np.argsort(found["id"])], expected)


def test_zeros_are_not_written(spark: Any, store: Any) -> None:
    frame = spark.createDataFrame(list(enumerate(SPARSE)), ["id", "v"])
    with prepare_data(1, store, frame, ["id"], compress_sparse=True) as index:
        table = parquet.read_table(store.get_train_data_path(index))
    stored = {r["id"]: (r["v__indices"], r["v__values"]) for r in table.to_pylist()}
    assert table.schema.field("v__indices").type.value_type == pa.int32()
    assert table.schema.field("v__values").type.value_type == pa.float32()
    assert set(table.column_names) == {"id", "v__indices", "v__values"}
    assert stored[0] == ([1, 3], [1.5, -2.0])
    assert stored[1] == ([3], [float(np.float32(0.1))])
    assert stored[2] == ([2], [7.0])
    assert stored[3] == stored[4] == stored[6] == ([], [])


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Vectors.sparse(5, {0: 1.0}), "'v' is ragged: .* from 4 to 5"),
        (Vectors.dense([1.0, 2.0]), "'v' is ragged: .* from 2 to 4"),
        (None, "'v' holds 1 nulls"),
    ],
)
def test_ragged_vectors_and_nulls_are_rejected(
    spark: Any, store: Any, compress: bool, bad: Any, message: str
) -> None:
    rows = [*enumerate(SPARSE), (100, bad)]
    with pytest.raises(DataError, match=message):
        index_of(store, spark.createDataFrame(rows, ["id", "v"]), compress_sparse=compress)
    assert clear_prepared_data(store) == []


@pytest.mark.parametrize("bad", [[[1.0, None]], [[1.0, 2.0], None], [None]])
def test_nulls_in_nested_arrays_are_rejected(spark: Any, store: Any, bad: Any) -> None:
    rows = [(0, [[1.0, 2.0]] * len(bad)), (1, bad)]
    frame = spark.createDataFrame(rows, "id int, x array<array<double>>")
    with pytest.raises(DataError, match="'x' holds"):
        index_of(store, frame)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("validation", [None, 0.5])
def test_rows_on_another_machines_disk_are_a_store_error(
    spark: Any, store: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, validation: Any
) -> None:
    # Like a Spark Connect server, or a cluster's driver, with a separate disk.
    def there(session: Any, store: Any, path: str) -> str:
        return f"file://{tmp_path}/elsewhere{path}"

    monkeypatch.setattr(write, "spark_url", there)
    frame = spark.range(20).selectExpr("double(id) x", "double(id) y")
    with (
        pytest.raises(StoreError, match=r"written 20 rows .* finds 0 of them.*prefix_path to a"),
        prepare_data(1, store, frame, ["y"], ["x"], validation=validation),
    ):
        pass


@pytest.mark.parametrize("validation", [None, 0.5])
def test_rows_of_one_machine_without_the_stores_disk_are_missed(
    spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch, validation: Any
) -> None:
    real = write.read_split

    def without_a_file(store: Any, path: str, specs: Any) -> Any:
        min(Path(path).glob("*.parquet")).unlink()
        return real(store, path, specs)

    monkeypatch.setattr(write, "read_split", without_a_file)
    frame = spark.range(0, 40, 1, 4).selectExpr("double(id) x", "double(id) y")
    with (
        pytest.raises(StoreError, match=r"written 40 rows .* finds \d\d of them"),
        prepare_data(2, store, frame, ["y"], ["x"], validation=validation),
    ):
        pass
    assert list_prepared_data(store) == []


@pytest.mark.parametrize(
    ("schema", "values", "count"),
    [
        ("x double", [1.0, NAN, INF, -INF, 2.0], 3),
        ("x float", [1.0, NAN], 1),
        ("x array<float>", [[1.0, 2.0], [NAN, INF], [1.0, -INF]], 2),
        ("x array<array<double>>", [[[1.0, NAN]], [[1.0, 2.0]]], 1),
    ],
)
def test_check_finite_rejects_nan_and_infinity(
    spark: Any, store: Any, schema: str, values: Any, count: int
) -> None:
    frame = spark.createDataFrame([(i, v) for i, v in enumerate(values)], f"id int, {schema}")
    with pytest.raises(DataError, match=rf"'x' holds NaN or infinity .* in {count} rows"):
        index_of(store, frame, check_finite=True)
    (found,) = read(store, frame)
    np.testing.assert_array_equal(found["x"][np.argsort(found["id"])], np.array(values))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("bad", [Vectors.dense([1.0, NAN]), Vectors.sparse(2, {1: 1e300})])
def test_check_finite_checks_vectors_as_32_bit_floats(
    spark: Any, store: Any, compress: bool, bad: Any
) -> None:
    # 1e300 is infinite as a 32-bit float.
    frame = spark.createDataFrame([(0, Vectors.dense([1.0, 2.0])), (1, bad)], ["id", "v"])
    with pytest.raises(DataError, match=r"'v' holds NaN or infinity .* in 1 rows"):
        index_of(store, frame, compress_sparse=compress, check_finite=True)


@pytest.mark.parametrize("schema", ["array<float>", "array<array<double>>"])
def test_each_element_of_a_long_array_is_part_of_the_content(
    spark: Any, store: Any, schema: str
) -> None:
    contents = set()
    for changed in (None, 0, 200, 399, 599):
        value = [1.0 if index == changed else 0.0 for index in range(600)]
        rows = [value[start : start + 100] for start in range(0, 600, 100)]
        given = rows if "array<array" in schema else value
        frame = spark.createDataFrame([(0, given)] * 2, f"id int, x {schema}")
        with prepare_data(1, store, frame, ["id"]) as index:
            contents.add(load_manifest(store, index).content)
    assert len(contents) == 5


# Splits.


@pytest.mark.parametrize("shuffled", [False, True])
def test_nondeterministic_rows_are_on_one_side_only(spark: Any, store: Any, shuffled: bool) -> None:
    frame = spark.range(0, 1000, 1, 3)
    frame = frame.repartition(4) if shuffled else frame
    frame = frame.select(
        "id", F.rand().alias("noise"), F.monotonically_increasing_id().alias("number")
    )
    for validation in (0.3, "held_out"):
        rows = frame.withColumn("held_out", F.col("noise") < 0.3)
        train, val = read(store, rows, validation=validation)
        ids = np.concatenate([train["id"], val["id"]])
        assert sorted(ids) == list(range(1000))
        numbers = np.concatenate([train["number"], val["number"]])
        assert len(set(numbers)) == 1000
        assert 200 < len(val["id"]) < 400
        if validation == "held_out":
            assert val["noise"].max() < 0.3 <= train["noise"].min()


@pytest.mark.versions
def test_both_sides_are_written_to_the_stores_paths(spark: Any, store: Any) -> None:
    frame, option = numbers(spark), "spark.sql.maxConcurrentOutputFileWriters"
    with prepare_data(1, store, frame, ["id"], ["x"], validation="held_out") as index:
        assert spark.conf.get(option, None) in (None, "0")
        paths = [store.get_train_data_path(index), store.get_val_data_path(index)]
        (dataset,) = [dataset for dataset in list_prepared_data(store) if dataset.index == index]
        assert [dataset.train_path, dataset.validation_path] == paths
        by_spark = [spark.read.parquet(store.spark_url(path)).toPandas() for path in paths]
        by_arrow = [parquet.read_table(path).to_pandas() for path in paths]
        assert not any("split" in name for name in store.names(store.prefix_path))
        if _VERIFY_PAGES:
            (file,) = {split.file for split in load_manifest(store, index).train.row_groups[:1]}
            damage_last_page(Path(file))
            with pytest.raises(OSError, match="CRC checksum verification failed"):
                parquet.ParquetFile(file, **_VERIFY_PAGES).read()
    for sides in (by_spark, by_arrow):
        for side, held_out in zip(sides, (False, True), strict=True):
            assert list(side.columns) == ["x", "id"]
            ids = [i for i in range(200) if (i % 5 == 0) == held_out]
            assert sorted(side["id"]) == ids
            assert sorted(side["id"]) != list(side["id"])
            assert (side["x"] == side["id"] * 2.0).all()
    clear_training_cache()
    assert store.names(store.prefix_path) == []


def test_validation_rows_are_those_of_another_frame(spark: Any, store: Any) -> None:
    rows = spark.range(100).select(
        F.col("id"),
        (F.col("id") % 7).alias("validation"),
        (F.col("id") * 2.0).alias("a.b"),
        array_to_vector(F.array(F.col("id") * 1.0)).alias("vector"),
    )
    others = rows.where("id >= 60").withColumn("beside", F.lit("text"))
    train, val = read(
        store,
        rows.where("id < 60").drop("beside"),
        validation=others.select("beside", "vector", "`a.b`", "id", "validation"),
        feature_columns=["validation", "a.b", "vector"],
    )
    for part, ids in ((train, range(60)), (val, range(60, 100))):
        assert sorted(part["id"]) == list(ids)
        np.testing.assert_array_equal(part["validation"], part["id"] % 7)
        np.testing.assert_array_equal(part["a.b"], part["id"] * 2.0)
        np.testing.assert_array_equal(part["vector"].ravel(), part["id"])


def test_a_failed_move_leaves_no_files(spark: Any, store: Any, monkeypatch: Any) -> None:
    moved: list[str] = []
    move = type(store).move_folder

    def fail(self: Any, source: str, target: str) -> None:
        if moved:
            raise StoreError("the disk is full")
        moved.append(target)
        move(self, source, target)

    monkeypatch.setattr(type(store), "move_folder", fail)
    with (
        pytest.raises(StoreError, match="disk is full"),
        prepare_data(1, store, numbers(spark), ["id"], ["x"], validation="held_out"),
    ):
        pass
    assert store.names(store.prefix_path) == []


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_seed_gives_the_same_split_each_time(spark: Any, store: Any, shuffled: bool) -> None:
    frame = numbers(spark, 1000).drop("held_out")
    frame = frame.repartition(4, "id") if shuffled else frame

    def split(seed: int) -> Any:
        clear_training_cache()
        train, val = read(store, frame, validation=0.25, random_seed=seed)
        assert sorted([*train["id"], *val["id"]]) == list(range(1000))
        return sorted(val["id"])

    assert split(1) == split(1)
    assert split(1) != split(2)


def test_a_split_does_not_depend_on_the_row_order_of_a_shuffle(spark: Any, store: Any) -> None:
    # The same rows in the same partitions, read in another order.
    ids = np.arange(600)
    splits = []
    for order in (ids, ids[::-1]):
        rows = pd.DataFrame({"id": order, "part": order % 3})
        frame = spark.createDataFrame(rows).repartition(3, "part").drop("part")
        _, val = read(store, frame.withColumn("x", F.col("id") * 1.0), validation=0.25)
        splits.append(sorted(val["id"]))
    assert splits[0] == splits[1]


@pytest.mark.parametrize("validation", [None, 0.2])
def test_each_row_is_computed_once(spark: Any, store: Any, validation: Any) -> None:
    context = spark.sparkContext
    computed = context.accumulator(0)

    def compute(number: int) -> tuple[int, float]:
        computed.add(1)
        return number, number / 2

    rows = context.parallelize(range(200), 3).map(compute)
    index_of(store, spark.createDataFrame(rows, "id long, x double"), validation=validation)

    assert computed.value == 200


@pytest.mark.parametrize(
    ("param", "value"), [("sample_weight_col", "w"), ("feature_cols", ["w"]), ("label_cols", ["w"])]
)
def test_columns_that_were_not_prepared_are_errors(
    spark: Any, store: Any, param: str, value: Any
) -> None:
    frame = spark.range(8).selectExpr("id / 8 AS x", "id / 4 AS y", "1.0D AS w")
    with prepare_data(1, store, frame, ["y"], ["x"]) as index:
        estimator = line_estimator(store, **{param: value})
        message = f"{param}: The prepared dataset '{index}' has no column 'w'; its columns are"
        with pytest.raises(ColumnError, match=message):
            estimator.fit_on_parquet(dataset_idx=index)


# Row order.


def stored_order(frame: Any, store: Any, **options: Any) -> list[list[int]]:
    """Return the column ``id`` of each training file, in stored order."""
    frame = frame.withColumn("x", F.lit(1))
    # Few rows are written to one file per rank.
    with prepare_data(3, store, frame, ["id"], **options) as index:
        manifest = load_manifest(store, index)
        assert manifest.shuffled == options.get("shuffle_on_write", True)
        files = dict.fromkeys(group.file for group in manifest.train.row_groups)
        return [parquet.read_table(file)["id"].to_pylist() for file in files]


def assert_random(order: list[int]) -> None:
    """Compare the order of numbered rows with chance, by rank correlation and ascending pairs."""
    rows = len(order)
    ranks = np.argsort(np.argsort(order))
    assert abs(np.corrcoef(ranks, np.arange(rows))[0, 1]) < 5 / np.sqrt(rows - 1)
    # Half of all neighbours ascend, with a standard deviation of sqrt((rows + 1) / 12).
    assert abs((np.diff(ranks) > 0).sum() - (rows - 1) / 2) < 5 * np.sqrt((rows + 1) / 12)


@pytest.mark.parametrize("keeps_order", [True, False])
def test_the_seed_determines_a_random_row_order(spark: Any, store: Any, keeps_order: bool) -> None:
    rows = 3000
    # A thousand rows with the same number must not stay together, either.
    frame = spark.range(0, rows, 1, 4).select("id", F.floor(F.col("id") / 1000).alias("same"))
    if not keeps_order:
        frame = frame.repartition(4, "id")

    first = stored_order(frame, store, random_seed=1)
    if not keeps_order:
        clear_training_cache()
    again = stored_order(frame.filter(F.lit(True)), store, random_seed=1)
    other = stored_order(frame, store, random_seed=2)

    assert first == again
    assert first != other
    order = [row for file in first for row in file]
    assert sorted(order) == list(range(rows))
    assert_random(order)
    # Each file is a sample of all rows.
    assert len(first) == 3
    for file in first:
        assert_random(file)
        thousands = np.bincount(np.array(file) // 1000, minlength=3)
        assert (np.abs(thousands - len(file) / 3) < 5 * np.sqrt(len(file) * 2 / 9)).all()


def test_both_sides_of_a_split_are_in_random_order(spark: Any, store: Any) -> None:
    frame = spark.range(0, 4000, 1, 3).withColumn("held_out", F.col("id") % 4 == 0)
    sides: list[Any] = []

    sides += read(store, frame.withColumn("x", F.lit(1)), validation="held_out")

    train, held_out = (side["id"].tolist() for side in sides)
    assert sorted(held_out) == list(range(0, 4000, 4))
    assert len(train) == 3000
    assert_random(train)
    assert_random(held_out)


def test_equal_rows_do_not_stay_together(spark: Any, store: Any) -> None:
    """Draw a row's place instead of deriving it from its content, even if all columns are equal."""
    frame = spark.range(0, 2000, 1, 2).select(F.floor(F.col("id") / 200).alias("id"))

    files = stored_order(frame.repartition(2), store)

    assert len(files) == 3
    changes = sum(int((np.diff(file) != 0).sum()) for file in files)
    # Of 1997 neighbours, 9 of 10 differ in random order, but only 9 in all in sorted order.
    assert abs(changes - 0.9 * 1997) < 5 * np.sqrt(1997 * 0.09)


def test_shuffle_on_write_false_keeps_the_order(spark: Any, store: Any) -> None:
    frame = spark.range(0, 300, 1, 2)

    order = stored_order(frame, store, shuffle_on_write=False)
    assert [row for file in order for row in file] == list(range(300))
    # The shuffled rows are a separate dataset.
    assert stored_order(frame, store) != order


@pytest.mark.parametrize("validation", [None, 0.25, "held_out"])
def test_sorted_and_cached_rows_keep_their_order(spark: Any, store: Any, validation: Any) -> None:
    # Cached partitions have locations, by which Spark would join them in another order.
    frame = (
        spark.range(0, 2000, 1, 3)
        .withColumn("held_out", F.col("id") % 3 == 0)
        .repartitionByRange(40, "id")
        .sortWithinPartitions("id")
        .cache()
    )
    assert frame.count() == 2000
    options = {"partitions_per_process": 2, "shuffle_on_write": False, "validation": validation}
    ids = [side["id"].tolist() for side in read(store, frame.withColumn("x", F.lit(1)), **options)]
    frame.unpersist()
    assert all(side == sorted(side) for side in ids)
    assert sorted(row for side in ids for row in side) == list(range(2000))
    if validation == 0.25:
        assert 400 < len(ids[1]) < 600


@pytest.mark.parametrize("options", [{}, {"shuffle_on_write": False}, {"validation": "held_out"}])
def test_the_manifest_tells_other_rows_and_another_order(
    spark: Any, store: Any, options: Any
) -> None:
    """The order of a part without a shuffle, or by random keys, depends on the partitions."""

    def checksums(frame: Any) -> tuple[Any, Any]:
        with prepare_data(1, store, frame, ["id"], **options) as index:
            manifest = load_manifest(store, index)
            return manifest.content, manifest.row_order

    frame = numbers(spark)
    content, order = checksums(frame)
    assert checksums(frame) == (content, order)
    other_content, other_order = checksums(numbers(spark, partitions=2))
    assert other_content == content
    assert other_order != order
    assert checksums(frame.where("id != 7"))[0] != content


def test_rows_of_a_database_have_no_order(spark: Any, tmp_path: Path) -> None:
    frame, url = numbers(spark), f"jdbc:derby:{tmp_path}/rows;create=true"
    frame.select("id", "x").write.jdbc(url, "numbers")
    found = spark.read.jdbc(url, "numbers")
    assert not _keeps_order(_analyzed_plan(found))
    assert found.count() == frame.count()
    frame.write.parquet(str(tmp_path / "files"))
    assert _keeps_order(_analyzed_plan(spark.read.parquet(str(tmp_path / "files"))))
