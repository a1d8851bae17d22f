"""Columns that share a block of rows."""

import numpy as np
import pytest

from hvd_estimators.loading import blocks
from hvd_estimators.loading.blocks import BlockLayout, BufferPool, Rows

ROWS = 57


def make_columns(width, dtype):
    """Return columns whose values encode row and column, and one column of another type."""
    numbers = np.arange(ROWS)
    columns = {f"c{i}": (numbers * width + i).astype(dtype) for i in range(width)}
    return {"number": numbers, **columns}


@pytest.mark.parametrize("width", [1, 2, 9, 10, 33])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "bool"])
def test_filled_and_put_rows_equal_the_columns(monkeypatch, width, dtype):
    # Several tiles, the last one smaller.
    monkeypatch.setattr(blocks, "_TILE_BYTES", 20 * width * np.dtype(dtype).itemsize)
    monkeypatch.setattr(blocks, "_TILE_ROWS", 1)
    given = make_columns(width, dtype)
    # A column may be a strided view.
    given["c0"] = np.repeat(given["c0"], 2)[::2]
    block = Rows.empty(given, BlockLayout.of(given), ROWS, BufferPool())
    block.fill(given)
    found = block.columns()
    assert list(found) == list(given)
    for name, values in given.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)

    places = np.random.default_rng(1).permutation(ROWS)[:41]
    others = {name: values[:41][::-1] for name, values in given.items()}
    block.put(places, others, BufferPool())
    expected = {name: values.copy() for name, values in given.items()}
    for name, values in expected.items():
        values[places] = others[name]
        np.testing.assert_array_equal(found[name], values)
