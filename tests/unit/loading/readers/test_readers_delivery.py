"""Rows of a rank, and their order."""

import itertools

import numpy as np
import pytest
from numbered_rows import ROWS, Dataset, current, flat, module, pairs, steps, take

from hvd_estimators.loading import interleave
from hvd_estimators.loading.readers import ArrowDataModule

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_unshuffled_rows_keep_stored_order_and_columns(dataset, pool):
    with module(dataset, shuffle=False, reader_pool_type=pool) as data:
        batches = list(itertools.islice(data.train_data(), steps(dataset)))

    assert flat(batch["id"].tolist() for batch in batches) == list(range(ROWS))
    for batch in batches:
        assert list(batch) == ["id", "pair"]
        assert batch["pair"].dtype == np.float32
        np.testing.assert_array_equal(batch["pair"], pairs(batch["id"]))


def test_the_seed_determines_the_batches_and_passes_differ(dataset):
    count = steps(dataset)

    once = take(dataset, 2 * count)

    assert once == take(dataset, 2 * count)
    assert once == take(dataset, 2 * count, reader_pool_type="dummy")
    assert once == take(dataset, 2 * count, train_reader_worker_count=5)
    assert once != take(dataset, 2 * count, random_seed=8)
    assert flat(once[:count]) != flat(once[count:])
    assert flat(once[:count]) != list(range(ROWS))


def test_sorted_rows_are_mixed_by_reading_many_row_groups(tmp_path, monkeypatch):
    """Two ranks read through buffers for an eighth of their rows."""
    monkeypatch.setattr(interleave, "_LEAST_SLICE", 64)
    rows, batch_size = 4000, 50
    dataset = Dataset(tmp_path / "train", rows, files=4, row_group_size=100)
    plan = dataset.plan(2, seed=3, open_bytes=2**40)
    assert min(plan.open_groups, len(plan.shards[0])) == 20

    def take_rank(rank, **options):
        options = {"train_plan": plan, "shuffle_buffer_size": 250 * 16, **options}
        return take(dataset, 80, rank=rank, size=2, batch_size=batch_size, **options)

    ranks = [take_rank(rank) for rank in (0, 1)]
    for first in (0, 40):
        order = [flat(batches[first : first + 40]) for batches in ranks]
        assert sorted(flat(order)) == list(range(rows))
        for own in order:
            assert abs(np.corrcoef(own, np.arange(len(own)))[0, 1]) < 5 / np.sqrt(len(own))
    labels = [
        len(np.unique(np.array(batch) * 10 // rows)) for batches in ranks for batch in batches
    ]
    # With 50 rows of ten labels, a label is missing in one of 20 batches in random order.
    assert np.mean(labels) > 9.5
    assert min(labels) >= 7
    assert take_rank(0, reader_pool_type="dummy") == ranks[0]
    assert take_rank(0, train_reader_worker_count=7) == ranks[0]
    assert take_rank(0, skip_train_steps=53)[:27] == ranks[0][53:]
    current.append(ArrowDataModule)
    assert take_rank(0) == ranks[0]
    current.pop()


def test_each_bundle_of_a_pass_is_mixed(tmp_path, monkeypatch):
    """Five of forty row groups at a time: one from each fifth of the stored order."""
    monkeypatch.setattr(interleave, "_LEAST_SLICE", 64)
    dataset = Dataset(tmp_path / "train", 4000, files=4, row_group_size=100)
    size = max(group.open_bytes for group in dataset.manifest.train.row_groups)
    plan = dataset.plan(1, seed=3, open_bytes=5 * size + 1)
    assert plan.open_groups == 5

    batches = take(dataset, 40, batch_size=100, train_plan=plan, shuffle_buffer_size=2000)

    assert sorted(flat(batches)) == list(range(4000))
    fifths = [len(np.unique(np.array(batch) // 800)) for batch in batches]
    assert min(fifths) == 5


def test_ranks_shuffle_in_different_orders(tmp_path):
    dataset = Dataset(tmp_path / "twice", 40, files=1, row_group_size=20)

    first = flat(take(dataset, 5, rank=0, size=2))
    second = flat(take(dataset, 5, rank=1, size=2))

    assert first != [row - 20 for row in second]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("skip", [1, 5, 14, 15, 33])
def test_resumed_runs_continue_like_uninterrupted_ones(dataset, skip, cache, shuffle):
    """Resume in the middle of a pass, at its end, and in a later one (14 steps per pass)."""
    assert steps(dataset) == 14
    options = {"shuffle": shuffle, "inmemory_cache_all": cache}

    whole = take(dataset, 45, **options)

    assert take(dataset, 45 - skip, skip_train_steps=skip, **options) == whole[skip:]


@pytest.mark.parametrize("skip", [0, 3, 17])
def test_global_sizes_are_sums_of_the_ranks_batches(dataset, skip):
    size, count = 3, 12
    per_rank = [
        take(dataset, count, rank=rank, size=size, skip_train_steps=skip) for rank in range(size)
    ]

    with module(dataset, size=size, skip_train_steps=skip) as data:
        totals = list(itertools.islice(data.global_train_sizes(), count))

    assert totals == [sum(map(len, batches)) for batches in zip(*per_rank, strict=True)]
