"""Typed, early errors for wrong DataFrames, functions that close over Spark, and wrong calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import functions as F
from wrong_calls import Calls, NoRanks, Wrong, check_wrong

from hvd_estimators import prepare_data
from hvd_estimators.exceptions import ColumnError, DataError, ParamError, SlotsError, StoreError
from hvd_estimators.launch import run, run_elastic
from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark

lock = threading.Lock()


class Given(Calls):
    """Arguments of calls, and a DataFrame with the same columns."""

    def __init__(self, folder: Path, spark: Any) -> None:
        super().__init__(folder)
        self.spark = spark
        schema = "x double, y double, w double, v array<double>, text string, holes double"
        rows = [(0.5, 0.5, 1.0, [0.0, 1.0], "a", None if i % 2 else 0.5) for i in range(8)]
        self.frame = spark.createDataFrame(rows, schema)

    @property
    def stream(self) -> Any:
        rows = self.spark.readStream.format("rate").load()
        return rows.selectExpr("double(value) x", "double(value) y")

    def fit(self, **changes: Any) -> Any:
        return self.torch(**changes).fit(self.frame)

    def prepare(self, ranks: Any = 2, **changes: Any) -> None:
        given = {"store": self.store, "df": self.frame, "label_columns": ["y"]}
        with prepare_data(ranks, **{**given, "feature_columns": ["x"], **changes}):
            raise AssertionError("data were prepared")

    def fitted(self, **changes: Any) -> TorchModel:
        given = {"feature_columns": ["x"], "label_columns": ["y"], "output_shapes": [[]]}
        return TorchModel(**{"model": torch.nn.Linear(1, 1), **given, **changes})


def fit(name: str, remedy: str, error: Any = ParamError, **changes: Any) -> Wrong:
    return lambda given: given.fit(**changes), error, name, remedy


def prepare(name: str, remedy: str, error: Any = ParamError, **changes: Any) -> Wrong:
    return lambda given: given.prepare(**changes), error, name, remedy


def transform(name: str, remedy: str, error: Any = ParamError, **changes: Any) -> Wrong:
    return lambda given: given.fitted(**changes).transform(given.frame), error, name, remedy


def closing_over(what: Callable[[Given], Any]) -> Callable[[Given], Any]:
    """Return functions that build closures over driver-only objects."""

    def make(given: Given) -> Any:
        held = what(given)
        return lambda *args: held

    return make


context = closing_over(lambda given: given.spark.sparkContext)
frame = closing_over(lambda given: given.frame)

STREAM = (ParamError, "dataset", r"stream.* spark\.read")

WRONG: dict[str, Wrong] = {
    "fit: validation of more than all": fit("validation", "a fraction from 0", validation=1.5),
    "fit: validation rows of other types": (
        lambda given: given.fit(validation=given.frame.withColumn("x", F.col("x").cast("int"))),
        ColumnError,
        "validation",
        "'x' has type int, but type double in the training rows",
    ),
    "fit: a stream": (lambda given: given.torch().fit(given.stream), *STREAM),
    "prepare_data: a stream": (
        lambda given: given.prepare(df=given.stream),
        ParamError,
        "df",
        "spark.read",
    ),
    "evaluate: a stream": (lambda given: given.fitted().evaluate(given.stream), *STREAM),
    "fit: validation rows without a column": (
        lambda given: given.fit(validation=given.frame.drop("x")),
        ColumnError,
        "validation",
        "has no column 'x'",
    ),
    "fit: validation rows of other files": (
        lambda given: given.torch(validation=given.frame).fit_on_parquet("/data"),
        ParamError,
        "validation",
        "as validation_path",
    ),
    "save: validation rows": (
        lambda given: given.torch(validation=given.frame).save(str(given.folder / "saved")),
        ParamError,
        "validation",
        "found a DataFrame, which cannot be saved .* set it after loading",
    ),
    "save: a loss that holds a lock": (
        lambda given: given.torch(loss=closing_over(lambda _: lock)(given)).save(
            str(given.folder / "saved")
        ),
        ParamError,
        "loss",
        "found a function, which cannot be saved",
    ),
    "fit: no such column": fit(
        "feature_cols", "its columns are x, y", ColumnError, feature_cols=["z"]
    ),
    "fit: text": fit("feature_cols", "StringIndexer", ColumnError, feature_cols=["text"]),
    "fit: nulls": fit("label_cols", "ill or drop", DataError, label_cols=["holes"]),
    "fit: a function that holds Spark's context": (
        lambda given: given.fit(transformation_fn=context(given)),
        ParamError,
        "transformation_fn",
        "leave Spark's context",
    ),
    "fit: a loss that holds a DataFrame": (
        lambda given: given.fit(loss=frame(given)),
        ParamError,
        "loss",
        "leave Spark's context, sessions and DataFrames out",
    ),
    "prepare_data: no ranks": prepare("num_processes", "1 or more", ranks=0),
    "prepare_data: labels": prepare(
        "label_columns", "has no column", ColumnError, label_columns=["z"]
    ),
    "prepare_data: validation": prepare("validation", "has no column", ColumnError, validation="z"),
    "transform: no model": transform("model", "Set model", model=None),
    "transform: no such column": transform(
        "feature_columns", "its columns are x, y", ColumnError, feature_columns=["z"]
    ),
    "transform: as many outputs": transform("outputCols", "has 1 outputs", outputCols=["a", "b"]),
    "transform: a name that is taken": transform(
        "outputCols", "set other names", ColumnError, outputCols=["x"]
    ),
    "transform: shapes": transform("output_shapes", "Set output_shapes", output_shapes=None),
    "load: nothing": (
        lambda given: TorchModel.load(str(given.folder / "none")),
        StoreError,
        "path",
        r"Set the path given to save\(\)",
    ),
    "run: more ranks than slots": (
        lambda given: run(len, num_proc=64),
        SlotsError,
        "num_proc",
        "Set num_proc to",
    ),
    "run: a function that holds Spark's context": (
        lambda given: run(context(given), num_proc=1),
        ParamError,
        "arguments",
        "Create objects that cannot be sent within",
    ),
    "run_elastic: a function that holds a DataFrame": (
        lambda given: run_elastic(frame(given), num_proc=1),
        ParamError,
        "arguments",
        "Create objects that cannot be sent within",
    ),
}


@pytest.fixture(scope="module")
def warmed(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start Spark's one-time services by calls without errors."""
    given = Given(tmp_path_factory.mktemp("right"), spark)
    with pytest.raises(AssertionError, match="ranks were to be started"):
        given.fit(backend=NoRanks())
    with pytest.raises(AssertionError, match="data were prepared"):
        given.prepare()
    assert given.fitted().transform(given.frame).columns[-1] == "y__output"


@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize("wrong", list(WRONG.values()), ids=list(WRONG))
def test_a_wrong_call_fails_early_and_writes_nothing(
    spark: Any, tmp_path: Path, wrong: Wrong
) -> None:
    check_wrong(Given(tmp_path, spark), wrong)
