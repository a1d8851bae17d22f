"""Saved pipelines without Spark give the columns of PipelineModel.transform(), rule by rule."""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.feature import (
    Binarizer,
    Bucketizer,
    Imputer,
    IndexToString,
    MinMaxScaler,
    OneHotEncoder,
    StandardScaler,
    StringIndexer,
    StringIndexerModel,
    VectorAssembler,
)
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors, VectorUDT
from pyspark.sql.types import StructType

from hvd_estimators.exceptions import ColumnError, DataError, ParamError, ShapeError
from hvd_estimators.torch import TorchModel, load_predictor

pytestmark = pytest.mark.spark

NAN, INF = math.nan, math.inf


def plain(value: Any) -> Any:
    """Return a value of Spark or Arrow as Python values, with vectors as lists."""
    if isinstance(value, (DenseVector, SparseVector)):
        value = value.toArray()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def arrow(frame: Any) -> pa.Table:
    """Return the rows of a DataFrame with the Arrow types of its columns; vectors are lists."""
    types = {
        **{"int": pa.int32(), "bigint": pa.int64(), "smallint": pa.int16(), "string": pa.string()},
        **{"double": pa.float64(), "float": pa.float32(), "boolean": pa.bool_()},
        **{"decimal(8,2)": pa.decimal128(8, 2), "vector": pa.list_(pa.float64())},
    }
    rows = frame.collect()
    return pa.table(
        {
            name: pa.array(
                [
                    row[name].toArray().tolist() if is_vector(row[name]) else row[name]
                    for row in rows
                ],
                types[kind],
            )
            for name, kind in frame.dtypes
        }
    )


def is_vector(value: Any) -> bool:
    return hasattr(value, "toArray")


def typed(schema: str) -> StructType:
    """Return a schema of names and types, which may be ``vector``."""
    made = StructType()
    for field in schema.split(", "):
        name, kind = field.rsplit(" ", 1)
        made.add(name, VectorUDT() if kind == "vector" else kind)
    return made


def vector(values: list[float] | None, number: int) -> Any:
    """Return a vector, alternately dense and sparse."""
    if values is None or number % 2:
        return values if values is None else Vectors.dense(values)
    return Vectors.sparse(len(values), [(i, v) for i, v in enumerate(values) if v])


def saved(stages: Sequence[Any], folder: Path) -> tuple[PipelineModel, Any]:
    """Return a pipeline of stages, and the predictor of its files."""
    pipeline = PipelineModel(list(stages))
    path = str(folder / pipeline.uid)
    pipeline.save(path)
    return pipeline, load_predictor(path)


def assert_equal(pipeline: PipelineModel, predictor: Any, frame: Any) -> list[dict[str, Any]]:
    """Check all columns of a pipeline against Spark, for a table and for single rows."""
    table = arrow(frame)
    rows = pipeline.transform(frame.coalesce(1)).collect()
    names = [name for name in predictor.output_columns if name in rows[0]]
    expected = [{name: plain(row[name]) for name in names} for row in rows]
    made = predictor.predict(table)
    assert made.column_names == names
    for name in names:
        found = [plain(value) for value in made[name].to_pylist()]
        assert found == [row[name] for row in expected], name
    records = predictor.predict(table.to_pylist())
    for record, row in zip(records, expected, strict=True):
        for name, value in record.items():
            # Arrays have NaN for nulls, and doubles for decimals.
            is_missing = row[name] is None and value is not None
            found = plain(value) if not is_missing else set(np.ravel(value).astype(str))
            assert found == ({"nan"} if is_missing else as_double(row[name])), name
    return expected


def as_double(value: Any) -> Any:
    return float(value) if isinstance(value, decimal.Decimal) else value


def test_labels_of_text_and_numbers(spark: Any, tmp_path: Path) -> None:
    schema = "color string, count int, price double, width float, age int"
    training = [
        ("red", 3, 1.5, 0.1, 4),
        ("blue", 3, 1.5, 0.1, 4),
        ("green", 1, 1e7, 2.5, None),
        ("red", 1, 0.001, 1e-5, 10),
        ("blue", 2, 1e-4, None, 9),
        (None, None, None, 16777216.0, 7),
    ]
    names = ["color", "count", "price", "width"]
    outputs = [f"{name} index" for name in names]
    indexer = StringIndexer(inputCols=names, outputCols=outputs, handleInvalid="keep")
    back = IndexToString(inputCol="color index", outputCol="color again")
    of_age = IndexToString(inputCol="age", outputCol="of age", labels=["zero", "one"])
    buckets = Bucketizer(inputCol="age", outputCol="age bucket", splits=[-INF, 0.5, 1e7])
    ranges = IndexToString(inputCol="age bucket", outputCol="age range")
    model = indexer.fit(spark.createDataFrame(training, schema))
    pipeline, predictor = saved([model, back, of_age, buckets, ranges], tmp_path)
    assert predictor.feature_columns == ("color", "age")
    rows = [
        ("blue", 2, 1.5, 0.1, 0),
        ("violet", 7, NAN, 0.2, 1),
        (None, None, None, None, 0),
        ("", 1, 1e7, 1e-5, 1),
        ("green", 3, 0.001, 16777216.0, 0),
        ("red", -1, 1e-4, 2.5, 0),
    ]
    frame = spark.createDataFrame(rows, schema)
    made = predictor.predict(arrow(frame))
    assert made["width index"].to_pylist() == [0, 4, 4, 1, 2, 3]
    # A Python number is a double, with another text than a 32-bit float.
    frame = frame.drop("width")
    made = assert_equal(pipeline, predictor, frame)
    assert [row["color index"] for row in made] == [0, 3, 3, 3, 2, 1]
    assert [row["color again"] for row in made[:2]] == ["blue", "__unknown"]
    assert made[0]["age range"] == "-Infinity, 0.5"
    # Spark 3.5 agrees about null, and Spark 4 about NaN.
    assert predictor.predict({"color": "red", "age": None})["of age"] is None
    for age in (2.0, NAN):
        with pytest.raises(DataError, match=f"IndexToString: column 'age' holds {age}, and there"):
            predictor.predict({"color": "red", "age": age})


@pytest.mark.soak
def test_numbers_to_buckets_and_vectors(spark: Any, tmp_path: Path) -> None:
    """Invalid values are kept where a stage can keep them."""
    schema = (
        "a double, b float, c integer, d long, e decimal(8,2), missing double, flag boolean, "
        "category integer, given vector"
    )
    rows: list[tuple[Any, ...]] = [
        (-0.0, 0.5, 3, 2**62 + 1, decimal.Decimal("1.25"), -1.0, True, 0, [0.0, 2.0, 5.0]),
        (0.0, 0.25, None, None, None, None, False, 2, [1.0, NAN, 0.0]),
        (NAN, NAN, -7, 5, decimal.Decimal("-9.99"), NAN, True, 1, [-0.0, 0.0, 0.0]),
        (None, None, 4, 4, decimal.Decimal("0.00"), 3.0, False, 3, [3.0, 1.0, 1e300]),
        (INF, 9.0, 2**31 - 1, 2**63 - 1, decimal.Decimal("7.00"), 8.0, None, -1, [0.0, 0.0, 9.0]),
        (-INF, -2.0, 0, -(2**63), None, 1.0, True, None, [2.0, -3.0, 0.0]),
        (1.0, 0.1, 0, 0, None, 1.0, True, 3, [2.0, -3.0, 0.0]),
    ]
    frame = spark.createDataFrame(
        [(*row[:-1], vector(row[-1], number)) for number, row in enumerate(rows)], typed(schema)
    ).coalesce(1)  # so that limit() takes the first rows
    training = frame.where("category in (0, 1)")
    numbers = ["a", "b", "c", "d", "e"]
    imputer = Imputer(inputCols=[*numbers, "missing"], outputCols=[*"uvwxyz"]).fit(frame.limit(4))
    encoder = OneHotEncoder(inputCol="category", outputCol="-").fit(frame.limit(3))
    scaler = StandardScaler(inputCol="given", outputCol="-").fit(training)
    scaled = [
        scaler.copy({scaler.outputCol: f"s{mean}{std}", scaler.withMean: mean, scaler.withStd: std})
        for mean in (False, True)
        for std in (False, True)
    ]
    stages = [
        Bucketizer(
            inputCols=["a", "b"],
            outputCols=["a bucket", "b bucket"],
            splitsArray=[[-INF, 0.0, 1.0, INF], [-2.0, 0.1, 0.5, 9.0]],
            handleInvalid="keep",
        ),
        Bucketizer(inputCol="c", outputCol="c bucket", splits=[-10, 0, 3, INF]),
        imputer.copy().setInputCols(numbers).setOutputCols([f"{n} filled" for n in numbers]),
        imputer.copy({imputer.missingValue: -1.0})
        .setInputCols(["missing"])
        .setOutputCols(["missing"]),
        *(
            encoder.copy().setOutputCol(f"hot{drop}").setDropLast(drop).setHandleInvalid("keep")
            for drop in (False, True)
        ),
        *scaled,
        MinMaxScaler(inputCol="given", outputCol="m", min=-1.0, max=3.0).fit(training),
        VectorAssembler(
            inputCols=["a", "flag", "hotTrue", "c", "sTrueTrue"],
            outputCol="assembled",
            handleInvalid="keep",
        ),
    ]
    pipeline, predictor = saved(stages, tmp_path)
    assert predictor.feature_columns[:3] == ("a", "b", "c")
    made = assert_equal(pipeline, predictor, frame)
    alone = predictor.predict({**arrow(frame).to_pylist()[0], "category": None})
    assert np.isnan(alone["hotTrue"]).tolist() == [True] * 3
    assert [row["a bucket"] for row in made] == [0, 1, 3, None, 2, 0, 2]
    assert [row["d filled"] for row in made[:2]] == [2**62, int((2**62 + 10) / 3)]
    assert made[0]["missing"] != -1


def test_rows_that_stages_skip(spark: Any, tmp_path: Path) -> None:
    schema = "id integer, word string, number double, a double, b integer, features vector"
    rows = [
        (0, "x", 0.5, 1.0, 1, vector([1.0, 2.0], 0)),
        (1, "z", 0.5, 1.0, 1, vector([1.0, 2.0], 1)),
        (2, None, 0.5, 1.0, 1, vector([1.0, 2.0], 1)),
        (3, "y", NAN, 1.0, 1, vector([1.0, 2.0], 1)),
        (4, "y", None, 1.0, 1, vector([1.0, 2.0], 1)),
        (5, "y", 1.5, NAN, 1, vector([1.0, 2.0], 1)),
        (6, "y", 1.5, 1.0, None, vector([1.0, 2.0], 1)),
        (7, "y", 1.5, 1.0, 1, None),
        (8, "y", 2.0, 3.0, 1, vector([NAN, 2.0], 0)),
    ]
    frame = spark.createDataFrame(rows, typed(schema))
    words = StringIndexerModel.from_labels(["x", "y"], "word", "index", handleInvalid="skip")
    model = TorchModel(
        model=torch.nn.Linear(4, 1).double(),
        feature_columns=["all"],
        label_columns=["y"],
        output_shapes=[[1]],
        column_dtypes={"all": "float64"},
    )
    inner = PipelineModel(
        [
            words,
            Bucketizer(
                inputCol="number", outputCol="bucket", splits=[0, 1, 2], handleInvalid="skip"
            ),
        ]
    )
    assembler = VectorAssembler(
        inputCols=["a", "b", "features"], outputCol="all", handleInvalid="skip"
    )
    pipeline, predictor = saved([inner, assembler, model], tmp_path)
    made = assert_equal(pipeline, predictor, frame)
    assert len(made) == 2
    table = arrow(frame)
    by_pandas = predictor.predict(table.to_pandas().set_index("id", drop=False))
    assert by_pandas.index.tolist() == [0, 8]
    assert predictor.predict(table.slice(1, 3)).num_rows == 0
    one_by_one = [predictor.predict([row]) for row in table.to_pylist()]
    assert [number for number, row in enumerate(one_by_one) if row] == [0, 8]
    # NumPy arrays have no nulls.
    arrays = {name: np.array(table[name].to_pylist()[:1] * 3) for name in table.column_names}
    found = predictor.predict(arrays)
    np.testing.assert_array_equal(found["all"], [[1.0, 1.0, 1.0, 2.0]] * 3)
    assert found["bucket"].tolist() == [0, 0, 0]


def test_invalid_rows_are_errors(spark: Any, tmp_path: Path) -> None:
    """Spark and the predictor both reject the same rows."""
    schema = "word string, number double, category double, index double, features vector"
    good = ("x", 0.5, 1.0, 1.0, vector([1.0, 2.0], 1))
    frame = spark.createDataFrame([good], typed(schema))
    words = StringIndexerModel.from_labels(["x", "y"], "word", "word index")
    buckets = Bucketizer(inputCol="number", outputCol="bucket", splits=[0.0, 1.0, 2.0])
    training = spark.createDataFrame([(0.0,), (2.0,)], "category double")
    encoder = OneHotEncoder(inputCol="category", outputCol="hot").fit(training)
    back = IndexToString(inputCol="index", outputCol="text", labels=["a", "b"])
    scaler = StandardScaler(inputCol="features", outputCol="scaled").fit(frame)
    ranges = MinMaxScaler(inputCol="features", outputCol="ranged").fit(frame)
    assembler = VectorAssembler(inputCols=["number", "features"], outputCol="all")
    stages = [words, buckets, encoder, back, scaler, ranges, assembler]
    pipeline, predictor = saved(stages, tmp_path)
    fine = [
        good,
        ("y", 2.0, 0.5, -0.5, vector([NAN, 0.0], 0)),
        ("y", 1.0, None, 0.5, vector([0.0, 0.0], 0)),
        ("x", 0.0, 2.0, 1.9, vector([0.0, INF], 1)),
    ]
    assert_equal(pipeline, predictor, spark.createDataFrame(fine, typed(schema)))
    wrong = [
        ("z", "StringIndexerModel: column 'word' holds 'z', which is no label"),
        (None, "StringIndexerModel: column 'word' holds None"),
        (NAN, "Bucketizer: column 'number' holds nan"),
        (None, "VectorAssembler: column 'number' holds None"),
        (2.5, r"Bucketizer: column 'number' holds 2\.5, outside of the splits, 0\.0 to 2\.0"),
        (-0.0, r"Bucketizer: column 'number' holds -0\.0"),
        (3.0, r"OneHotEncoderModel: column 'category' holds 3\.0, and training had"),
        (-1.0, r"OneHotEncoderModel: column 'category' holds -1\.0"),
        (NAN, "OneHotEncoderModel: column 'category' holds nan"),
        (2.0, r"IndexToString: column 'index' holds 2\.0, and there are 2 labels"),
        (-1.0, r"IndexToString: column 'index' holds -1\.0"),
        (None, "StandardScalerModel: column 'features' holds None"),
    ]
    places = [0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4]
    rows = [(*good[:p], value, *good[p + 1 :]) for p, (value, _) in zip(places, wrong, strict=True)]
    table = arrow(spark.createDataFrame(rows, typed(schema)))
    by_name = {type(stage).__name__: stage for stage in stages}
    for row, given, (_, told) in zip(rows, table.to_pylist(), wrong, strict=True):
        with pytest.raises(DataError, match=told):
            predictor.predict(given)
        one = spark.createDataFrame([row], typed(schema)).coalesce(1)
        with pytest.raises(Exception, match=r"Failed|FAILED|null|Unseen|out of"):
            by_name[told.partition(":")[0]].transform(one).collect()
    with pytest.raises(
        ShapeError, match=r"a row of 'features' has the shape \(3,\); expected \(2,"
    ):
        predictor.predict({**table.to_pylist()[0], "word": "x", "features": [1.0, 2.0, 3.0]})
    with pytest.raises(ColumnError, match="Bucketizer: column 'number' has type string"):
        predictor.predict({**table.to_pylist()[0], "word": "x", "number": "1"})
    with pytest.raises(ColumnError, match="no 'category' in row 0; the model takes number, cat"):
        predictor.predict([{"number": 1.0}])


def test_pipelines_with_other_stages_are_rejected(spark: Any, tmp_path: Path) -> None:
    other = Binarizer(inputCol="f", outputCol="g")
    assembler = VectorAssembler(inputCols=["f"], outputCol="h")
    supported = "supported: Bucketizer, ImputerModel, .*, TorchModel and pipelines of these"
    with pytest.raises(ParamError, match=rf"found a Binarizer as stage 1\.1; {supported}"):
        saved([assembler, PipelineModel([assembler, other])], tmp_path)
    with pytest.raises(ParamError, match="IndexToString has no labels, and no StringIndexer"):
        saved([IndexToString(inputCol="x", outputCol="y")], tmp_path)
