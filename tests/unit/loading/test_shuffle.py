"""Batching and shuffling of one pass over the rows."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators.exceptions import DataError
from hvd_estimators.loading import shuffle
from hvd_estimators.loading.blocks import BufferPool
from hvd_estimators.loading.shuffle import stream_batches

PARTS = st.lists(st.integers(1, 25), min_size=1, max_size=8)
ROW_BYTES = 8 + 2 * 4


def make_parts(lengths):
    """Return parts with numbered rows; the second column is computed from the number."""
    starts = np.cumsum([0, *lengths[:-1]])
    return [columns(np.arange(start, start + n)) for start, n in zip(starts, lengths, strict=True)]


def columns(numbers):
    pairs = np.stack([numbers, -numbers], axis=1).astype(np.float32)
    return {"number": numbers, "pair": pairs}


def random_sizes(rows, data):
    """Draw batch sizes, some of them zero, that sum to a number of rows."""
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=10).map(sorted))
    return np.diff([0, *cuts, rows]).tolist()


def cut_batches(parts, sizes, rng=None):
    """Return the batches of one pass."""
    for run in stream_batches(parts, sizes, [rng]):
        yield from run.batches()


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
    """Buffers hold from a single row to more than all rows."""
    sizes = random_sizes(sum(lengths), data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "SHUFFLE_BUFFER_BYTES", buffer * ROW_BYTES)
        batches = list(cut_batches(make_parts(lengths), sizes, np.random.default_rng(seed)))

    assert [len(batch["number"]) for batch in batches] == sizes
    assert sorted(delivered(batches)) == list(range(sum(lengths)))
    assert_aligned(batches)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_small_buffer_bounds_the_held_rows_and_mixes_all_rows(monkeypatch, passes):
    part, buffer, rows = 50, 300, 2000
    monkeypatch.setattr(shuffle, "SHUFFLE_BUFFER_BYTES", buffer * ROW_BYTES)
    monkeypatch.setattr(shuffle, "CHUNK_BYTES", 20 * ROW_BYTES)
    taken = 0

    def parts():
        nonlocal taken
        for content in make_parts([part] * 40) * passes:
            taken += part
            yield content

    given_out, mixed = 0, 0
    rngs = [np.random.default_rng(number) for number in range(passes)]
    for run in stream_batches(parts(), [10] * 200, rngs):
        for batch in run.batches():
            given_out += 10
            mixed += len(set(batch["number"] // 100)) > 1
            # Besides the buffer, only the part with the next rows is held.
            assert taken - given_out <= buffer + part
    assert given_out == taken == rows * passes
    assert mixed == passes * 200


def test_each_pass_has_the_order_of_its_generator(monkeypatch):
    """The order is independent of earlier passes, so that resumed runs continue identically."""
    monkeypatch.setattr(shuffle, "SHUFFLE_BUFFER_BYTES", 100 * ROW_BYTES)
    sizes = [7] * 50

    def rows(passes):
        rngs = [np.random.default_rng(number) for number in passes]
        parts = make_parts([70] * 5) * len(passes)
        return [
            row
            for run in stream_batches(parts, sizes, rngs)
            for row in run.rows.columns()["number"]
        ]

    both = rows([0, 1])
    assert both[:350] == rows([0])
    assert both[350:] == rows([1])
    assert sorted(both[350:]) == list(range(350))
    assert both[:350] != both[350:]


def test_all_positions_are_drawn_equally_often():
    """The number of positions is not a multiple of the number drawn."""
    rng, size, count, times = np.random.default_rng(0), 23, 7, 20_000

    drawn = [shuffle._draw(rng, size, count) for _ in range(times)]

    found = np.bincount(np.concatenate(drawn), minlength=size)
    expected = times * count / size
    assert np.abs(found - expected).max() < 5 * np.sqrt(expected)


def test_all_orders_of_a_small_pass_are_equally_likely():
    orders = {}
    for seed in range(2400):
        rng = np.random.default_rng(seed)
        batches = cut_batches(make_parts([1, 3]), [2, 2], rng)
        order = tuple(delivered(batches).tolist())
        orders[order] = orders.get(order, 0) + 1

    # 24 orders, 100 expected each, with a standard deviation of 9.8.
    assert len(orders) == 24
    assert max(abs(count - 100) for count in orders.values()) < 5 * 9.8


def test_returned_batches_are_not_overwritten():
    """Memory is reused only after its arrays are released."""
    kept, copies = [], []
    for run in stream_batches(make_parts([1000] * 40), [100] * 400, [np.random.default_rng(0)]):
        for batch in run.batches():
            kept.append(batch["pair"])
            copies.append(batch["pair"].copy())

    for array, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_memory_is_reused_after_its_last_view_is_released():
    memory = BufferPool()
    float32 = np.dtype(np.float32)

    def address(array):
        return array.__array_interface__["data"][0]

    array = memory.empty((100, 4), float32)
    view = array[3:5].T[1:]
    first = address(array)
    del array
    other = memory.empty((100, 4), float32)
    assert abs(address(other) - first) >= 1600
    del view, other
    addresses = {address(memory.empty((100, 4), float32)) for _ in range(5)}
    assert addresses == {first}
    assert memory.empty((0, 4), float32).shape == (0, 4)


def test_two_threads_never_get_the_same_memory(monkeypatch):
    """The first thread is delayed between its look for free memory and its allocation."""
    memory = BufferPool()
    float32 = np.dtype(np.float32)
    memory.empty((100,), float32)  # some memory is free from now on
    real, looked, go_on = np.frombuffer, threading.Event(), threading.Event()

    def slow(*arguments):
        if threading.current_thread() is first:
            looked.set()
            go_on.wait(0.2)
        return real(*arguments)

    def take(taken):
        taken.append(memory.empty((100,), float32))
        go_on.set()

    held: list[list[np.ndarray]] = [[], []]
    first = threading.Thread(target=take, args=(held[0],))
    second = threading.Thread(target=take, args=(held[1],))
    monkeypatch.setattr(np, "frombuffer", slow)
    first.start()
    assert looked.wait(10)
    second.start()
    first.join(10)
    second.join(10)

    (one,), (other,) = held
    assert not np.shares_memory(one, other)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lengths", [[10, 9], [10, 11]])
def test_an_unplanned_number_of_rows_is_rejected(shuffle, lengths):
    rng = np.random.default_rng(0) if shuffle else None

    with pytest.raises(DataError, match=f"Expected 20 rows in a pass .* found {sum(lengths)}"):
        list(cut_batches(make_parts(lengths), [5] * 4, rng))


def test_columns_that_change_type_or_shape_are_rejected():
    first = {"x": np.zeros(4, np.int64), "y": np.zeros((4, 2))}
    for changed in ({"x": np.zeros(4)}, {"y": np.zeros((4, 3))}):
        (name,) = changed
        with pytest.raises(DataError, match=f"'{name}' has rows of shape .* after others"):
            list(cut_batches([first, {**first, **changed}], [8]))


def test_empty_batches_keep_the_columns_and_their_shapes():
    first, second = cut_batches(make_parts([2]), [2, 0], np.random.default_rng(0))

    assert len(first["number"]) == 2
    assert second["number"].shape == (0,)
    assert second["pair"].shape == (0, 2)
