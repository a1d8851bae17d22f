"""What a rank reads, through each of the readers."""

import contextlib
import gc
import itertools
import threading

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.exceptions import StoreError
from hvd_estimators.loading.readers import mixing
from hvd_estimators.loading.readers.arrow import ArrowDataModule
from hvd_estimators.loading.sharding import plan_shards
from hvd_estimators.loading.transformation import Transformation
from hvd_estimators.parquet.discovery import read_manifest
from hvd_estimators.parquet.manifest import ColumnSpec
from hvd_estimators.store import LocalStore

pytestmark = pytest.mark.timeout(60)

ROWS = 53
READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed beside today's PyArrow
    from hvd_estimators.loading.readers.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule


_current = []


@pytest.fixture(params=READERS, autouse=True)
def reader(request):
    """Run every test with each reader."""
    _current.append(READERS[request.param])
    yield request.param
    _current.pop()


def current_reader():
    return _current[-1]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    gc.collect()  # the threads with which Petastorm looks at files end with their executor
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)
    assert not [thread.name for thread in left if thread.is_alive()]


class Dataset:
    """Numbered rows in several files and row groups, and what is to be told of them."""

    def __init__(self, folder, rows, files, row_group_size, first=0):
        folder.mkdir()
        self.folder = folder
        parts = np.array_split(np.arange(first, first + rows), files)
        for number, ids in enumerate(parts):
            table = pa.table(
                {
                    "id": ids,
                    "pair": pa.array(pairs(ids).tolist(), pa.list_(pa.float32())),
                    "unused": [f"text {i}" for i in ids],
                }
            )
            path = folder / f"part-{number:03}.parquet"
            parquet.write_table(table, path, row_group_size=row_group_size)
        self.manifest = read_manifest(LocalStore(str(folder)), str(folder), None, ["id", "pair"])

    def plan(self, num_shards, **options):
        return plan_shards(self.manifest.train.row_groups, num_shards, **options)


def pairs(ids):
    return np.stack([ids, -ids], axis=1).astype(np.float32)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Dataset(tmp_path_factory.mktemp("data") / "train", ROWS, files=3, row_group_size=7)


def module(dataset, rank=0, size=1, batch_size=4, **options):
    options = {"reader_pool_type": "thread", "random_seed": 7, **options}
    options = {"train_plan": dataset.plan(size), **options}
    return current_reader()(
        train_dir=str(dataset.folder),
        val_dir=None,
        columns=dataset.manifest.columns,
        cur_shard=rank,
        shard_count=size,
        train_batch_size=batch_size,
        **options,
    )


def steps(dataset, size=1, batch_size=4):
    return dataset.plan(size).steps(batch_size)


def take(dataset, count, **options):
    """Return the rows of the first training batches, one list per batch."""
    with module(dataset, **options) as data:
        return [batch["id"].tolist() for batch in itertools.islice(data.train_data(), count)]


def flat(batches):
    return list(itertools.chain(*batches))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("pool", ["thread", "dummy"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_each_row_is_delivered_once_per_pass_whatever_the_number_of_ranks(
    dataset, size, pool, shuffle
):
    count = steps(dataset, size)
    passes = [[], []]
    for rank in range(size):
        batches = take(
            dataset, 2 * count, rank=rank, size=size, reader_pool_type=pool, shuffle=shuffle
        )
        sizes = dataset.plan(size).batch_sizes(rank, 4)
        assert [len(batch) for batch in batches] == sizes * 2
        passes[0] += flat(batches[:count])
        passes[1] += flat(batches[count:])

    assert sorted(passes[0]) == sorted(passes[1]) == list(range(ROWS))


def test_processes_deliver_the_same_batches_as_threads(dataset):
    """Two passes: processes answer in any order, which must not show."""
    count = 2 * steps(dataset)

    assert take(dataset, count, reader_pool_type="process") == take(dataset, count)


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_unshuffled_rows_come_in_stored_order_with_their_columns(dataset, pool):
    with module(dataset, shuffle=False, reader_pool_type=pool) as data:
        batches = list(itertools.islice(data.train_data(), steps(dataset)))

    assert flat(batch["id"].tolist() for batch in batches) == list(range(ROWS))
    for batch in batches:
        assert list(batch) == ["id", "pair"]
        assert batch["pair"].dtype == np.float32
        np.testing.assert_array_equal(batch["pair"], pairs(batch["id"]))


def test_shuffled_rows_keep_their_columns(dataset):
    with module(dataset) as data:
        for batch in itertools.islice(data.train_data(), steps(dataset)):
            np.testing.assert_array_equal(batch["pair"], pairs(batch["id"]))


def test_the_seed_decides_the_batches_and_passes_differ(dataset):
    count = steps(dataset)

    once = take(dataset, 2 * count)

    assert once == take(dataset, 2 * count)
    assert once == take(dataset, 2 * count, reader_pool_type="dummy")
    assert once == take(dataset, 2 * count, train_reader_worker_count=5)
    assert once != take(dataset, 2 * count, random_seed=8)
    assert flat(once[:count]) != flat(once[count:])
    assert flat(once[:count]) != list(range(ROWS))


def test_many_row_groups_are_read_at_a_time_so_that_sorted_rows_come_mixed(tmp_path, monkeypatch):
    """By two ranks, through buffers that hold an eighth of their rows."""
    monkeypatch.setattr(mixing, "_LEAST_SLICE", 64)
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
    assert take_rank(0, reader_pool_type="process") == ranks[0]
    assert take_rank(0, skip_train_steps=53)[:27] == ranks[0][53:]
    _current.append(ArrowDataModule)
    assert take_rank(0) == ranks[0]
    _current.pop()


def test_a_pass_over_several_bundles_is_mixed_in_each(tmp_path, monkeypatch):
    """Five row groups of forty at a time: one of each fifth of the stored order."""
    monkeypatch.setattr(mixing, "_LEAST_SLICE", 64)
    dataset = Dataset(tmp_path / "train", 4000, files=4, row_group_size=100)
    size = max(group.open_bytes for group in dataset.manifest.train.row_groups)
    plan = dataset.plan(1, seed=3, open_bytes=5 * size + 1)
    assert plan.open_groups == 5

    batches = take(dataset, 40, batch_size=100, train_plan=plan, shuffle_buffer_size=2000)

    assert sorted(flat(batches)) == list(range(4000))
    fifths = [len(np.unique(np.array(batch) // 800)) for batch in batches]
    assert min(fifths) == 5


def test_ranks_shuffle_in_orders_of_their_own(tmp_path):
    dataset = Dataset(tmp_path / "twice", 40, files=1, row_group_size=20)

    first = flat(take(dataset, 5, rank=0, size=2))
    second = flat(take(dataset, 5, rank=1, size=2))

    assert first != [row - 20 for row in second]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("skip", [1, 5, 14, 15, 33])
def test_a_resumed_run_goes_on_where_the_uninterrupted_one_would(dataset, skip, cache, shuffle):
    """In the middle of a pass, at its end, and in a later one (a pass has 14 steps)."""
    assert steps(dataset) == 14
    options = {"shuffle": shuffle, "inmemory_cache_all": cache}

    whole = take(dataset, 45, **options)

    assert take(dataset, 45 - skip, skip_train_steps=skip, **options) == whole[skip:]


@pytest.mark.parametrize("skip", [0, 3, 17])
def test_global_sizes_are_the_ranks_batches_added_up(dataset, skip):
    size, count = 3, 12
    per_rank = [
        take(dataset, count, rank=rank, size=size, skip_train_steps=skip) for rank in range(size)
    ]

    with module(dataset, size=size, skip_train_steps=skip) as data:
        totals = list(itertools.islice(data.global_train_sizes(), count))

    assert totals == [sum(map(len, batches)) for batches in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_kept_in_memory_outlive_their_files(tmp_path, shuffle):
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


def test_all_rows_that_are_kept_in_memory_are_shuffled_together(tmp_path):
    """However small the buffer is, and in an order that does not ask what was read before."""
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
def test_every_validation_pass_is_the_ranks_rows_in_stored_order(dataset, tmp_path, pool, cache):
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


def test_training_goes_on_undisturbed_by_validation_between_its_batches(dataset, tmp_path):
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
def test_rows_are_transformed_once_in_every_pass(dataset, cache):
    def transform(row):
        return {"id": row["id"], "sum": row["pair"].sum() + 1, "three": [row["id"]] * 3}

    count = steps(dataset)
    plain = take(dataset, 2 * count, inmemory_cache_all=cache)

    with module(dataset, transform_fn=transform, inmemory_cache_all=cache) as data:
        batches = list(itertools.islice(data.train_data(), 2 * count))

    assert [batch["id"].tolist() for batch in batches] == plain
    for batch in batches:
        assert list(batch) == ["id", "sum", "three"]
        np.testing.assert_array_equal(batch["sum"], np.ones(len(batch["id"])))
        np.testing.assert_array_equal(batch["three"], np.stack([batch["id"]] * 3, axis=1))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_transformation_may_edit_what_it_is_given(dataset, cache, by_row):
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
        val_plan=dataset.plan(1),
        val_batch_size=4,
    ) as data:
        batches = list(itertools.islice(data.train_data(), 3 * count))
        for _ in range(3):
            batches += data.val_data()

    assert sum(len(batch["id"]) for batch in batches) == 6 * ROWS
    for batch in batches:
        np.testing.assert_array_equal(batch["pair"], 2 * pairs(batch["id"]))


def test_an_epoch_can_be_cut_and_can_cycle_the_data(dataset):
    """The stream has no end and no memory of epochs: 20 steps are a pass of 14, and 6 more."""
    count = steps(dataset)

    batches = take(dataset, 20, shuffle=False)

    assert flat(batches[:count]) == list(range(ROWS))
    assert batches[count:] == batches[: 20 - count]


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_leaving_in_the_middle_of_a_pass_ends_all_threads(dataset, pool):
    before = set(threading.enumerate())

    with module(dataset, reader_pool_type=pool) as data:
        batches = data.train_data()
        next(batches)
        if pool == "thread":
            assert set(threading.enumerate()) - before

    assert set(threading.enumerate()) == before


def test_an_error_in_the_training_loop_ends_all_threads(dataset):
    before = set(threading.enumerate())

    def train():
        with module(dataset) as data:
            next(data.train_data())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()

    assert set(threading.enumerate()) == before


def test_a_validation_pass_that_is_broken_off_ends_its_threads(dataset):
    with module(dataset, val_plan=dataset.plan(1), val_batch_size=2) as data:
        before = set(threading.enumerate())
        batches = data.val_data()
        next(batches)
        batches.close()

        assert set(threading.enumerate()) == before


@pytest.mark.parametrize("pool", ["thread", "dummy"])
@pytest.mark.parametrize("damage", ["garbage", "truncated", "missing", "fewer row groups"])
def test_a_file_that_was_damaged_since_the_plan_raises(tmp_path, pool, damage):
    dataset = Dataset(tmp_path / "train", 40, files=2, row_group_size=5)
    file = dataset.folder / "part-001.parquet"
    content = file.read_bytes()
    if damage == "garbage":
        # The footer is whole, what it points at is not.
        file.write_bytes(b"\xff" * (len(content) - 3000) + content[-3000:])
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "missing":
        file.unlink()
    else:
        parquet.write_table(parquet.read_table(file), file)

    with pytest.raises((OSError, pa.ArrowException)):
        take(dataset, 20, reader_pool_type=pool)


def test_a_row_group_that_became_shorter_since_the_plan_raises(tmp_path):
    dataset = Dataset(tmp_path / "train", 20, files=2, row_group_size=10)
    file = dataset.folder / "part-001.parquet"
    parquet.write_table(parquet.read_table(file).slice(0, 8), file)

    with pytest.raises(StoreError, match=r"part-001\.parquet' does not hold the planned rows"):
        take(dataset, 5)


@pytest.mark.parametrize("name", ["with space", "a#b?c%20d", "day=2024-01-01", "[1]*"])
def test_paths_with_characters_that_urls_and_globs_treat_specially(tmp_path, name):
    dataset = Dataset(tmp_path / name, 6, files=2, row_group_size=2)

    assert flat(take(dataset, 2, shuffle=False)) == list(range(6))


def test_columns_with_characters_that_regular_expressions_treat_specially(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    names = ["a.b", "a b", "a+b (c)", "class", "ü", "1st", "_x", "a"]
    table = pa.table({name: [float(i), 10.0 * i] for i, name in enumerate(names)})
    parquet.write_table(table.append_column("ab", [["x", "y"]]), folder / "a.parquet")
    manifest = read_manifest(LocalStore(str(tmp_path)), str(folder), None, names)

    with current_reader()(
        train_dir=str(folder),
        val_dir=None,
        columns=manifest.columns,
        train_plan=plan_shards(manifest.train.row_groups, 1),
        train_batch_size=2,
        shuffle=False,
    ) as data:
        batch = next(data.train_data())

    assert {name: array.tolist() for name, array in batch.items()} == table.to_pydict()


def test_sparse_columns_are_read_as_dense_arrays(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    dense = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3]], np.float32)
    stored = pa.table(
        {
            "v__indices": pa.array([[1], [], [0, 2]], pa.list_(pa.int32())),
            "v__values": pa.array([[2], [], [1, 3]], pa.list_(pa.float32())),
            "id": [0, 1, 2],
        }
    )
    parquet.write_table(stored, folder / "a.parquet", row_group_size=2)
    manifest = read_manifest(LocalStore(str(tmp_path)), str(folder), None, ["id"])

    with current_reader()(
        train_dir=str(folder),
        val_dir=None,
        columns=[ColumnSpec("v", "sparse", "float32", (3,))],
        train_plan=plan_shards(manifest.train.row_groups, 1),
        train_batch_size=3,
        shuffle=False,
    ) as data:
        batch = next(data.train_data())

    np.testing.assert_array_equal(batch["v"], dense)
