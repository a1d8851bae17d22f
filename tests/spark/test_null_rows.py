"""Rows with nulls in transform(), by handleInvalid."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import types as T

from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark

NAN = float("nan")
SCHEMA = T.StructType(
    [
        T.StructField("id", T.IntegerType(), False),
        T.StructField("x", T.DoubleType()),
        T.StructField("n", T.LongType()),
        T.StructField("v", VectorUDT()),
        T.StructField("a", T.ArrayType(T.FloatType())),
        T.StructField("m", T.ArrayType(T.ArrayType(T.DoubleType()))),
    ]
)
V, A, M = Vectors.dense(1.0, 2.0), [3.0, 4.0], [[5.0], [6.0]]
ROWS = [
    (0, 1.0, 1, V, A, M),
    (1, None, 1, V, A, M),
    (2, 1.0, None, V, A, M),
    (3, 1.0, 1, None, A, M),
    (4, 1.0, 1, V, None, M),
    (5, 1.0, 1, V, A, None),
    (6, NAN, 1, V, A, M),
    (7, None, None, None, None, None),
    (8, 2.0, 2, Vectors.sparse(2, [1], [NAN]), [NAN, 1.0], [[NAN], [0.0]]),
]
WITH_NULLS = {1, 2, 3, 4, 5, 7}


class Together(torch.nn.Module):
    """Return a number, a vector and a matrix of all inputs, and log the number of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Any, n: Any, v: Any, a: Any, m: Any) -> Any:
        with self.path.open("a") as file:
            file.write(f"{len(x)}\n")
        return x + n, v + a, m[:, :, 0].unsqueeze(1) + a.unsqueeze(1)


def expected(row: Any) -> tuple[Any, Any, Any]:
    _, x, n, v, a, m = row
    array = np.array(a)
    return x + n, v.toArray() + array, (np.array(m)[:, 0] + array)[None]


@pytest.mark.parametrize("known_sizes", [True, False])
def test_null_rows_are_kept_skipped_or_rejected(
    spark: Any, tmp_path: Path, known_sizes: bool
) -> None:
    frame = spark.createDataFrame(ROWS, SCHEMA).repartition(2)
    path = tmp_path / "rows"
    model = TorchModel(
        model=Together(path),
        feature_columns=["x", "n", "v", "a", "m"],
        label_columns=["p", "q", "r"],
        output_shapes=[[], [2], [1, 2]],
        # Without known sizes, rows count as large and are sent with empty rows between them.
        **({"input_shapes": [[], [], [2], [2], [2, 1]]} if known_sizes else {}),
    )
    assert model.getHandleInvalid() == "keep"

    rows = {row["id"]: row for row in model.transform(frame).collect()}

    assert rows.keys() == {row[0] for row in ROWS}
    for given in ROWS:
        p, q, r = (rows[given[0]][f"{name}__output"] for name in "pqr")
        if given[0] in WITH_NULLS:
            assert (p, q, r) == (None, None, None)
            continue
        wanted = expected(given)
        np.testing.assert_array_equal(p, wanted[0])
        np.testing.assert_array_equal(q.toArray(), wanted[1])
        np.testing.assert_array_equal(r, wanted[2])
    # The model does not see rows with nulls.
    assert sum(map(int, path.read_text().split())) == len(ROWS) - len(WITH_NULLS)

    left = model.setHandleInvalid("skip").transform(frame)
    found = {row["id"]: row["p__output"] for row in left.collect()}
    assert found.keys() == rows.keys() - WITH_NULLS
    assert math.isnan(found[6])

    with pytest.raises(Exception, match=r"Column '[xnvam]' holds nulls; .*handleInvalid"):
        model.setHandleInvalid("error").transform(frame).collect()


def test_one_output_and_a_classifiers_columns_are_null_together(spark: Any) -> None:
    frame = spark.createDataFrame([(0, None), (1, -1.5), (2, NAN)], "id int, x double").coalesce(1)
    given = {"model": torch.nn.Identity(), "feature_columns": ["x"], "label_columns": ["y"]}
    alone = TorchModel(**given, input_shapes=[[]]).transform(frame).orderBy("id").collect()
    assert alone[0]["y__output"] is None
    assert alone[1]["y__output"] == -1.5
    assert math.isnan(alone[2]["y__output"])

    columns = {"predictionCol": "c", "probabilityCol": "p", "rawPredictionCol": "r"}
    scored = TorchModel(**given, **columns, input_shapes=[[]], outputs_are="logits")
    rows = scored.transform(frame).orderBy("id").collect()
    assert tuple(rows[0])[2:] == (None, None, None, None)
    assert (rows[1]["c"], rows[1]["r"].toArray().tolist()) == (0, [1.5, -1.5])
    assert math.isnan(rows[2]["c"])
    # A partition of null rows only, and empty partitions.
    only = scored.transform(frame.where("id = 0").repartition(3)).collect()
    assert [tuple(row)[2:] for row in only] == [(None, None, None, None)]


def test_transform_and_udf_distinguish_nulls_in_arrays_from_nan(spark: Any) -> None:
    rows = [(0, [1.0, NAN], 1.0), (1, [1.0, None], 1.0), (2, [1.0, 2.0], NAN), (3, None, 1.0)]
    frame = spark.createDataFrame(rows, "id int, `a.b` array<double>, `é x` double").coalesce(1)
    model = TorchModel(
        model=Sum(), feature_columns=["a.b", "é x"], label_columns=["y"], input_shapes=[[2], []]
    )
    in_udf = frame.select("id", model.as_udf()("`a.b`", "`é x`").alias("y__output"))
    for predicted in (model.transform(frame), in_udf):
        found = {row["id"]: row["y__output"] for row in predicted.collect()}
        assert (found[1], found[3]) == (None, None)
        assert math.isnan(found[0])
        assert math.isnan(found[2])
    ragged = frame.union(spark.createDataFrame([(4, [1.0], 1.0)], frame.schema)).coalesce(1)
    with pytest.raises(Exception, match=r"Column 'a\.b' is ragged"):
        model.transform(ragged).collect()


class Sum(torch.nn.Module):
    def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return a.sum(1) + x
