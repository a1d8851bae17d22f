"""What is left behind when reading stops early or fails."""

import threading

import pyarrow as pa
import pytest
from numbered_rows import Dataset, module, take
from pyarrow import parquet

from hvd_estimators.exceptions import StoreError

pytestmark = pytest.mark.timeout(60)


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
