"""Numbers as text and decimals in the feature stages that run without Spark."""

from __future__ import annotations

import math
import struct
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_estimators.inference.pipeline_stages import _cast, java_text

pytestmark = pytest.mark.versions

NAN = float("nan")


doubles = st.floats(width=64, allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
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


def test_decimals_are_rounded_half_up_from_the_shortest_text() -> None:
    column = _cast(np.array([1.005, -2.125, NAN, 1e-9]), pa.decimal128(6, 2))
    assert column.to_pylist() == [Decimal("1.01"), Decimal("-2.13"), None, Decimal("0.00")]
