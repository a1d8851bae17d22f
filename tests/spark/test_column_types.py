"""Columns of every Spark type: training, error messages with a remedy, and passing through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.errors import PySparkException
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Matrices
from pyspark.mllib.linalg import Vectors as OldVectors
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators import Store, prepare_data
from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.versions]

DECIMALS = ["12345678901234567890123456789.123456789", "0.100000001", "-7.3", "0"]
REFUSED = {
    "variant": ("parse_json('{\"a\": 1}')", "variant_get"),
    "variants": ("array(parse_json('1'))", "variant_get"),
    "day_time": ("interval '1 2:03:04.5' day to second", r"cast\('decimal"),
    "year_month": ("interval '1-2' year to month", r"cast\('int'\)"),
    "calendar": ("make_interval(1, 2, 3, 4, 5, 6, 7)", "extract"),
    "time": ("time'12:34:56'", "with hour"),
    "times": ("array(time'12:34:56')", "with hour"),
    "void": ("null", "has no values"),
    "voids": ("array()", "has no values"),
    "text": ("'a'", "StringIndexer"),
    "collated": ("'a' collate UTF8_LCASE", "StringIndexer"),
    "char": ("cast('ab' as char(5))", "StringIndexer"),
    "varchar": ("cast('ab' as varchar(5))", "StringIndexer"),
    "bytes": ("x'0102'", "decode"),
    "date": ("date'2020-01-01'", "datediff"),
    "timestamp": ("timestamp'2020-01-01 00:00:00'", "unix_timestamp"),
    "timestamp_ntz": ("timestamp_ntz'2020-01-01 00:00:00'", "unix_timestamp"),
    "map": ("map('a', 1)", "keys that you need"),
    "struct": ("named_struct('a', 1, 'b', array(1))", "fields"),
    "structs": ("array(named_struct('a', 1))", "fields"),
    "point": ("st_geomfromwkb(x'0101000000000000000000F03F0000000000000040')", "coordinates"),
}
ANSI = "spark.sql.ansi.enabled"
SWITCHES = {
    "spark.sql.preserveCharVarcharTypeInfo": "true",
    "spark.sql.timeType.enabled": "true",
    "spark.sql.geospatial.enabled": "true",
}


@contextlib.contextmanager
def settings(spark: Any, **given: str) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in given}
    try:
        for name, value in given.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


@pytest.fixture(scope="module")
def typed(spark: Any) -> Iterator[Any]:
    """Return one row with a value in each column, and one with only nulls."""
    with settings(spark, **SWITCHES):
        known = {}
        for name, (expression, _) in REFUSED.items():
            # Older versions of Spark lack some of these types.
            with contextlib.suppress(PySparkException):
                assert spark.sql(f"select {expression} as c").schema
                known[name] = expression
        assert {"day_time", "year_month", "map", "void"} <= {*known}
        values = [f"case when id < 1 then {known[name]} end as {name}" for name in known]
        given = "double(id) as x, array(double(id), 1d) as pair, double(id % 2) as y, boolean(id) v"
        yield spark.sql(f"select id, {given}, {', '.join(values)} from range(0, 2, 1, 1)")


@pytest.mark.parametrize("name", list(REFUSED))
def test_unsupported_types_are_rejected_with_a_remedy(typed: Any, store: Store, name: str) -> None:
    if name not in typed.columns:
        pytest.skip("this Spark has no such type")
    remedy = f"Column '{name}' has type .*{REFUSED[name][1]}"
    given = {"feature_columns": ["x"], "label_columns": ["y"]}
    for role, value in (
        ("feature_columns", [name]),
        ("label_columns", [name]),
        ("sample_weight_col", name),
    ):
        with (
            pytest.raises(ColumnError, match=remedy),
            prepare_data(1, store, typed, **{**given, role: value}),
        ):
            pass
    with (
        pytest.raises(ColumnError, match=f"validation: column '{name}' has type"),
        prepare_data(1, store, typed, **given, validation=name),
    ):
        pass
    assert not store.exists(store.prefix_path)
    model = TorchModel(model=torch.nn.Identity(), feature_columns=[name], label_columns=["y"])
    with pytest.raises(ColumnError, match=remedy):
        model.setOutputShapes([[]]).transform(typed)


def test_user_defined_and_mllib_types_are_rejected_with_a_remedy(spark: Any, store: Store) -> None:
    frame = spark.createDataFrame(
        [(1.0, Matrices.dense(1, 2, [1, 2]), OldVectors.dense([1.0]))], ["y", "matrix", "old"]
    )
    for name, remedy in {
        "matrix": "toArray",
        "old": r"convertVectorColumnsToML\(df, 'old'",
    }.items():
        with pytest.raises(ColumnError, match=remedy), prepare_data(1, store, frame, ["y"], [name]):
            pass


@pytest.mark.parametrize("features", [["x"], ["pair"]], ids=["small rows", "rows of unknown size"])
def test_columns_that_are_not_features_stay_unchanged(typed: Any, features: list[str]) -> None:
    model = TorchModel(model=torch.nn.Identity(), feature_columns=features, label_columns=["y"])
    model.setOutputShapes([[] if features == ["x"] else [2]])
    predicted = model.transform(typed)
    assert predicted.drop("y__output").schema == typed.schema
    # PySpark cannot collect intervals.
    text = [F.col(f.name).cast("string") for f in typed.schema if "interval" in str(f).lower()]
    rest = [f.name for f in typed.schema if "interval" not in str(f).lower()]
    found = predicted.select(*rest, *text, "y__output").collect()
    # As text, because some of PySpark's values cannot be compared.
    assert [str(tuple(row[:-1])) for row in found] == [
        str(tuple(row)) for row in typed.select(*rest, *text).collect()
    ]
    outputs = [row[-1] for row in found]
    if features == ["x"]:
        assert outputs == [0.0, 1.0]
    else:
        assert [vector.toArray().tolist() for vector in outputs] == [[0.0, 1.0], [1.0, 1.0]]


def test_vectors_and_collated_text_from_files_stay_unchanged(typed: Any, tmp_path: Path) -> None:
    """Read columns from files: Spark 4.3 passes only some of their types to Arrow UDFs."""
    v = array_to_vector(F.array("id", "x"))
    text = [name for name in ("text", "collated") if name in typed.columns]
    typed.select("x", *text, v.alias("v"), F.array(v).alias("vs")).write.parquet(f"{tmp_path}/in")
    rows = typed.sparkSession.read.parquet(f"{tmp_path}/in")
    model = TorchModel(model=torch.nn.Identity(), feature_columns=["x"], label_columns=["y"])
    predicted = model.setOutputShapes([[]]).transform(rows)
    assert predicted.schema[:-1] == rows.schema
    assert sorted(tuple(row) for row in predicted.collect()) == sorted(
        (*row, row["x"]) for row in rows.collect()
    )


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_numbers_are_rounded_to_the_nearest_value(spark: Any, store: Store, ansi: str) -> None:
    """Check 32-bit overflow with and without ANSI rules: too large values become infinite."""
    wide = [1e300, 1 / 3, 16777217.0, -1e-50]
    rows = [(Decimal(d), [Decimal(d)], 2**63 - 1 - i, [wide[i]], i) for i, d in enumerate(DECIMALS)]
    schema = "d decimal(38,9), ds array<decimal(38,9)>, l long, a array<double>, id int"
    frame = spark.createDataFrame(rows, schema).withColumn("v", array_to_vector("a"))
    with settings(spark, **{ANSI: ansi}):
        names = ["d", "ds", "l", "v", "a"]
        with prepare_data(1, store, frame, ["id"], names, shuffle_on_write=False) as index:
            table = pq.read_table(store.get_train_data_path(index)).sort_by("id").to_pydict()
        exact = {"column_dtypes": {"d": "float64"}, "output_shapes": [[]], "label_columns": ["y"]}
        model = TorchModel(model=torch.nn.Identity(), feature_columns=["d"], **exact)
        predicted = model.transform(frame).select("y__output", model.as_udf()("d")).collect()
    nearest = [float(text) for text in DECIMALS]
    assert table["d"] == nearest
    assert table["ds"] == [[number] for number in nearest]
    assert table["l"] == [2**63 - 1 - i for i in range(4)]
    assert table["a"] == [[number] for number in wide]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.array(table["v"], np.float32)[:, 0], np.float32(wide))
    assert [tuple(row) for row in predicted] == [(number, number) for number in nearest]


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_casts_to_integers_never_invent_values(spark: Any, ansi: str) -> None:
    # Not rows from Python: Spark 3.5 may reuse the worker that made them after an error.
    frame = spark.sql("select * from values (127.9d), (-128.9d), (double('NaN')), (null) as t(x)")
    large = spark.sql("select 128d as x")
    model = TorchModel(model=torch.nn.Identity(), feature_columns=["x"], label_columns=["y"])
    model.setOutputShapes([[]]).setColumnDtypes({"x": "float64"})
    # PyTorch's numbers are truncated, like Spark's.
    expected = {"tinyint": [127, -128, None, None], "boolean": [True, True, None, None]}
    with settings(spark, **{ANSI: ansi}):
        for name, values in expected.items():
            predicted = model.setOutputTypes([name]).transform(frame)
            assert [row[1] for row in predicted.collect()] == values
        model.setOutputTypes(["tinyint"])
        assert [row[0] for row in frame.select(model.as_udf()("x")).collect()] == [
            127,
            -128,
            None,
            None,
        ]
        for query in (large.select(model.as_udf()("x")), model.transform(large)):
            with pytest.raises(
                Exception, match=r"y__output is 128\.0, which type tinyint cannot hold"
            ):
                query.collect()
        listed = model.setOutputShapes([[2]]).setFeatureColumns(["xs"])
        arrays = large.select(F.array("x", "x").alias("xs"))
        with pytest.raises(Exception, match=r"y__output is 128\.0, which type tinyint"):
            listed.setOutputTypes(["array<tinyint>"]).transform(arrays).collect()
        shown = listed.setOutputTypes(["array<smallint>"]).transform(arrays).collect()
        assert [row[1] for row in shown] == [[128, 128]]
    typed = model.setOutputTypes([T.ArrayType(T.LongType())])
    assert model.getOutputTypes() == ["array<bigint>"]
    assert [row[1] for row in typed.transform(arrays).collect()] == [[128, 128]]
    assert model.setOutputTypes(T.FloatType).getOutputTypes() == ["float"]
    with pytest.raises(ParamError, match=r"'y__output' is an array of shape \(2,\); .*'array<flo"):
        model.transform(arrays)
    with pytest.raises(ParamError, match=r"output_types: expected types as .* found 5"):
        model.setOutputTypes([5])
    with pytest.raises(ParamError, match="output_types: expected 1 types, one for each of y__out"):
        model.setOutputTypes(["int", "int"]).transform(arrays)
    with pytest.raises(ParamError, match=r"output_types: 'array<decimal\(5,1\)>' is not a type"):
        model.setOutputTypes([T.ArrayType(T.DecimalType(5, 1))]).transform(arrays)
