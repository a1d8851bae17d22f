"""Arithmetic of shards and batches, on random layouts and small grids."""

import itertools
import pickle
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators.data.manifest import RowGroup
from hvd_estimators.exceptions import DataError
from hvd_estimators.loading.plan import MOST_OPEN_GROUPS, BatchSizes, plan_shards

# One list per file, with the rows of each of its row groups.
LAYOUTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=6)


def row_groups(layout):
    return [
        RowGroup(f"part-{number}.parquet", index, rows)
        for number, file in enumerate(layout)
        for index, rows in enumerate(file)
    ]


def stored_rows(groups):
    """List every row by its position, in stored order."""
    return [(group.file, group.index, row) for group in groups for row in range(group.rows)]


def rows_of(shard):
    return [(r.file, r.row_group, row) for r in shard for row in range(r.start, r.stop)]


@given(LAYOUTS, st.integers(1, 9))
def test_concatenated_shards_are_the_stored_rows(layout, num_shards):
    groups = row_groups(layout)

    plan = plan_shards(groups, num_shards, allow_empty=True)

    assert plan.num_shards == num_shards
    read = [row for shard in plan.shards for row in rows_of(shard)]
    assert read == stored_rows(groups)


@given(LAYOUTS, st.integers(1, 9))
def test_ranks_differ_by_at_most_one_row(layout, num_shards):
    plan = plan_shards(row_groups(layout), num_shards, allow_empty=True)

    rows = [plan.rows(rank) for rank in range(num_shards)]
    assert rows == [len(rows_of(shard)) for shard in plan.shards]
    assert max(rows) - min(rows) <= 1


@given(LAYOUTS, st.integers(1, 9))
def test_ranges_are_not_empty_and_stay_within_their_row_group(layout, num_shards):
    rows = {(group.file, group.index): group.rows for group in row_groups(layout)}

    plan = plan_shards(row_groups(layout), num_shards, allow_empty=True)

    for row_range in itertools.chain(*plan.shards):
        assert 0 <= row_range.start < row_range.stop <= rows[row_range.file, row_range.row_group]


@pytest.mark.parametrize(("rows", "num_shards"), [(0, 1), (1, 2), (3, 4)])
def test_the_error_for_too_few_rows_suggests_a_number_of_ranks(rows, num_shards):
    groups = [RowGroup("a", 0, rows)] if rows else []

    with pytest.raises(DataError, match=rf"{rows} rows.*num_proc to {max(rows, 1)} or less"):
        plan_shards(groups, num_shards)


def test_ranks_may_have_no_validation_rows():
    plan = plan_shards([RowGroup("a", 0, 2)], 5, allow_empty=True)

    assert sorted(plan.rows(rank) for rank in range(5)) == [0, 0, 0, 1, 1]
    assert plan_shards([], 3, allow_empty=True).shards == ((), (), ())


def sizes_one_by_one(rows, steps, batch_size):
    """Return the sizes of a shard's batches: each takes what it can and leaves a row for others."""
    sizes = []
    for later in reversed(range(steps)):
        sizes.append(min(batch_size, max(rows - later, min(rows, 1))))
        rows -= sizes[-1]
    return sizes


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(1, 50), st.integers(0, 9))
def test_batch_sizes_equal_those_computed_one_by_one(rows, batch_size, spare):
    steps = -(-max(rows) // batch_size) + spare
    of_shards = [sizes_one_by_one(of_shard, steps, batch_size) for of_shard in rows]
    expected = [sum(sizes) for sizes in zip(*of_shards, strict=True)]

    sizes = BatchSizes(rows, steps, batch_size)

    assert len(sizes) == steps
    assert sizes.total == sum(rows)
    assert list(sizes) == [sizes[step] for step in range(steps)] == sizes[:] == expected
    assert [sizes.before(step) for step in range(steps + 1)] == [
        *itertools.accumulate(expected, initial=0)
    ]
    assert sizes.distinct() == set().union(*of_shards)
    with pytest.raises(IndexError):
        sizes[steps]


@given(st.integers(1, 400), st.integers(1, 50), st.data())
def test_no_batch_is_empty_if_there_is_a_row_per_step(rows, batch_size, data):
    steps = data.draw(st.integers(-(-rows // batch_size), rows))

    assert min(BatchSizes([rows], steps, batch_size)) >= 1


@pytest.mark.parametrize("num_shards", range(1, 6))
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_all_ranks_take_equally_many_steps_and_see_every_row_together(num_shards, batch_size):
    for rows in range(num_shards, 40):
        plan = plan_shards([RowGroup("a", 0, rows)], num_shards)

        per_rank = [plan.batch_sizes([rank], batch_size) for rank in range(num_shards)]

        most = -(-rows // num_shards)  # rows of the largest rank
        steps = -(-most // batch_size)
        assert plan.steps(batch_size) == steps
        assert [len(sizes) for sizes in per_rank] == [steps] * num_shards
        assert sum(map(sum, per_rank)) == rows
        totals = [sum(sizes[step] for sizes in per_rank) for step in range(steps)]
        assert list(plan.global_batch_sizes(batch_size)) == totals
        assert all(total > 0 for total in totals)


@pytest.mark.parametrize("num_shards", range(1, 6))
@pytest.mark.parametrize("batch_size", [2, 3, 7, 16])
def test_no_batch_has_one_row_if_each_step_of_a_shard_can_have_two(num_shards, batch_size):
    for rows in range(num_shards, 120):
        plan = plan_shards([RowGroup("a", 0, rows)], num_shards)
        spread = pickle.loads(pickle.dumps(replace(plan, min_batch_rows=2)))

        steps = plan.steps(batch_size)
        for shard in range(num_shards):
            sizes, before = (list(each.batch_sizes([shard], batch_size)) for each in (spread, plan))
            assert (len(sizes), sum(sizes)) == (steps, plan.rows(shard))
            assert max(sizes) <= batch_size
            if 1 not in before or batch_size == 2 or plan.rows(shard) < 2 * steps:
                assert sizes == before
            else:
                # Full batches, all rows that are left but two, and two.
                assert sizes[:-2] == [batch_size] * max(steps - 2, 0) or batch_size == 3
                assert min(sizes) == sizes[-1] == 2


@given(LAYOUTS, st.integers(1, 9), st.integers(0, 99))
def test_random_shards_hold_every_row_once_and_differ_by_at_most_one(layout, num_shards, seed):
    groups = row_groups(layout)

    plan = plan_shards(groups, num_shards, allow_empty=True, seed=seed)

    rows = [row for shard in plan.shards for row in rows_of(shard)]
    assert sorted(rows) == sorted(stored_rows(groups))
    sizes = [plan.rows(rank) for rank in range(num_shards)]
    assert max(sizes) - min(sizes) <= 1
    assert plan == plan_shards(groups, num_shards, allow_empty=True, seed=seed)


def test_adjacent_row_groups_are_distributed_randomly_over_ranks():
    groups = [RowGroup("a", index, 10) for index in range(40)]

    plan = plan_shards(groups, 4, seed=0)

    for shard in plan.shards:
        numbers = [part.row_group for part in shard]
        # One of every four, in stored order.
        assert [number // 4 for number in numbers] == list(range(10))
        assert len({number % 4 for number in numbers}) > 1
    assert plan != plan_shards(groups, 4, seed=1)


@pytest.mark.parametrize(
    ("sizes", "memory", "expected"),
    [([10, 30], 100, 3), ([10, 30], 20, 1), ([10], 10**9, MOST_OPEN_GROUPS), ([10], 0, 1)],
)
def test_the_number_of_open_row_groups_fits_the_memory(sizes, memory, expected):
    groups = [RowGroup("a", index, 5, size) for index, size in enumerate(sizes)]

    assert plan_shards(groups, 1, open_bytes=memory).open_groups == expected


@given(LAYOUTS, st.integers(1, 9), st.text(max_size=5), st.integers(0, 2**32 - 1))
def test_a_rank_receives_the_plan(layout, num_shards, name, footer):
    groups = [replace(g, file=f"{name}/{g.file}", footer=footer) for g in row_groups(layout)]
    plan = plan_shards(groups, num_shards, allow_empty=True, seed=1, open_bytes=3)

    received = pickle.loads(pickle.dumps(plan))

    rows = [received.rows(shard) for shard in range(num_shards)]
    assert rows == [len(rows_of(shard)) for shard in plan.shards]
    assert received.shards[num_shards - 1] == plan.shards[-1]
    assert received == plan
    assert received == pickle.loads(pickle.dumps(received))
    assert received.shards[1:] == list(plan.shards[1:])
    with pytest.raises(IndexError):
        received.shards[num_shards]


def test_a_plan_of_many_files_is_small():
    groups = [
        RowGroup(f"bucket/data/part-{i:06}-c000.parquet", 0, 100, 9, zlib.crc32(b"%d" % i))
        for i in range(10_000)
    ]
    assert len(pickle.dumps(plan_shards(groups, 4, seed=1))) < 20 * len(groups)
