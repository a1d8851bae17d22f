"""Data sent to ranks, and their results: any size, and no files left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from estimators import line_estimator
from pyspark.sql import functions as F

from hvd_estimators import Store
from hvd_estimators.exceptions import ResultsError
from hvd_estimators.launch.spark_backend import SparkBackend

pytestmark = [pytest.mark.spark, pytest.mark.once]

WIDTH = 250_000


@pytest.fixture
def small_driver(spark: Any) -> Iterator[None]:
    """Limit the driver to collecting 1 MiB."""
    conf = spark.sparkContext._jsc.sc().conf()
    conf.set("spark.driver.maxResultSize", "1m")
    yield
    conf.remove("spark.driver.maxResultSize")


def temporary_files(spark: Any) -> set[Path]:
    """Return the files in this driver's temporary folder."""
    folder = Path(spark.sparkContext._temp_dir).parent
    return {path for path in folder.rglob("*") if path.is_file()}


class Wide(torch.nn.Module):
    """Half a million parameters, of which a row trains two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.Embedding(2 * WIDTH, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.weights(index.long()).sum(-1)


@pytest.mark.parametrize("save_runs", [True, False])
def test_models_larger_than_the_drivers_result_limit_are_trained(
    spark: Any, tmp_path: Path, small_driver: None, save_runs: bool
) -> None:
    store = Store.create(str(tmp_path / "store"), save_runs=save_runs)
    frame = spark.range(8).select(
        (F.col("id") * 60_000).cast("double").alias("x"), F.lit(1.0).alias("y")
    )
    net = Wide()
    estimator = line_estimator(
        store,
        model=net,
        num_proc=2,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        column_dtypes={"x": "float64"},
        scale_learning_rate=False,
        batch_size=4,
    )
    before = temporary_files(spark)

    trained = estimator.fit(frame).getModel()

    assert temporary_files(spark) <= before
    change = (trained.weights.weight - net.weights.weight).squeeze(1).detach()
    # Adam's first step is the learning rate, towards the label, for each parameter with a gradient.
    rows = torch.arange(8) * 60_000
    expected = torch.zeros(2 * WIDTH)
    expected[rows] = 0.01 * torch.sign(1.0 - net.weights.weight.detach()[rows, 0])
    torch.testing.assert_close(change, expected, atol=1e-6, rtol=1e-4)
    kept = {path.name for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert not any("state" in name or "call" in name for name in kept)
    assert ("checkpoint-000001.ckpt" in kept) == save_runs


def test_results_larger_than_the_drivers_limit_are_rejected(spark: Any, small_driver: None) -> None:
    backend = SparkBackend(2)

    assert list(map(len, backend.run(bytes, [300_000]))) == [300_000] * 2
    with pytest.raises(ResultsError, match=r"because they are too large\. Return less"):
        backend.run(os.urandom, [700_000])
