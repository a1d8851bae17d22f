"""Sharing, listing and clearing of prepared datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backends import InProcessBackend
from estimators import line_estimator
from preparing import index_of, numbers
from pyspark.sql import functions as F

from hvd_estimators import (
    list_prepared_data,
)
from hvd_estimators.prepare import dataframe as prepare

pytestmark = [
    pytest.mark.spark,
    pytest.mark.once,
    pytest.mark.usefixtures("cleared_cache"),
]


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
