"""Arbitrary column names in fits, prepared data and predictions."""

from __future__ import annotations

from typing import Any
from unicodedata import category

import numpy as np
import pytest
from estimators import line_estimator
from preparing import index_of, jobs_of, read
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from hvd_estimators.exceptions import ColumnError, DataError
from hvd_estimators.prepare.schema import _folded
from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("cleared_cache")]

ODD = [
    *("a`b", "`", "``", "a.b", "a", "", "c, d;{}()=\t\n", "größe", "min_0", "split_nulls"),
    *("__split", "__SPLIT_", "__length_0", "__length_1", "va`l.id", "v__indices", "V__values"),
    *("cost ${usd}", "${system:user.home}", "c0", "i0", "key", "split", "is_validation"),
]


def odd_frame(spark: Any, names: list[str], shuffled: bool = False) -> Any:
    """Return columns of id + i, a vector, and a column that is positive in every third row."""
    frame = spark.range(60)
    frame = frame.repartition(3) if shuffled else frame
    values = [(F.col("id") + i).cast("double") for i in range(len(names))]
    vector = array_to_vector(F.array(F.col("id") * 1.0, F.lit(0.0)))
    return frame.select("id", vector, *values, (F.col("id") % 3 == 0).cast("double")).toDF(
        "id", "v", *names, "held` out"
    )


@pytest.mark.parametrize(("validation", "shuffled"), [("held` out", False), (0.3, True)])
def test_columns_of_any_name_are_written(
    spark: Any, store: Any, validation: Any, shuffled: bool
) -> None:
    options = {"validation": validation, "compress_sparse": True, "check_finite": True}
    parts = read(store, odd_frame(spark, ODD, shuffled), **options)
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(found["id"])
    assert found["id"][order].tolist() == list(range(60))
    for i, name in enumerate(ODD):
        assert found[name][order].tolist() == list(range(i, i + 60)), name
    assert found["v"][order].tolist() == [[i, 0.0] for i in range(60)]
    if validation == "held` out":
        assert (parts[1]["id"] % 3 == 0).all()
        assert (parts[0]["id"] % 3 != 0).all()


def test_nulls_are_found_in_columns_of_any_name(spark: Any, store: Any) -> None:
    frame = spark.range(5).select("id", F.array(F.when(F.col("id") > 1, 1.0)).alias("a`.b ${c}"))
    with pytest.raises(DataError, match=r"'a`\.b \$\{c\}' holds"):
        index_of(store, frame)


def test_characters_are_alike_where_java_ignores_their_case(spark: Any) -> None:
    call = "java_method('java.lang.Character', '{}', {})".format
    key = call("toLowerCase", f"cast({call('toUpperCase', 'code')} AS int)")
    codes = spark.range(0xD800).coalesce(1).selectExpr("cast(id AS int) AS code")
    rows = codes.selectExpr("code", f"cast({key} AS int)", call("isDefined", "code")).collect()

    # Python and Java know different versions of Unicode.
    known = [(chr(c), k) for c, k, d in rows if d == "true" and category(chr(c)) != "Cn"]
    assert len(known) > 50_000
    assert [(c, k) for c, k in known if ord(_folded(c)) != k] == []


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["x", "x"], "2 columns that Spark takes for 'x': 'x', 'x'. Rename or drop the others"),
        (["x", "X"], "2 columns that Spark takes for 'x': 'x', 'X'. .*caseSensitive=true"),
    ],
)
def test_ambiguous_names_are_rejected_before_any_job_runs(
    spark: Any, store: Any, names: list[str], remedy: str
) -> None:
    frame = odd_frame(spark, names).withColumn("y", F.col("id") * 1.0)
    estimator = line_estimator(store)
    model = TorchModel(
        model=estimator.getModel(),
        feature_columns=["x"],
        label_columns=["y"],
        input_shapes=[[-1, 1]],
        output_shapes=[[1]],
    )

    def use(param: str, action: Any) -> None:
        with pytest.raises(ColumnError, match=f"{param}: the DataFrame has {remedy}"):
            action()

    def use_all() -> None:
        use("feature_cols", lambda: estimator.fit(frame))
        use("feature_columns", lambda: index_of(store, frame))
        use("label_columns", lambda: index_of(store, frame, ["x"]))
        use("validation", lambda: index_of(store, frame, feature_columns=["y"], validation="x"))
        use("feature_columns", lambda: model.transform(frame))

    assert jobs_of(spark, use_all) == 0
    # The other columns can be used.
    (found,) = read(store, frame, feature_columns=["y"])
    assert sorted(found["y"]) == list(range(60))


def test_a_model_reads_and_adds_columns_of_any_name(spark: Any, store: Any) -> None:
    import torch

    net = torch.nn.Linear(1, 1)
    with torch.no_grad():
        net.weight.fill_(2.0), net.bias.fill_(1.0)
    model = TorchModel(
        model=net,
        feature_columns=["a`.b ${c}"],
        label_columns=["y` z", "`"],
        input_shapes=[[-1, 1]],
        output_shapes=[[1]],
        outputCols=["y`.`z"],
    )
    frame = odd_frame(spark, ["a`.b ${c}", "__predicted"])
    frame = frame.withColumn("a`.b ${c}", F.col("`a``.b ${c}`").cast("decimal(9,2)"))
    rows = model.transform(frame).orderBy("id").collect()
    assert [row["y`.`z"] for row in rows] == [2.0 * i + 1 for i in range(60)]

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, x * 3

    two = model.copy({model.model: Two(), model.output_shapes: [[1], [1]]})
    rows = two.setOutputCols(["__predicted_", "`t"]).transform(frame).orderBy("id").collect()
    assert [row["__predicted_"] for row in rows] == [2.0 * i for i in range(60)]
    assert [row["`t"] for row in rows] == [3.0 * i for i in range(60)]
    assert [row["__predicted"] for row in rows] == [i + 1.0 for i in range(60)]
    for names in (["A`.B ${c}", "t"], ["t", "T"]):
        with pytest.raises(ColumnError, match=r"cannot be added, there is '(a`\.b \$\{c\}|t)'"):
            two.setOutputCols(names).transform(frame)


@pytest.mark.slow
def test_an_estimator_trains_on_columns_of_any_name(spark: Any, store: Any) -> None:
    frame = odd_frame(spark, ["a`.b", "__split"])
    estimator = line_estimator(
        store, feature_cols=["a`.b"], label_cols=["__split"], validation="held` out"
    )
    model = estimator.fit(frame.where("id < 20"))
    assert model.transform(frame).columns == [*frame.columns, "__split__output", "prediction"]
    assert np.isfinite(model.getHistory()[-1]["validation"]["loss"])


@pytest.mark.parametrize("bad", [float("nan"), None])
def test_validation_columns_with_nulls_or_nan_are_rejected(
    spark: Any, store: Any, bad: Any
) -> None:
    rows = [(i, bad if i == 3 else float(i % 2)) for i in range(6)]
    for data_type in ("double", "float"):
        frame = spark.createDataFrame(rows, "id int, held double")
        frame = frame.select("id", F.col("id").alias("x"), F.col("held").cast(data_type))
        with pytest.raises(DataError, match="validation: its column holds 1 nulls or NaN"):
            index_of(store, frame, validation="held")
