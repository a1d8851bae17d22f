"""Further fits in one session, with the columns renamed, in another order, and of other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import line_estimator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from hvd_estimators.launch import LocalBackend

pytestmark = pytest.mark.spark

ROWS = 12


class Weighted(torch.nn.Module):
    """Weigh two arrays differently, so that their order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(2, 2))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ self.weights[0] + b @ self.weights[1]


def trained(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> Any:
    """Return the weights after one step on all rows, in closed form."""
    return [0.1 * 2 * (x * y[:, None]).mean(0) for x in (a, b)]


@pytest.mark.parametrize("source", ["frame", "files"])
def test_further_fits_read_their_own_columns(
    spark: Any, store: Any, tmp_path: Path, source: str
) -> None:
    i = F.col("id")
    a, b = F.array(i * 1.0, i % 3 * 1.0), F.array(i % 5 * 1.0, i % 2 * 0.5)
    y = (i % 7).cast("double")
    frame = spark.range(0, ROWS, 1, 1)
    frames = {
        "first": frame.select(a.alias("a"), b.alias("b"), y.alias("y")),
        "renamed": frame.select(a.alias("c"), b.alias("d"), y.alias("y")),
        "swapped names": frame.select(b.alias("b"), a.alias("a"), y.alias("y")),
        "another order": frame.select(y.alias("y"), a.alias("a"), b.alias("b")),
        "retyped": frame.select(
            a.cast("array<int>").alias("a"), b.cast("array<float>").alias("b"), y.alias("y")
        ),
        "vectors": frame.select(array_to_vector(a).alias("a"), b.alias("b"), y.alias("y")),
    }
    n = np.arange(ROWS)
    arrays = np.stack([n, n % 3], 1), np.stack([n % 5, n % 2 * 0.5], 1), n % 7
    expected = np.array(trained(*arrays))
    for kind, rows in frames.items():
        names = ["c", "d"] if kind == "renamed" else ["a", "b"]
        params = {"backend": LocalBackend(1), "feature_cols": names, "input_shapes": None}
        estimator = line_estimator(store, model=Weighted(), lr=0.1, batch_size=ROWS, **params)
        if source == "frame":
            model = estimator.fit(rows)
        elif kind != "vectors":  # files of vectors are not supported
            rows.write.parquet(str(tmp_path / kind))
            model = estimator.fit_on_parquet(tmp_path / kind)
        found = model.getModel().weights.detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=kind)


def test_a_fit_takes_the_session_of_its_rows(spark: Any, tmp_path: Path) -> None:
    own = spark.newSession()
    own.conf.set("spark.hvdEstimators.store", str(tmp_path / "own"))
    rows = own.range(ROWS).selectExpr("double(id) as x", "double(id) as y")
    # Makes the other session that of this thread.
    spark.createDataFrame([(1,)], ["a"])
    estimator = line_estimator(None, backend=LocalBackend(1), run_id="here")
    estimator.clear(estimator.store)
    estimator.fit(rows)
    assert (tmp_path / "own" / "runs" / "here").is_dir()
