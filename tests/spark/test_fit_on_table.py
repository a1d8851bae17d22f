"""Training on the files of tables, without a copy."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from estimators import sum_estimator
from foreign import read
from iceberg_tables import append, create
from pyiceberg import types as iceberg
from pyspark.sql import functions as F

from hvd_estimators import Store
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.exceptions import ColumnError, DataError, ParamError, StoreError
from hvd_estimators.fitting.stores import find_tables
from hvd_estimators.loading.readers import DataModule

pytestmark = pytest.mark.spark

ROWS = 60


@pytest.fixture
def tables(spark: Any, tmp_path: Path) -> Iterator[Path]:
    """Use a database in the test's folder, and return its folder."""
    folder = tmp_path / "tables"
    spark.sql(f"create database house location '{folder}'")
    spark.sql("use house")
    yield folder
    spark.sql("use default")
    spark.sql("drop database house cascade")


def make_frame(spark: Any) -> Any:
    """Return rows of y = x + 2 day, where day is 0, 1 or 2; few partitions have all names."""
    row = F.col("id")
    names = F.array(*map(F.lit, ["a b", "c/d", "50%", "é=:", "%41", None]))
    return (
        spark.range(ROWS)
        .select(
            ((row * 37 % 101) / 101).alias("x"),
            (row % 3).cast("int").alias("day"),
            names[(row % 6).cast("int")].alias("name"),
            F.date_add(F.lit("2024-01-01").cast("date"), (row % 2).cast("int")).alias("date"),
        )
        .withColumn("y", F.col("x") + 2 * F.col("day"))
    )


def make_estimator(store: Any, **params: Any) -> Any:
    return sum_estimator(store, batch_size=ROWS, **params)  # one step on all rows


def step(rows: Any) -> Any:
    """Return the weights after one step from zero on rows of x, day and y."""
    # The learning rate is multiplied by the number of ranks.
    return 0.1 * 2 * (rows[:, 2:] * rows[:, :2]).mean(axis=0)


def weights(model: Any) -> Any:
    return model.getModel().weights.detach().numpy()


def collect(frame: Any) -> Any:
    return np.array(frame.select("x", "day", "y").collect())


def load(store: Any, table: str, where: Any, *names: str, allow_text: bool = False) -> Any:
    """Return the columns of a table's files as a rank reads them."""
    files = find_tables(store, table, where, None, names, allow_text)
    manifest = read_manifest(files.store, files.train, None, names, allow_text=allow_text)
    return read(manifest.train, manifest.columns)


def test_a_table_with_odd_partitions_trains_as_its_dataframe(
    spark: Any, store: Any, tables: Path
) -> None:
    frame = make_frame(spark)
    frame.write.partitionBy("day", "name", "date").saveAsTable("house.rows")
    estimator = make_estimator(store)

    model = estimator.fit_on_table("house.rows")

    np.testing.assert_allclose(weights(model), step(collect(frame)), rtol=1e-5)
    np.testing.assert_allclose(weights(model), weights(estimator.fit(frame)), rtol=1e-5)
    predicted = {row["prediction"] for row in model.transform(spark.table("rows")).collect()}
    assert len(predicted) == len({(x, day) for x, day, _ in collect(frame)})


def test_where_and_validation_where_choose_partitions(spark: Any, store: Any, tables: Path) -> None:
    frame = make_frame(spark)
    frame.write.partitionBy("day", "name", "date").saveAsTable("rows")
    chosen = "name is null or (name = '50%' and date > '2023-12-31')"
    estimator = make_estimator(store)

    models = [
        estimator.fit_on_table("rows", chosen, validation_where=F.col("name") == "c/d"),
        # The rest of the rows, also those with a null in the condition.
        estimator.fit_on_table("rows", validation_where="name = 'c/d'"),
        estimator.fit_on_table("rows", params={estimator.epochs: 2}),
    ]

    held_out = collect(frame.where("name = 'c/d'"))
    trained = [frame.where(chosen), frame.where("name is null or name != 'c/d'"), frame]
    for model, rows in zip(models[:2], trained, strict=False):
        expected = step(collect(rows))
        np.testing.assert_allclose(weights(model), expected, rtol=1e-5)
        loss = ((held_out[:, :2] @ expected - held_out[:, 2]) ** 2).mean()
        np.testing.assert_allclose(model.getHistory()[0]["validation"]["loss"], loss, rtol=1e-5)
    assert len(models[2].getHistory()) == 2
    assert "validation" not in models[2].getHistory()[0]


def test_partition_values_have_the_types_of_the_table(spark: Any, store: Any, tables: Path) -> None:
    types = {
        **{"byte": "tinyint", "long": "bigint", "flag": "boolean", "single": "float"},
        **{"double": "double", "money": "decimal(9,2)", "whole": "decimal(9,0)", "word": "string"},
    }
    values = [
        (-5, 2**62, True, 0.1, 1e300, Decimal("1.10"), Decimal(7), "a b"),
        (6, -3, False, -2.5, float("-inf"), Decimal("-0.05"), Decimal(-8), "05"),
        (7, 0, True, float("nan"), 0.25, Decimal(3), Decimal(0), "c/d=%"),
    ]
    schema = ", ".join(f"{name} {kind}" for name, kind in {"x": "int", **types}.items())
    frame = spark.createDataFrame([(x, *row) for x, row in enumerate(values)], schema)
    frame.write.partitionBy(*types).saveAsTable("typed")

    found = load(store, "typed", None, "x", *types, allow_text=True)

    order = np.argsort(found["x"])
    dtypes = ["int8", "int64", "bool", "float32", "float64", "float64", "int64", "object"]
    for name, dtype, column in zip(types, dtypes, zip(*values, strict=True), strict=True):
        expected = np.array([float(v) if isinstance(v, Decimal) else v for v in column])
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name][order], expected.astype(dtype))


def test_removed_partitions_and_foreign_files_are_not_read(
    spark: Any, store: Any, tables: Path
) -> None:
    """The catalog lists the partitions, not the folder."""
    frame = make_frame(spark)
    folder = tables.parent / "external"
    frame.write.partitionBy("day").option("path", str(folder)).saveAsTable("rows")
    spark.sql("alter table rows drop partition (day=1)")
    shutil.copytree(folder / "day=2", folder / "day=3")
    assert (folder / "day=1").exists()

    found = load(store, "rows", None, "x", "day")

    expected = np.sort(collect(frame.where("day != 1"))[:, 0])
    np.testing.assert_array_equal(np.sort(found["x"]), expected)
    assert set(found["day"]) == {0, 2}


def test_a_partition_in_another_folder_needs_its_value_in_the_path(
    spark: Any, store: Any, tables: Path
) -> None:
    frame = make_frame(spark)
    frame.where("day = 0").write.partitionBy("day").saveAsTable("rows")
    for folder in ("elsewhere", "day=2"):
        path = tables.parent / folder
        frame.where("day = 1").drop("day").select("x", "name", "date", "y").coalesce(
            1
        ).write.parquet(str(path))
        spark.sql(f"alter table rows add partition (day=1) location '{path}'")

        np.testing.assert_array_equal(
            np.sort(load(store, "rows", None, "x")["x"]),
            np.sort(collect(frame.where("day < 2"))[:, 0]),
        )
        files = find_tables(store, "rows", None, None, ["x"], False).train
        # Folders above these may be large.
        assert set(files.roots) == {str(tables / "rows" / "day=0"), str(path)}
        with pytest.raises(StoreError, match=r"partition value day=1 in .*path does not tell"):
            load(store, "rows", None, "x", "day")
        spark.sql("alter table rows drop partition (day=1)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nowhere",),
            r"table: expected .*, found 'nowhere', and Spark says: \[TABLE_OR_VIEW_NOT_",
        ),
        (("not a name",), r"table: expected .*, found 'not a name', and Spark says: \[PARSE"),
        ((7,), "table: expected the name of a table, found 7"),
        (("computed",), r"'computed' is a view.*fit\(spark.table\('computed'\)\)"),
        (("temporary",), "'temporary' is a view"),
        (("texts",), r"'texts' has the format csv\. Train on its DataFrame"),
        (("rows", "day = 9"), "where: found 'day = 9', by which the table rows has no rows"),
        (("rows", "height > 2"), "where: Spark cannot choose rows of rows with 'height > 2'"),
        (("rows", 3), "where: expected a condition in SQL"),
        (("rows", "day < 2", "day = 1"), "validation_where: found 'day = 1', which chooses files"),
        (("rows", None, "day >= 0"), "validation_where: found 'day >= 0', which chooses files"),
    ],
)
def test_wrong_calls_say_what_to_do(
    spark: Any, store: Any, tables: Path, arguments: tuple[Any, ...], message: str
) -> None:
    frame = make_frame(spark)
    frame.write.partitionBy("day").saveAsTable("rows")
    frame.select("x").write.format("csv").saveAsTable("texts")
    frame.createOrReplaceTempView("temporary")
    spark.sql("create view computed as select x, day, x + 1 as y from rows")
    table, where, validation_where = (*arguments, None, None)[:3]
    with pytest.raises(ParamError, match=message):
        make_estimator(store).fit_on_table(table, where, validation_where=validation_where)
    assert not os.path.exists(store.prefix_path)


def set_provider(spark: Any, table: str, provider: str) -> None:
    """Change the format of a table in Spark's catalog to one that this Spark lacks."""
    state = spark._jsparkSession.sessionState()
    found = state.catalog().getTableMetadata(state.sqlParser().parseTableIdentifier(table))
    fields = [getattr(found, f"copy$default${i + 1}")() for i in range(found.productArity())]
    position = [str(field) for field in fields].index("Some(parquet)")
    fields[position] = spark._jvm.scala.Some(provider)
    state.catalog().alterTable(found.copy(*fields))


def test_a_table_that_spark_lacks_a_connector_for_is_an_error(
    spark: Any, store: Any, tables: Path
) -> None:
    make_frame(spark).write.saveAsTable("rows")
    set_provider(spark, "rows", "delta")
    with pytest.raises(ParamError, match="delta") as error:
        make_estimator(store).fit_on_table("rows")
    assert "delta.`path`" in str(error.value) or "fit(spark.table('rows'))" in str(error.value)


def test_wrong_params_say_what_to_do(spark: Any, store: Any, tables: Path) -> None:
    make_frame(spark).write.partitionBy("day", "name").saveAsTable("rows")
    estimator = make_estimator(store)
    with pytest.raises(ParamError, match="params: expected a dict"):
        estimator.fit_on_table("rows", params=3)
    with pytest.raises(ParamError, match=r"validation: found 0\.2.*by validation_where"):
        estimator.copy({"validation": 0.2}).fit_on_table("rows")
    with pytest.raises(ParamError, match="data_module: Folders reads whole folders"):
        estimator.copy({"data_module": Folders}).fit_on_table("rows")
    with pytest.raises(ColumnError, match=r"Column 'name' has type string.*StringIndexer"):
        estimator.copy({"feature_cols": ["x", "name"]}).fit_on_table("rows")
    with pytest.raises(ColumnError, match="no column 'height'"):
        estimator.copy({"feature_cols": ["x", "height"]}).fit_on_table("rows")


class Folders(DataModule):
    """A reader that finds its own files."""


def test_a_part_of_a_file_cannot_be_chosen(spark: Any, store: Any, tables: Path) -> None:
    make_frame(spark).coalesce(1).write.partitionBy("day").saveAsTable("rows")
    with pytest.raises(
        DataError, match=r"shows \d+ of the 20 rows .* choose only whole files"
    ) as e:
        make_estimator(store).fit_on_table("rows", "day < 2 and x < 0.5")
    assert "fit(spark.table('rows').where('day < 2 and x < 0.5'))" in str(e.value)
    # This condition is on another column, but chooses whole files.
    whole = load(store, "rows", "y - x > 1", "x", "day")
    assert set(whole["day"]) == {1, 2}


def test_a_delta_table_is_read_where_spark_lacks_delta(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    table = tmp_path / "a table"
    frame = make_frame(spark).drop("name")
    write_deltalake(table, pa.Table.from_pandas(frame.toPandas()), partition_by=["day", "date"])
    removed = pa.table(
        {
            "x": [9.0],
            "day": pa.array([7], pa.int32()),
            "date": [datetime.date(2024, 1, 1)],
            "y": [9.0],
        }
    )
    write_deltalake(table, removed, mode="append")
    write_deltalake(table, removed.slice(0, 0), mode="overwrite", predicate="day = 7")
    estimator, name = make_estimator(store), f"delta.`{table}`"

    model = estimator.fit_on_table(name)
    some = load(store, name, "day < 2 and date = date'2024-01-02'", "x", "day")

    np.testing.assert_allclose(weights(model), step(collect(frame)), rtol=1e-5)
    expected = collect(frame.where("day < 2 and date = '2024-01-02'"))[:, :2]
    assert sorted(zip(some["x"], some["day"], strict=True)) == sorted(map(tuple, expected))
    assert some["day"].dtype == "int32"
    with pytest.raises(ParamError, match=r"where: Spark cannot choose rows of .* by its partition"):
        estimator.fit_on_table(name, "x < 0.5")


def iceberg_table(folder: Path, frame: Any) -> Any:
    """Write a table that is partitioned by day and date, and that has removed a file."""
    table = create(
        folder,
        by=["day", "date"],
        x=iceberg.DoubleType(),
        day=iceberg.IntegerType(),
        date=iceberg.DateType(),
        y=iceberg.DoubleType(),
    )
    rows = frame.select("x", "day", "date", "y").toPandas()
    removed = [append(table, pa.Table.from_pandas(rows, preserve_index=False), [9, 0])]
    for (day, date), part in rows.groupby(["day", "date"]):
        days = (date - datetime.date(1970, 1, 1)).days
        part = pa.Table.from_pandas(part, preserve_index=False)
        append(table, part, [day, days], removed=removed)
        removed = []
    return table


@pytest.mark.versions
def test_an_iceberg_table_is_read_by_its_metadata(spark: Any, store: Any, tmp_path: Path) -> None:
    frame = make_frame(spark)
    iceberg_table(tmp_path / "a table", frame)
    estimator, name = make_estimator(store), f"iceberg.`{tmp_path}/a table`"

    model = estimator.fit_on_table(name, validation_where="day = 2")
    some = load(store, name, "day < 2 and date = date'2024-01-02'", "x", "day")

    rows = collect(frame.where("day < 2"))
    np.testing.assert_allclose(weights(model), step(rows), rtol=1e-5)
    held_out = collect(frame.where("day = 2"))
    loss = ((held_out[:, :2] @ weights(model) - held_out[:, 2]) ** 2).mean()
    np.testing.assert_allclose(model.getHistory()[0]["validation"]["loss"], loss, rtol=1e-5)
    expected = collect(frame.where("day < 2 and date = '2024-01-02'"))[:, :2]
    assert sorted(zip(some["x"], some["day"], strict=True)) == sorted(map(tuple, expected))
    with pytest.raises(
        ParamError, match=r"where: .* partition columns \(day, date\), with 'x < 1'.*fit\(spark"
    ):
        estimator.fit_on_table(name, "x < 1")
    with pytest.raises(ParamError, match=r"found 'day = 9', by which the table .* no rows"):
        estimator.fit_on_table(name, "day = 9")


@pytest.mark.once  # newer versions of Spark do not describe a table whose connector they lack
def test_the_catalogs_snapshot_of_an_iceberg_table_is_read(
    spark: Any, store: Any, tables: Path
) -> None:
    frame = make_frame(spark)
    folder = tables.parent / "an external table"
    frame.write.option("path", str(folder)).saveAsTable("rows")
    shutil.rmtree(folder)
    table = iceberg_table(folder, frame)
    set_provider(spark, "rows", "iceberg")
    snapshot = table.current_snapshot().snapshot_id
    # The newest metadata may not have been committed.
    removed = table.scan("day = 1").plan_files()
    removed = [task.file.file_path.removeprefix("file://") for task in removed]
    day_1 = {"x": [7.0], "day": pa.array([3], pa.int32()), "date": [datetime.date(2024, 1, 1)]}
    append(table, pa.table({**day_1, "y": [7.0]}), [3, 19723], removed=removed)

    assert set(load(store, "rows", None, "day")["day"]) == {0, 2, 3}
    spark.sql(f"alter table rows set tblproperties ('current-snapshot-id'='{snapshot}')")
    model = make_estimator(store).fit_on_table("rows")
    np.testing.assert_allclose(weights(model), step(collect(frame)), rtol=1e-5)
    spark.sql("alter table rows set tblproperties ('current-snapshot-id'='1')")
    with pytest.raises(StoreError, match=r"lacks the current snapshot, 1\..*spark.table\('rows'\)"):
        load(store, "rows", None, "day")


@pytest.mark.skipif(
    tuple(map(int, pa.__version__.split(".")[:2])) < (17, 0),
    reason="pyiceberg writes by PyArrow 17",
)
def test_a_table_that_pyiceberg_wrote_is_read(spark: Any, store: Any, tmp_path: Path) -> None:
    """Whole files and single rows are deleted, which writes files again."""
    frame = make_frame(spark)
    table = create(
        tmp_path / "table",
        by=["day", "name"],
        x=iceberg.DoubleType(),
        day=iceberg.IntegerType(),
        name=iceberg.StringType(),
        y=iceberg.DoubleType(),
    )
    rows = frame.select("x", "day", "name", "y").toPandas()
    table.append(pa.Table.from_pandas(rows, schema=table.schema().as_arrow()))
    table.append(pa.Table.from_pandas(rows[:30], schema=table.schema().as_arrow()))
    table.delete("day = 1")
    table.delete("x > 0.4 and name = '50%'")
    expected = table.scan().to_pandas()
    # Some rows of a file are left.
    assert 0 < (expected.name == "50%").sum() < 20

    model = make_estimator(store).fit_on_table(f"iceberg.`{tmp_path}/table`")
    same = make_estimator(store).fit_on_parquet(str(tmp_path / "table"))

    rows = expected[["x", "day", "y"]].to_numpy()
    for each in (model, same):
        np.testing.assert_allclose(weights(each), step(rows), rtol=1e-5)
    some = load(store, f"iceberg.`{tmp_path}/table`", "name is null or name = '50%'", "x")
    chosen = expected[expected.name.isna() | (expected.name == "50%")]
    np.testing.assert_array_equal(np.sort(some["x"]), np.sort(chosen.x))


@pytest.mark.once
def test_a_table_on_s3_is_read_by_the_stores_keys(spark: Any, s3a: Any, tables: Path) -> None:
    frame = make_frame(spark)
    folder = s3a.url.replace("s3:", "s3a:") + "/a table"
    frame.write.partitionBy("day", "name").option("path", folder).saveAsTable("rows")
    store = Store.create(f"{s3a.url}/store", storage_options=s3a.storage_options)

    model = make_estimator(store).fit_on_table("rows", "name is not null")

    expected = step(collect(frame.where("name is not null")))
    np.testing.assert_allclose(weights(model), expected, rtol=1e-5)
