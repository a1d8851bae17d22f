"""Prepared datasets: written once, kept while used, listed and cleared. No Spark."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvd_estimators import clear_prepared_data, clear_training_cache, list_prepared_data
from hvd_estimators.data.catalog import dataset_paths, manifest_path
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest, RowGroup, Split
from hvd_estimators.data.prepared import KEPT_DATASETS, hold, lend


@dataclass
class Source:
    """Rows that are told apart by a name."""

    name: str
    current: bool = True

    def same_as(self, other: Source) -> bool:
        return self.name == other.name

    def is_current(self) -> bool:
        return self.current


@pytest.fixture(autouse=True)
def _clear():
    yield
    clear_training_cache()


class Writer:
    """Writes datasets of five training rows and counts them."""

    def __init__(self, store, seconds=0.0, failures=0):
        self.store, self.seconds, self.failures = store, seconds, failures
        self.written = []

    def __call__(self, index):
        time.sleep(self.seconds)
        self.written.append(index)
        path = Path(self.store.get_train_data_path(index))
        path.mkdir(parents=True)
        (path / "part.parquet").write_bytes(b"12345678")
        if len(self.written) <= self.failures:
            raise OSError("the disk is full")
        split = Split(str(path), (RowGroup(str(path / "part.parquet"), 0, 5),))
        manifest = DatasetManifest((ColumnSpec("x", "scalar", "float32"),), split)
        self.store.write_text(manifest_path(self.store, index), manifest.to_json())


def use(store, write, name="rows", options=()):
    with lend(store, Source(name) if name else None, options, write) as index:
        return index


def folders(store):
    root = Path(store.prefix_path)
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def in_threads(count, action):
    results = [None] * count

    def run(i):
        try:
            results[i] = action()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_the_same_rows_with_the_same_options_are_written_once(store):
    write = Writer(store)
    first = use(store, write)
    assert use(store, write) == first
    others = {use(store, write, "other rows"), use(store, write, options=("other",))}
    assert first not in others
    assert len(write.written) == 1 + len(others) == 3


def test_rows_that_nobody_knows_are_written_each_time_and_deleted(store):
    write = Writer(store)
    with lend(store, None, (), write) as index:
        assert [dataset.index for dataset in list_prepared_data(store)] == [index]
    assert folders(store) == []
    assert use(store, write, name=None) != index


def test_sources_that_change_while_they_are_read_are_not_shared(store):
    write = Writer(store)
    with lend(store, Source("rows", current=False), (), write) as first:
        assert use(store, write) != first
        # The one that is in use stays, although nobody else may use it.
        assert store.exists(manifest_path(store, first))
    assert not store.exists(manifest_path(store, first))


def test_threads_wait_for_the_one_that_writes(store):
    write = Writer(store, seconds=0.2)
    indices = in_threads(6, lambda: use(store, write))
    assert write.written == [indices[0]]
    assert set(indices) == {indices[0]}


def test_what_one_thread_failed_to_write_another_writes(store):
    write = Writer(store, seconds=0.2, failures=1)
    results = in_threads(4, lambda: use(store, write))
    failed = [result for result in results if isinstance(result, OSError)]
    assert [str(error) for error in failed] == ["the disk is full"]
    assert len(write.written) == 2
    assert {result for result in results if result not in failed} == {write.written[1]}
    assert folders(store) == [f"intermediate_train_data.{write.written[1]}"]


@pytest.mark.parametrize("lost", ["_manifest.json", "part.parquet", ""])
def test_what_somebody_damaged_is_written_again(store, lost):
    write = Writer(store)
    first = use(store, write)
    store.delete(f"{store.get_train_data_path(first)}/{lost}")
    second = use(store, write)
    assert second != first
    assert use(store, write) == second
    assert folders(store) == [f"intermediate_train_data.{second}"]


def test_the_last_used_few_are_kept_and_those_in_use(store):
    write = Writer(store)
    with lend(store, Source("in use"), (), write) as in_use:
        indices = [use(store, write, str(i)) for i in range(KEPT_DATASETS)]
        assert use(store, write, "0") == indices[0]  # now the one that was used last
        newest = use(store, write, "newest")
        kept = {dataset.index for dataset in list_prepared_data(store)}
        assert kept == {in_use, newest, *indices} - {indices[1]}
    assert len(list_prepared_data(store)) == KEPT_DATASETS


def test_a_dataset_tells_what_it_is(store):
    write = Writer(store)
    index = use(store, write)
    (dataset,) = list_prepared_data(store)
    assert (dataset.index, dataset.rows, dataset.validation_rows) == (index, 5, 0)
    assert dataset.columns == ("x",)
    assert dataset.num_bytes == 8 + len(store.read(manifest_path(store, index)))
    assert abs(dataset.created.timestamp() - time.time()) < 60


def test_clearing_leaves_what_is_in_use(store):
    write = Writer(store)
    idle = use(store, write, "idle")
    with lend(store, Source("in use"), (), write) as in_use:
        assert clear_prepared_data(store, in_use) == []
        assert [dataset.index for dataset in clear_prepared_data(store)] == [idle]
        assert [dataset.index for dataset in list_prepared_data(store)] == [in_use]
    assert use(store, write, "in use") == in_use
    assert use(store, write, "idle") != idle


def test_one_dataset_is_cleared_and_one_that_is_held_is_not(store):
    write = Writer(store)
    first, second = use(store, write, "1"), use(store, write, "2")
    with hold(second):
        assert clear_prepared_data(store, second) == []
        for i in range(KEPT_DATASETS + 1):
            use(store, write, f"more {i}")
        assert store.exists(manifest_path(store, second))
    assert not store.exists(manifest_path(store, first))
    assert [dataset.index for dataset in clear_prepared_data(store, write.written[-1])] == [
        write.written[-1]
    ]
    assert clear_prepared_data(store, "0123456789ab") == []


def test_only_what_is_named_like_a_dataset_is_cleared(store):
    root = Path(store.prefix_path)
    for name in (
        "runs",
        "intermediate_train_data",
        "intermediate_train_data.mine",
        "intermediate_train_data.0123456789ab.old",
        "x.intermediate_train_data.0123456789ab",
    ):
        (root / name).mkdir(parents=True)
    before = folders(store)
    assert clear_prepared_data(store) == []
    assert folders(store) == before


PROGRAM = """
    import sys, time
    from hvd_estimators import Store
    from hvd_estimators.data.catalog import dataset_paths
    from tests.unit.test_prepared import Source, Writer
    from hvd_estimators.data.prepared import lend

    store = Store.create(sys.argv[1])

    def killed(index):
        for path in dataset_paths(store, index):
            store.fs.makedirs(path)
            store.write_text(path + "/part.parquet", "half")
        print("writing", flush=True)
        time.sleep(60)

    with lend(store, Source("rows"), (), Writer(store) if sys.argv[2] == "whole" else killed):
        pass
    print(store.fs.exists(store.prefix_path), flush=True)
"""


def start(store, what):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), store.prefix_path, what],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_datasets_are_deleted_when_the_interpreter_exits(store):
    process = start(store, "whole")
    assert process.communicate(timeout=60)[0] == "True\n"
    assert folders(store) == []


def test_what_a_killed_writer_left_is_not_listed_and_is_cleared(store):
    process = start(store, "half")
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(folders(store)) == len(dataset_paths(store, "")) == 3
    assert list_prepared_data(store) == []
    (left,) = clear_prepared_data(store)
    assert (left.rows, left.columns, left.num_bytes) == (0, (), 3 * len("half"))
    assert folders(store) == []
