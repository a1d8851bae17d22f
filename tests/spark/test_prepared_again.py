"""Sharing, listing and clearing of prepared datasets."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from backends import InProcessBackend
from estimators import line_estimator
from preparing import index_of, numbers
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from hvd_estimators import (
    Store,
    clear_prepared_data,
    clear_training_cache,
    list_prepared_data,
    prepare_data,
)
from hvd_estimators.prepare import dataframe as prepare

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.usefixtures("cleared_cache")]


@pytest.mark.parametrize("same", [True, False])
def test_each_call_writes_rows_and_deletes_them(spark: Any, store: Any, same: bool) -> None:
    frame = numbers(spark)
    first = index_of(store, frame)
    assert index_of(store, frame if same else numbers(spark)) != first
    assert list(Path(store.prefix_path).iterdir()) == []


def test_grid_fits_share_datasets_with_equal_columns_and_options(
    spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    real_write = prepare.write_dataset

    def write(store: Any, index: str, *args: Any, **kwargs: Any) -> Any:
        written.append(index)
        return real_write(store, index, *args, **kwargs)

    monkeypatch.setattr(prepare, "write_dataset", write)
    frame = numbers(spark).select("x", F.col("x").alias("x2"), F.col("id").alias("y"))
    estimator = line_estimator(store, num_proc=None, backend=InProcessBackend())
    points = [
        {estimator.epochs: 1},
        {estimator.epochs: 2},
        {estimator.feature_cols: ["x2"]},
        {estimator.validation: 0.25},
        {estimator.batch_size: 8, estimator.feature_cols: ["x2"]},
    ]
    models = estimator.fit(frame, points)
    assert [len(model.getHistory()) for model in models] == [1, 2, 1, 1, 1]
    assert len(written) == 3
    assert list_prepared_data(store) == []
    assert not [path for path in Path(store.prefix_path).iterdir() if "data." in path.name]


def test_datasets_are_listed_and_cleared(spark: Any, store: Any) -> None:
    frame = numbers(spark).withColumn("v", array_to_vector(F.array("x", "x")))
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=2)
    with prepare_data(
        1, store, frame, ["id"], ["v"], validation="held_out", compress_sparse=True
    ) as index:
        (dataset,) = list_prepared_data(store)
        files = Path(store.prefix_path).rglob("*")
        sizes = [f.stat().st_size for f in files if f.is_file() and f.suffix != ".owner"]
        assert clear_prepared_data(store) == []
    assert (dataset.index, dataset.rows, dataset.validation_rows) == (index, 160, 40)
    assert dataset.columns == ("v", "id")
    assert dataset.num_bytes == sum(sizes)
    assert before < dataset.created < datetime.datetime.now(datetime.UTC)
    assert clear_prepared_data(store) == []
    assert list(Path(store.prefix_path).iterdir()) == []


def test_unfinished_datasets_are_not_listed(
    spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(*args: Any) -> str:
        # The owner's file comes first. The manifest comes last, when the files exist.
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
