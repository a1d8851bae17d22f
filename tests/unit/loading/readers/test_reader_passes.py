"""Rows that are cached, transformed, validated on, or read in part."""

import itertools

import numpy as np
import pytest
from numbered_rows import ROWS, Dataset, flat, module, pairs, steps, take

from hvd_estimators.loading.transform import Transformation

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("shuffle", [False, True])
def test_cached_rows_outlive_their_files(tmp_path, shuffle):
    dataset = Dataset(tmp_path / "train", 20, files=2, row_group_size=4)
    count = steps(dataset)

    with module(dataset, shuffle=shuffle, inmemory_cache_all=True) as data:
        batches = data.train_data()
        passes = [[next(batches)["id"].tolist() for _ in range(count)]]
        for file in dataset.folder.iterdir():
            file.unlink()
        passes += [[next(batches)["id"].tolist() for _ in range(count)] for _ in range(2)]

    assert [sorted(flat(batches)) for batches in passes] == [list(range(20))] * 3
    orders = {str(batches) for batches in passes}
    assert len(orders) == (3 if shuffle else 1)


def test_all_cached_rows_are_shuffled_together(tmp_path):
    """The order depends neither on a small buffer nor on earlier passes."""
    dataset = Dataset(tmp_path / "train", 4000, files=1, row_group_size=4000)
    options = {"batch_size": 50, "inmemory_cache_all": True, "shuffle_buffer_size": 1000}

    batches = take(dataset, 160, **options)

    for order in (flat(batches[:80]), flat(batches[80:])):
        assert sorted(order) == list(range(4000))
        assert abs(np.corrcoef(order, np.arange(4000))[0, 1]) < 5 / np.sqrt(3999)
    assert take(dataset, 80, skip_train_steps=80, **options) == batches[80:]
    assert take(dataset, 80, reader_pool_type="dummy", **options) == batches[:80]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_every_validation_pass_has_the_ranks_rows_in_stored_order(dataset, tmp_path, pool, cache):
    validation = Dataset(tmp_path / "val", 11, files=2, row_group_size=3, first=1000)
    rows = []
    for rank in range(3):
        with module(
            dataset,
            rank=rank,
            size=3,
            val_plan=validation.plan(3),
            val_batch_size=2,
            reader_pool_type=pool,
            inmemory_cache_all=cache,
        ) as data:
            passes = [[batch["id"].tolist() for batch in data.val_data()] for _ in range(3)]
        assert passes[0] == passes[1] == passes[2]
        assert all(0 < len(batch) <= 2 for batch in passes[0])
        rows += flat(passes[0])

    assert rows == list(range(1000, 1011))


def test_validation_between_batches_does_not_disturb_training(dataset, tmp_path):
    validation = Dataset(tmp_path / "val", 5, files=1, row_group_size=2, first=1000)
    expected = take(dataset, 20)

    got = []
    with module(dataset, val_plan=validation.plan(1)) as data:
        batches = data.train_data()
        for _ in range(20):
            got.append(next(batches)["id"].tolist())
            next(iter(data.val_data()))

    assert got == expected


def test_a_rank_without_validation_rows_has_no_validation_batches(dataset, tmp_path):
    validation = Dataset(tmp_path / "val", 1, files=1, row_group_size=1, first=1000)
    plan = validation.plan(2, allow_empty=True)

    batches = []
    for rank in range(2):
        with module(dataset, rank=rank, size=2, val_plan=plan) as data:
            batches += [batch["id"].tolist() for batch in data.val_data()]
    assert batches == [[1000]]

    with module(dataset) as data:
        assert list(data.val_data()) == []


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("pool", ["thread", "process"])
def test_rows_are_transformed_once_per_pass(dataset, cache, pool):
    def transform(row):
        return {"id": row["id"], "sum": row["pair"].sum() + 1, "three": [row["id"]] * 3}

    count = steps(dataset)
    plain = take(dataset, 2 * count, inmemory_cache_all=cache)

    options = {"inmemory_cache_all": cache, "reader_pool_type": pool}
    with module(dataset, transform_fn=transform, **options) as data:
        batches = list(itertools.islice(data.train_data(), 2 * count))

    assert [batch["id"].tolist() for batch in batches] == plain
    for batch in batches:
        assert list(batch) == ["id", "sum", "three"]
        np.testing.assert_array_equal(batch["sum"], np.ones(len(batch["id"])))
        np.testing.assert_array_equal(batch["three"], np.stack([batch["id"]] * 3, axis=1))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(
    ("by_row", "pool"), [(False, "thread"), (True, "thread"), (False, "process")]
)
def test_transformations_may_edit_their_input(dataset, cache, by_row, pool):
    """Each pass starts from the stored values."""

    def edit(fields):
        fields["pair"] *= 2
        fields["id"] += 0
        return fields

    edits = Transformation(edit) if by_row else Transformation(batch_function=edit)
    count = steps(dataset)
    with module(
        dataset,
        transformation=edits,
        inmemory_cache_all=cache,
        reader_pool_type=pool,
        val_plan=dataset.plan(1),
        val_batch_size=4,
    ) as data:
        batches = list(itertools.islice(data.train_data(), 3 * count))
        for _ in range(3):
            batches += data.val_data()

    assert sum(len(batch["id"]) for batch in batches) == 6 * ROWS
    for batch in batches:
        np.testing.assert_array_equal(batch["pair"], 2 * pairs(batch["id"]))


def test_epochs_may_be_shorter_or_longer_than_the_data(dataset):
    """The stream is endless and independent of epochs: 20 steps are a pass of 14 and 6 more."""
    count = steps(dataset)

    batches = take(dataset, 20, shuffle=False)

    assert flat(batches[:count]) == list(range(ROWS))
    assert batches[count:] == batches[: 20 - count]
