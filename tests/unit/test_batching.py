"""Cutting and shuffling of one pass over the rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators.data import batching
from hvd_estimators.data.batching import buffer_rows, cut_batches

PARTS = st.lists(st.integers(1, 25), min_size=1, max_size=8)
ROW_BYTES = 8 + 2 * 4


def make_parts(lengths):
    """Return parts whose rows are numbered; the second column is made from the number."""
    starts = np.cumsum([0, *lengths[:-1]])
    return [columns(np.arange(start, start + n)) for start, n in zip(starts, lengths, strict=True)]


def columns(numbers):
    pairs = np.stack([numbers, -numbers], axis=1).astype(np.float32)
    return {"number": numbers, "pair": pairs}


def random_sizes(rows, data):
    """Draw batch sizes, some of them zero, that add up to a number of rows."""
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=10).map(sorted))
    return np.diff([0, *cuts, rows]).tolist()


def delivered(batches):
    return np.concatenate([batch["number"] for batch in batches])


def assert_aligned(batches):
    for batch in batches:
        np.testing.assert_array_equal(batch["pair"], columns(batch["number"])["pair"])
        assert batch["pair"].dtype == np.float32


@given(PARTS, st.data())
def test_without_shuffling_batches_are_the_stored_rows_in_order(lengths, data):
    sizes = random_sizes(sum(lengths), data)

    batches = list(cut_batches(make_parts(lengths), sizes))

    assert [len(batch["number"]) for batch in batches] == sizes
    np.testing.assert_array_equal(delivered(batches), np.arange(sum(lengths)))
    assert_aligned(batches)


@given(PARTS, st.integers(1, 60), st.integers(0, 2**31), st.data())
def test_shuffled_batches_hold_every_row_once_with_columns_aligned(lengths, buffer, seed, data):
    """Whatever the buffer holds: from a single row to more than all rows."""
    sizes = random_sizes(sum(lengths), data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "SHUFFLE_BUFFER_BYTES", buffer * ROW_BYTES)
        batches = list(cut_batches(make_parts(lengths), sizes, np.random.default_rng(seed)))

    assert [len(batch["number"]) for batch in batches] == sizes
    assert sorted(delivered(batches)) == list(range(sum(lengths)))
    assert_aligned(batches)


@pytest.mark.parametrize("buffer", [16, 10_000])
def test_the_generators_seed_decides_the_order(monkeypatch, buffer):
    monkeypatch.setattr(batching, "SHUFFLE_BUFFER_BYTES", buffer * ROW_BYTES)

    def order(seed):
        rng = np.random.default_rng(seed)
        return delivered(cut_batches(make_parts([40] * 5), [20] * 10, rng)).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_shuffle_buffer_is_measured_in_bytes(monkeypatch):
    monkeypatch.setattr(batching, "SHUFFLE_BUFFER_BYTES", 10 * ROW_BYTES)

    assert buffer_rows(columns(np.arange(1000))) == 10
    assert buffer_rows({"wide": np.zeros((3, 1000))}) == 1


def test_a_large_buffer_leaves_no_trace_of_the_stored_order():
    rows = 20_000

    batches = cut_batches(make_parts([1000] * 20), [100] * 200, np.random.default_rng(0))

    # The numbers are ranks, so that this is Spearman's correlation; its standard deviation over
    # random permutations is 1 / sqrt(rows - 1), 0.007.
    correlation = np.corrcoef(delivered(batches), np.arange(rows))[0, 1]
    assert abs(correlation) < 5 / np.sqrt(rows - 1)


def test_a_small_buffer_bounds_the_rows_that_are_held_and_mixes_across_its_fillings(monkeypatch):
    part, buffer = 50, 200
    monkeypatch.setattr(batching, "SHUFFLE_BUFFER_BYTES", buffer * ROW_BYTES)
    taken = 0

    def parts():
        nonlocal taken
        for content in make_parts([part] * 40):
            taken += part
            yield content

    given_out, mixed = 0, 0
    for batch in cut_batches(parts(), [10] * 200, np.random.default_rng(0)):
        given_out += 10
        mixed += len(set(batch["number"] // buffer)) > 1
        assert taken - given_out <= buffer
    assert given_out == part * 40
    # Rows that stay behind make most of the 200 batches hold rows of several stretches as long as
    # the buffer; were it emptied each time, none would.
    assert mixed > 100


def test_unshuffled_batches_leave_as_soon_as_their_rows_are_there():
    taken = []

    def parts():
        for number, content in enumerate(make_parts([4, 4, 4])):
            taken.append(number)
            yield content

    batches = cut_batches(parts(), [3, 3, 3, 3])

    next(batches)
    assert taken == [0]
    next(batches)
    assert taken == [0, 1]


def test_empty_batches_keep_the_columns_and_their_shapes():
    first, second = cut_batches(make_parts([2]), [2, 0], np.random.default_rng(0))

    assert len(first["number"]) == 2
    assert second["number"].shape == (0,)
    assert second["pair"].shape == (0, 2)
