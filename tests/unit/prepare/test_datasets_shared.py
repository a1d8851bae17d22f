"""Prepared datasets shared by the fits of a grid. No Spark."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
from prepared_sets import Writer, folders, in_threads, names, use

from hvd_estimators.prepare.datasets import SharedDatasets, acquire, clear_prepared_data
from hvd_estimators.store import LocalStore

pytestmark = pytest.mark.usefixtures("cleared_cache")

INDEX = "0123456789ab"


def one_fit(datasets, store, write, **options):
    """Return the dataset of one fit, and the folders of the store during the fit."""

    @contextlib.contextmanager
    def prepare(**given):
        assert given == options
        with acquire(store, write) as index:
            yield index

    with datasets.fit(), datasets.acquire(options, prepare) as index:
        return index, folders(store)


def test_fits_with_equal_options_share_a_dataset_until_the_last_one_ends(store):
    write, datasets = Writer(store), SharedDatasets(4)
    first, found = one_fit(datasets, store, write, columns=["x"])
    assert found == names(first)
    assert one_fit(datasets, store, write, columns=["x"])[0] == first
    other, found = one_fit(datasets, store, write, columns=["y"])
    assert found == sorted(names(first) + names(other))
    assert one_fit(datasets, store, write, columns=["x"])[0] == first
    assert write.written == [first, other]
    assert folders(store) == []


def test_fits_of_different_grids_share_nothing(store):
    write = Writer(store)
    first, _ = one_fit(SharedDatasets(1), store, write, columns=["x"])
    assert folders(store) == []
    assert one_fit(SharedDatasets(1), store, write, columns=["x"])[0] != first


def test_an_unfinished_grid_leaves_no_dataset(store):
    datasets = SharedDatasets(2)
    index, _ = one_fit(datasets, store, Writer(store))
    assert folders(store) == names(index)
    del datasets
    gc.collect()
    assert folders(store) == []


def test_threads_wait_for_the_writer(store):
    write, datasets = Writer(store, seconds=0.2), SharedDatasets(6)
    found = in_threads(6, lambda: one_fit(datasets, store, write)[0])
    assert set(found) == set(write.written)
    assert len(write.written) == 1
    assert folders(store) == []


def test_another_thread_retries_a_failed_write(store):
    write, datasets = Writer(store, seconds=0.2, failures=1), SharedDatasets(4)
    results = in_threads(4, lambda: one_fit(datasets, store, write)[0])
    failed = [result for result in results if isinstance(result, OSError)]
    assert [str(error) for error in failed] == ["the disk is full"]
    assert {result for result in results if result not in failed} == {write.written[1]}
    assert len(write.written) == 2
    assert folders(store) == []


@pytest.mark.parametrize("action", ["end of a block", "clearing"])
def test_no_fit_waits_for_the_deletion_on_another_store(tmp_path, action):
    """A slow store keeps the thread that deletes on it, and no other."""
    deleting, may_go_on = threading.Event(), threading.Event()

    class Slow(LocalStore):
        def delete(self, path):
            deleting.set()
            assert may_go_on.wait(30)
            super().delete(path)

    slow, fast = Slow(str(tmp_path / "slow")), LocalStore(str(tmp_path / "fast"))
    write = Writer(slow)

    def delete():
        if action == "clearing":
            write(INDEX)
            clear_prepared_data(slow, INDEX)
        else:
            use(slow, write)

    thread = threading.Thread(target=delete, daemon=True)
    thread.start()
    try:
        assert deleting.wait(30)
        fit = threading.Thread(target=use, args=(fast, Writer(fast)), daemon=True)
        fit.start()
        fit.join(20)
        assert not fit.is_alive(), "a fit on another store waits"
        assert folders(fast) == []
    finally:
        may_go_on.set()
        thread.join(30)
    assert folders(slow) == []
