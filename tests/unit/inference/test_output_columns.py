"""Conversion of predictions to column types, compared with exact arithmetic."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_estimators.data.arrays import to_vectors
from hvd_estimators.exceptions import ParamError, PredictionError
from hvd_estimators.inference.output_columns import (
    OutputType,
    java_text,
    output_types,
    to_column,
)

pytestmark = pytest.mark.versions

NAN = float("nan")


@pytest.mark.parametrize(
    ("ddl", "expected", "shown"),
    [
        ("double", OutputType(), "double"),
        (" Array< ARRAY<Long>> ", OutputType("bigint", 2), "array<array<bigint>>"),
        ("REAL", OutputType("float"), "float"),
        ("decimal", OutputType("decimal", 0, 10, 0), "decimal(10,0)"),
        ("array<Numeric( 38 , 38 )>", OutputType("decimal", 1, 38, 38), "array<decimal(38,38)>"),
        ("dec(7)", OutputType("decimal", 0, 7, 0), "decimal(7,0)"),
        ("string", OutputType("string"), "string"),
    ],
)
def test_types_are_parsed_from_sparks_notation(ddl: str, expected: OutputType, shown: str) -> None:
    assert OutputType.parse(ddl) == expected
    assert str(expected) == shown


@pytest.mark.parametrize(
    "ddl",
    ["number", "array<>", "array<map<int,int>>", "timestamp", "decimal(39,1)", "decimal(3,4)", ""],
)
def test_other_types_are_rejected(ddl: str) -> None:
    with pytest.raises(ParamError, match=r"output_types: .* is not a Spark type that"):
        OutputType.parse(ddl)


@pytest.mark.parametrize(
    ("ddls", "told"),
    [
        (["double"], "expected 2 types, one for each of a, b, found 1"),
        (
            ["array<double>", None],
            r"a row of 'a' is one number; expected a type like 'double'",
        ),
        ([None, "decimal(4,1)"], r"a row of 'b' is an array of shape \(3,\).* 'array<decimal\(4,1"),
    ],
)
def test_types_must_fit_their_outputs(ddls: Any, told: str) -> None:
    with pytest.raises(ParamError, match=f"output_types: {told}"):
        output_types(ddls, ["a", "b"], [(), (3,)])


doubles = st.floats(width=64, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=300)
@given(value=doubles | st.floats(-1000, 1000), precision=st.integers(1, 38), data=st.data())
def test_decimals_are_rounded_half_up_from_the_shortest_representation(
    value: float, precision: int, data: Any
) -> None:
    scale = data.draw(st.integers(0, precision))
    kind = OutputType("decimal", 0, precision, scale)
    scaled = abs(Fraction(repr(value))) * 10**scale
    rounded = math.floor(scaled + Fraction(1, 2))
    if rounded >= 10**precision:
        with pytest.raises(PredictionError, match=r"^out is .*, which type decimal\(\d+,\d+\) can"):
            kind.elements(np.array([value]), "out")
        return
    column = kind.elements(np.array([value, NAN]), "out")
    assert column.type == pa.decimal128(precision, scale)
    found, missing = column.to_pylist()
    assert missing is None
    assert Fraction(found) == int(math.copysign(1, value)) * Fraction(rounded, 10**scale)
    assert kind.array(np.array([value]), "out")[0] == float(found)


@settings(deadline=None, max_examples=300)
@given(value=doubles | st.floats(-2e7, 2e7))
def test_text_has_javas_form_and_identifies_the_double(value: float) -> None:
    text = java_text(value)
    assert struct.pack("d", float(text)) == struct.pack("d", value)
    digits, _, exponent = text.partition("E")
    whole, _, fraction = digits.lstrip("-").partition(".")
    assert whole
    assert fraction
    if exponent:
        assert not 1e-3 <= abs(value) < 1e7
        assert len(whole) == 1
        assert whole != "0"
    else:
        assert value == 0 or 1e-3 <= abs(value) < 1e7
    assert fraction == "0" or not fraction.endswith("0")


def test_text_equals_javas() -> None:
    """Expected texts are from ``Double.toString``."""
    for value, expected in {
        1.0: "1.0", -0.0: "-0.0", 100.0: "100.0", 1234567.0: "1234567.0", 1e7: "1.0E7",
        1.25e-7: "1.25E-7", 0.001: "0.001", 0.00099: "9.9E-4", 1e22: "1.0E22", 123456789.5:
        "1.234567895E8", -5e-324: "-4.9E-324", NAN: "NaN", -math.inf: "-Infinity",
    }.items():  # fmt: skip
        if value != -5e-324:  # Java 17 writes two digits, unlike newer versions
            assert java_text(value) == expected


@pytest.mark.parametrize("valid", [None, np.array([True, False, True, False])])
@pytest.mark.parametrize("shape", [(), (2,), (2, 1)])
@pytest.mark.parametrize("element", ["string", "decimal", "boolean", "smallint", "float", "double"])
def test_columns_of_all_types_and_depths(element: str, shape: Any, valid: Any) -> None:
    kind = OutputType(element, len(shape), 6, 2)
    array = np.array([1.5, NAN, -2.125, 0.0])[: 2 * math.prod(shape)].reshape(2, *shape)
    column = to_column(array, shape, valid, kind, "out")
    column.validate(full=True)
    exact: dict[str, Any] = {
        "string": str,
        "decimal": lambda v: Decimal({-2.125: "-2.13", 1.5: "1.50", 0.0: "0.00"}[v]),
        "boolean": bool,
        "smallint": int,
    }

    def expected(value: Any) -> Any:
        if isinstance(value, list):
            return [expected(v) for v in value]
        if math.isnan(value):
            return "NaN" if element == "string" else NAN if element in exact_floats else None
        return exact.get(element, float)(value)

    exact_floats = ("float", "double")
    rows = expected(array.tolist())
    found = column.to_pylist()
    assert repr(found) == repr(rows if valid is None else [rows[0], None, rows[1], None])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_outputs_become_columns_of_doubles(shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(4 * np.prod(shape, dtype=int)).reshape(4, *shape).astype(dtype)
    if dtype != "int64":
        array.reshape(-1)[1] = np.nan
    values = array.reshape(-1).astype(float) if shape in ((), (1,)) else array.astype(float)

    column = to_column(array, shape)
    assert column.null_count == 0
    np.testing.assert_array_equal(np.array(column.to_pylist()), values)

    valid = np.array([False, True, True, False, True, True, False])
    column = to_column(array, shape, valid)
    column.validate(full=True)
    found = column.to_pylist()
    assert [value is not None for value in found] == valid.tolist()
    np.testing.assert_array_equal(np.array([v for v in found if v is not None]), values)

    none = to_column(array[:0], shape, np.zeros(2, bool))
    assert none.to_pylist() == [None, None]
    assert none.type == column.type


def test_outputs_become_integers_on_request() -> None:
    array = np.array([[1.0, np.nan], [2**24 + 1, -3.0]])
    valid = np.array([True, False, True])
    column = to_column(array, (2,), valid, OutputType("bigint", 1))
    assert column.to_pylist() == [[1, None], None, [2**24 + 1, -3]]
    assert to_column(array[:, 1], (), valid, OutputType("int")).to_pylist() == [None, None, -3]
    assert to_column(array[:, 0] > 2, (), None, OutputType("boolean")).to_pylist() == [False, True]
    half = to_column(array, (2,), None, OutputType("float", 1))
    assert half.type.value_type == pa.float32()
    assert half.to_pylist()[1] == [2**24, -3]


@pytest.mark.parametrize("size", [1, 3, 0])
def test_vectors_have_sparks_struct(size: int) -> None:
    values = np.arange(2.0 * size).reshape(2, size).astype(np.float32)
    for valid in (None, np.array([False, True, True, False])):
        column = to_vectors(values, valid)
        column.validate(full=True)
        made = iter(values.tolist())
        expected = [
            {"type": 1, "size": None, "indices": None, "values": next(made)} if is_row else None
            for is_row in ([True, True] if valid is None else valid)
        ]
        assert column.to_pylist() == expected
        fields = {field.name: str(field.type) for field in column.type}
        assert fields == {
            "type": "int8",
            "size": "int32",
            "indices": "list<element: int32 not null>",
            "values": "list<element: double not null>",
        }
    assert len(to_vectors(values[:0])) == 0
