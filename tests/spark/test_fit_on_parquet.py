"""Training on Parquet files that Spark wrote without `prepare_data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from estimators import sum_estimator
from pyarrow import parquet
from pyspark.sql import functions as F

from hvd_estimators import Store
from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.exceptions import StoreError

pytestmark = pytest.mark.spark


def make_frame(spark: Any, rows: int = 60) -> Any:
    """Return rows of y = x + 2 day, where day is 0, 1 or 2."""
    return (
        spark.range(rows)
        .select(
            F.col("id"),
            (F.col("id") % 3).cast("int").alias("day"),
            ((F.col("id") * 37 % 101) / 101).alias("x"),
        )
        .withColumn("y", F.col("x") + 2 * F.col("day"))
    )


def test_a_model_is_trained_on_a_partition_column(spark: Any, tmp_path: Path) -> None:
    frame = make_frame(spark)
    for part in ("train", "val"):
        frame.write.partitionBy("day").parquet(str(tmp_path / part))
    store = Store.create(
        str(tmp_path / "store"), train_path=str(tmp_path / "train"), val_path=str(tmp_path / "val")
    )
    # Batches of 30 on 2 ranks: one step on all rows.
    estimator = sum_estimator(store, batch_size=30, validation=True)

    other = {"store": str(tmp_path / "other"), "validation": None}
    models = [
        estimator.fit_on_parquet(),
        estimator.copy(other).fit_on_parquet(
            tmp_path / "train", validation_path=[f"file://{tmp_path}/val"]
        ),
        estimator.copy({"validation": frame.where("id % 2 = 0")}).fit(frame),
    ]

    rows = np.array(frame.select("x", "day", "y").collect())
    inputs, labels = rows[:, :2], rows[:, 2]
    # One step from zero along the gradient of the mean squared error.
    # The learning rate is multiplied by the number of ranks.
    expected = 0.1 * 2 * (labels[:, None] * inputs).mean(axis=0)
    errors = (inputs @ expected - labels) ** 2
    held_out = np.array(frame.select("id").collect()).ravel() % 2 == 0
    losses = [errors.mean(), errors.mean(), errors[held_out].mean()]
    for model, loss in zip(models, losses, strict=True):
        weights = model.getModel().weights.detach().numpy()
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        np.testing.assert_allclose(model.getHistory()[0]["validation"]["loss"], loss, rtol=1e-5)


@pytest.mark.parametrize("legacy", ["true", "false"])
def test_lists_and_decimals_in_both_of_sparks_formats(
    spark: Any, store: Any, tmp_path: Path, legacy: str
) -> None:
    """Read the legacy format too, with two-level lists and other names for their elements."""
    frame = make_frame(spark, 9).select(
        "id",
        F.array("id", F.col("id") + 1).alias("pair"),
        F.array(F.array("id"), F.array(F.col("id") + 1)).alias("column"),
        F.array(F.when(F.col("id") >= 0, F.array("id", "id"))).alias("outer"),
        F.array(F.when(F.col("id") >= 0, F.col("id"))).alias("nullable"),
        F.array(F.col("x").cast("decimal(9, 4)")).alias("money"),
        F.struct("x", F.array("y")).alias("beside"),
        (F.col("id") % 2 == 0).alias("even"),
        F.col("id").cast("byte").alias("byte"),
    )
    spark.conf.set("spark.sql.parquet.writeLegacyFormat", legacy)
    try:
        frame.write.parquet(str(tmp_path / "data"))
    finally:
        spark.conf.unset("spark.sql.parquet.writeLegacyFormat")
    names = [name for name in frame.columns if name != "beside"]

    manifest = read_manifest(store, str(tmp_path / "data"), None, names)

    parts = [
        table_to_columns(
            parquet.ParquetFile(group.file).read_row_group(group.index), manifest.columns
        )
        for group in manifest.train.row_groups
    ]
    found = {name: np.concatenate([part[name] for part in parts]) for name in names}
    order = np.argsort(found["id"])
    expected = frame.orderBy("id").collect()
    for name in names:
        values = np.array([row[name] for row in expected])
        np.testing.assert_array_equal(found[name][order], values.astype(found[name].dtype))
    dtypes = {name: str(array.dtype) for name, array in found.items()}
    assert (dtypes["money"], dtypes["even"], dtypes["byte"]) == ("float64", "bool", "int8")


def test_a_warning_reports_unused_files_at_val_path(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "val").mkdir()
    store = Store.create(
        str(tmp_path / "store"), train_path=str(tmp_path / "train"), val_path=str(tmp_path / "val")
    )
    estimator = sum_estimator(store)
    validating = estimator.copy({estimator.validation: True})
    for tried, told in ((estimator, 1), (validating, 0)):
        caplog.clear()
        with pytest.raises(StoreError):  # there is nothing to train on
            tried.fit_on_parquet()
        found = [record for record in caplog.records if "validation is not set" in record.message]
        assert len(found) == told
