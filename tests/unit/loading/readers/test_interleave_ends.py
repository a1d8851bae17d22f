"""Cleanup after reading stops early or fails."""

import itertools
import queue
import threading
import traceback
from dataclasses import replace

import pytest
from numbered_rows import Dataset, module, steps, take
from parquet_files import damage_last_page
from processes import in_thread
from pyarrow import parquet

from hvd_estimators.data.remote_reads import _VERIFY_PAGES
from hvd_estimators.exceptions import StoreError
from hvd_estimators.loading.interleave import Prefetch
from hvd_estimators.store import LocalStore

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_closing_in_the_middle_of_a_pass_ends_all_threads(dataset, pool):
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


def test_an_aborted_validation_pass_ends_its_threads(dataset):
    with module(dataset, val_plan=dataset.plan(1), val_batch_size=2) as data:
        before = set(threading.enumerate())
        batches = data.val_data()
        next(batches)
        batches.close()

        assert set(threading.enumerate()) == before


@pytest.mark.parametrize("pool", ["thread", "dummy"])
@pytest.mark.parametrize(
    "damage",
    ["garbage", "truncated", "missing", "fewer row groups", *["one byte"][: len(_VERIFY_PAGES)]],
)
def test_files_damaged_since_the_plan_raise(tmp_path, pool, damage):
    dataset = Dataset(tmp_path / "train", 40, files=2, row_group_size=5)
    file = dataset.folder / "part-001.parquet"
    if damage == "one byte":
        parquet.write_table(
            parquet.read_table(file),
            file,
            row_group_size=5,
            compression="none",
            use_dictionary=False,
            write_page_checksum=True,
        )
        dataset.read_manifest()
    content = file.read_bytes()
    if damage == "garbage":
        # The footer is valid, but the data pages are not.
        file.write_bytes(b"\xff" * (len(content) - 3000) + content[-3000:])
    elif damage == "one byte":
        damage_last_page(file, row_group=1)
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "missing":
        file.unlink()
    else:
        parquet.write_table(parquet.read_table(file), file)

    where = "Row group 1 of .*" if damage == "one byte" else ""
    with pytest.raises(StoreError, match=rf"{where}part-001\.parquet'"):
        take(dataset, 20, reader_pool_type=pool)


@pytest.mark.parametrize(
    ("footer", "told"), [(None, "was replaced"), (0, "does not hold the planned rows")]
)
def test_row_groups_shortened_since_the_plan_raise(tmp_path, footer, told):
    """A manifest may have no checksums of footers."""
    dataset = Dataset(tmp_path / "train", 20, files=2, row_group_size=10)
    if footer is not None:
        train = dataset.manifest.train
        groups = tuple(replace(group, footer=footer) for group in train.row_groups)
        dataset.manifest = replace(dataset.manifest, train=replace(train, row_groups=groups))
    file = dataset.folder / "part-001.parquet"
    parquet.write_table(parquet.read_table(file).slice(0, 8), file)

    with pytest.raises(StoreError, match=rf"part-001\.parquet' {told}"):
        take(dataset, 5)


@pytest.mark.parametrize("pool", ["thread", "dummy"])
@pytest.mark.parametrize("after", [0, 2])
def test_any_error_of_the_planning_thread_ends_reading(dataset, monkeypatch, pool, after):
    with module(dataset, reader_pool_type=pool) as data:
        planned = data._train_passes

        def plan_badly(first_pass):
            yield from itertools.islice(planned(first_pass), after)
            raise SystemExit("the plan failed")

        monkeypatch.setattr(data, "_train_passes", plan_badly)
        with pytest.raises(SystemExit, match="the plan failed") as raised:
            for _ in data.train_data():
                pass

    assert "in plan_badly" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_a_module_closed_by_another_thread_starts_no_further_pass(dataset, pool):
    before = set(threading.enumerate())
    reached, may_go_on = threading.Event(), threading.Event()

    def transform(row):
        reached.set()
        assert may_go_on.wait(30)
        return row

    data = module(
        dataset, reader_pool_type=pool, transform_fn=transform, total_train_steps=steps(dataset)
    )
    reading = in_thread(lambda: sum(1 for _ in data.train_chunks()))
    assert reached.wait(30)
    closing = in_thread(data.__exit__)
    with pytest.raises(TimeoutError):
        closing.result(timeout=0.2)  # the reader has to stop first
    may_go_on.set()
    closing.result(timeout=20)
    # Without an end, this would go on pass after pass.
    assert reading.result(timeout=20) <= 1
    assert list(data.train_chunks()) == []

    assert set(threading.enumerate()) == before


def test_a_source_that_fails_in_close_ends_reading():
    class Source:
        def __next__(self):
            raise StopIteration

        def __iter__(self):
            return self

        def close(self):
            raise OSError("the connection is lost")

    with pytest.raises(OSError, match="connection is lost"):
        next(Prefetch(Source(), 1, "rows"))


def failing_store(folder, error, after):
    """Return a store of a local class, whose open fails after some calls."""

    class TwoArguments(Exception):
        """Error with other ``args`` than its constructor's, like botocore's."""

        def __init__(self, code, message):
            super().__init__(f"{code}: {message}")

    class OwnStore(LocalStore):
        opened = 0

        def local_path(self, path):
            OwnStore.opened += 1
            if OwnStore.opened > after:
                raise TwoArguments(403, error) if error == "forbidden" else error
            return super().local_path(path)

    return OwnStore(str(folder))


ERRORS = [OSError("no such host"), queue.Empty(), StopIteration(), SystemExit(3), "forbidden"]


@pytest.mark.parametrize(
    ("pool", "error"), itertools.product(["thread", "dummy"], ERRORS), ids=repr
)
def test_any_error_of_a_worker_ends_reading_with_its_traceback(dataset, pool, error):
    store = failing_store(dataset.folder, error, after=2)

    with pytest.raises((Exception, SystemExit)) as raised:
        take(dataset, 50, reader_pool_type=pool, store=store)

    told = "".join(traceback.format_exception(raised.value))
    assert "in local_path" in told
    assert (type(error).__name__ if error != "forbidden" else "TwoArguments: 403") in told
    assert str(error) in told
