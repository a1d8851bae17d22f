"""A CSV file with text labels to a row that is served without Spark, as a user would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import Bucketizer, IndexToString, StringIndexer, VectorAssembler

from hvd_estimators.torch import TorchEstimator, load_predictor

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.integration]

COLUMNS = ["Height (m)", "side of hill", "Tree Kind"]
TREES = [("9.1", "North", "walnut"), ("4.2", "south", "Ash"), ("6.5", "North", "Ash")]


@pytest.mark.soak
def test_a_row_of_a_csv_file_is_served(spark: Any, backend: Any, tmp_path: Path) -> None:
    lines = [",".join(row) for row in [COLUMNS, *TREES * 40, TREES[1]]]
    (tmp_path / "trees.csv").write_text("\n".join(lines))

    trees = spark.read.csv(str(tmp_path / "trees.csv"), header=True, inferSchema=True)
    kinds = StringIndexer(inputCol="Tree Kind", outputCol="label").fit(trees)
    net = torch.nn.Linear(3, 2)
    stages = [
        StringIndexer(inputCol="side of hill", outputCol="side"),
        Bucketizer(inputCol="Height (m)", outputCol="size", splits=[0, 5, 8, float("inf")]),
        kinds,
        VectorAssembler(inputCols=["Height (m)", "side", "size"], outputCol="features"),
        TorchEstimator(
            backend=backend,
            store=str(tmp_path / "store"),
            model=net,
            optimizer=torch.optim.Adam(net.parameters(), lr=0.1),
            loss=torch.nn.functional.cross_entropy,
            column_dtypes={"label": "int64"},
            outputs_are="logits",
            predictionCol="prediction",
            probabilityCol="probability",
            feature_cols=["features"],
            label_cols=["label"],
            batch_size=8,
            epochs=25,
            random_seed=1,
            verbose=0,
        ),
        IndexToString(inputCol="prediction", outputCol="kind", labels=kinds.labels),
    ]
    fitted = Pipeline(stages=stages).fit(trees)
    fitted.write().overwrite().save(str(tmp_path / "model"))

    predictor = load_predictor(str(tmp_path / "model"))
    served = predictor.predict({"Height (m)": 9.1, "side of hill": "North"})
    assert served["kind"] == "walnut"
    assert (served["side"], served["size"], served["prediction"]) == (0.0, 2.0, 1.0)
    # The label is neither needed nor read, and each column is that of transform().
    assert predictor.feature_columns == ("side of hill", "Height (m)")
    rows = [dict(zip(COLUMNS[:2], (float(h), side), strict=True)) for h, side, _ in TREES]
    assert [row["kind"] for row in predictor.predict(rows)] == ["walnut", "Ash", "Ash"]
    unlabeled = spark.createDataFrame(rows).coalesce(1)
    expected = fitted.transform(unlabeled).toPandas()
    made = predictor.predict(pd.DataFrame(rows))
    assert list(made.columns) == [name for name in expected.columns if name not in COLUMNS]
    for name in made.columns:
        wanted = [getattr(value, "toArray", lambda v=value: v)() for value in expected[name]]
        np.testing.assert_array_equal(np.array(made[name].tolist()), np.array(wanted), name)
