"""What the UDF does with a batch, in this process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from hvd_estimators.exceptions import DataError
from hvd_estimators.inference import udf as inference
from hvd_estimators.inference.udf import Inference


def nested(array: Any) -> Any:
    """Return an array as PySpark gives a row: arrays within arrays of objects."""
    if array.ndim == 1:
        return array
    row = np.empty(len(array), object)
    row[:] = [nested(entry) for entry in array]
    return row


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 3), (2, 1, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_arrays_of_rows_become_one(shape: tuple[int, ...], dtype: str) -> None:
    rows = np.arange(5 * np.prod(shape)).reshape(5, *shape).astype(dtype)
    series = pd.Series([nested(row) for row in rows], dtype=object)
    found = Inference(("x",), ("x",)).arrays([series])["x"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, rows)


def lists(value: Any) -> Any:
    """Return lists as PySpark gives a row."""
    if not isinstance(value[0], list):
        return np.array(value, object if None in value else np.float32)
    row = np.empty(len(value), object)
    row[:] = [None if entry is None else lists(entry) for entry in value]
    return row


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 2.0], [3.0]], "'x' is ragged"),
        ([[[1.0, 2.0]], [[3.0]]], "'x' is ragged"),
        ([[[1.0], [2.0]], [[3.0]]], "'x' is ragged"),
        ([[[1.0], None], [[3.0], [4.0]]], "'x' holds nulls"),
        ([[True, None], [True, False]], "'x' holds nulls"),
    ],
)
def test_ragged_arrays_and_nulls_within_are_refused(rows: Any, message: str) -> None:
    series = pd.Series([lists(row) for row in rows], dtype=object)
    with pytest.raises(DataError, match=message):
        Inference(("x",), ("x",)).arrays([series])


class Predicting:
    """A predictor that refers to itself."""

    def __init__(self) -> None:
        self.itself = self

    def __call__(self, arrays: Any) -> Any:
        return arrays


@pytest.fixture
def no_predictors() -> Iterator[None]:
    yield
    gc.unfreeze()
    inference._predictors.clear()


def test_garbage_collection_passes_over_a_predictor_until_another_comes(
    no_predictors: None,
) -> None:
    made: list[weakref.ref[Predicting]] = []

    def load(document: bytes) -> Callable[..., Any]:
        predictor = Predicting()
        made.append(weakref.ref(predictor))
        return predictor

    inference._cached_predictor("a", b"", load)
    # All that was imported, and the predictor.
    assert gc.get_freeze_count() > 10_000
    assert not any(entry is made[0]() for entry in gc.get_objects())
    inference._cached_predictor("a", b"", load)
    assert len(made) == 1

    inference._cached_predictor("b", b"", load)
    assert made[0]() is None
    assert made[1]() is not None
    assert gc.get_freeze_count() > 10_000
