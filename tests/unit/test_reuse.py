"""Prepared datasets: written once, kept while used, listed and cleared. No Spark."""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import os
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
from hvd_estimators.exceptions import StoreError
from hvd_estimators.parquet.manifest import ColumnSpec, DatasetManifest, RowGroup, Split
from hvd_estimators.prepare.catalog import (
    dataset_paths,
    load_manifest,
    manifest_path,
    new_hold_path,
    owner_path,
)
from hvd_estimators.prepare.reuse import KEPT_DATASETS, hold, lend
from hvd_estimators.store.claims import STALE_SECONDS, Claim
from hvd_estimators.store.owners import Owner, this_process


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


def names(index):
    return [f"intermediate_train_data.{index}", f"intermediate_train_data.{index}.owner"]


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
    assert folders(store) == names(write.written[1])


@pytest.mark.parametrize("lost", ["_manifest.json", "part.parquet", ""])
def test_what_somebody_damaged_is_written_again(store, lost):
    write = Writer(store)
    first = use(store, write)
    store.delete(f"{store.get_train_data_path(first)}/{lost}")
    second = use(store, write)
    assert second != first
    assert use(store, write) == second
    assert folders(store) == names(second)


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
    with hold(store, second):
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
    from hvd_estimators.prepare.catalog import dataset_paths
    from tests.unit.test_reuse import Source, Writer
    from hvd_estimators.prepare.reuse import hold, lend

    store, what = Store.create(sys.argv[1]), sys.argv[2]
    if len(what) == len("0123456789ab"):
        with hold(store, what):
            print("holding", flush=True)
            sys.stdin.readline()
        sys.exit()

    def killed(index):
        for path in dataset_paths(store, index)[:-1]:
            store.fs.makedirs(path)
            store.write_text(path + "/part.parquet", "half")
        print("writing", flush=True)
        time.sleep(60)

    with lend(store, Source("rows"), (), killed if what == "half" else Writer(store)) as index:
        pass
    print(index, flush=True)
    if what == "kept":
        sys.stdin.readline()
"""


def start(store, what):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), store.prefix_path, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_datasets_are_deleted_when_the_interpreter_exits(store):
    process = start(store, "whole")
    assert len(process.communicate(timeout=60)[0]) == len("0123456789ab\n")
    assert process.returncode == 0
    assert store.exists(store.prefix_path)
    assert folders(store) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_process_left_that_a_signal_ended_goes_when_the_next_one_writes(store, number):
    process = start(store, "kept")
    left = process.stdout.readline().strip()
    # As long as it lives, its dataset stays.
    write = Writer(store)
    first = use(store, write)
    assert {d.index for d in clear_prepared_data(store)} == {first}
    assert [d.index for d in list_prepared_data(store)] == [left]
    process.send_signal(number)
    process.wait(60)
    assert [d.index for d in list_prepared_data(store)] == [left]
    second = use(store, write)
    assert folders(store) == names(second)


def test_what_lives_elsewhere_is_cleared_by_name_or_by_force(store):
    with start(store, "kept") as process:
        left = process.stdout.readline().strip()
        assert clear_prepared_data(store) == []
        assert [d.index for d in clear_prepared_data(store, left)] == [left]
        assert folders(store) == []
    with start(store, "kept") as process:
        left = process.stdout.readline().strip()
        assert [d.index for d in clear_prepared_data(store, force=True)] == [left]
        assert folders(store) == []


@pytest.mark.parametrize(
    "owner", [None, "", "{", '{"machine": "another", "pid": 1, "started": "1"}']
)
def test_what_cannot_be_known_to_be_left_is_left_alone(store, owner):
    Writer(store)("0123456789ab")
    if owner is not None:
        store.write_text(owner_path(store, "0123456789ab"), owner)
    use(store, Writer(store))
    clear_prepared_data(store)
    assert [d.index for d in list_prepared_data(store)] == ["0123456789ab"]
    assert len(clear_prepared_data(store, force=True)) == 1
    assert folders(store) == []


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"columns": 3}',
    b'{"columns": [{"name": "x"}], "train": null, "validation": null}',
    b'{"columns": [], "train": {"path": "", "row_groups": [{"rows": "many"}]}}',
]


@pytest.mark.parametrize("document", DAMAGED)
def test_a_damaged_manifest_breaks_neither_listing_nor_clearing_nor_the_next_fit(store, document):
    write = Writer(store)
    first, other = use(store, write), use(store, write, "other")
    Path(manifest_path(store, first)).write_bytes(document)
    with pytest.raises(StoreError, match=rf"dataset '{first}' is damaged .*Prepare the data again"):
        load_manifest(store, first)
    assert [d.index for d in list_prepared_data(store)] == [other]
    second = use(store, write)
    assert folders(store) == sorted(names(other) + names(second))
    Path(manifest_path(store, second)).write_bytes(document)
    assert {d.index for d in clear_prepared_data(store)} == {other, second}
    assert folders(store) == []


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line that is run in some files."""

    def __init__(self, n):
        self.left = n
        self.where = None

    def __call__(self, frame, event, argument):
        if Path(frame.f_code.co_filename).name not in INTERRUPTED:
            return None
        # Between a block's end and the release of its lock, which is C code, Python looks for
        # no signals; a tracer is called there all the same.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.strip().startswith("with self._lock"):
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


INTERRUPTED = {
    "reuse.py",
    "registry.py",
    "claims.py",
    "owners.py",
    "contextlib.py",
    "test_reuse.py",
}


@pytest.mark.parametrize("name", ["rows", None])
def test_an_interrupt_at_any_point_leaves_nothing_locked_or_behind(store, name):
    points = 0
    for n in itertools.count(1):
        interrupt = Interrupt(n)
        try:
            sys.settrace(interrupt)
            use(store, Writer(store), name)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if interrupt.where is None:
            break
        points += 1
        # Another thread needs not wait, and all can be deleted.
        (found,) = in_threads(1, lambda: use(store, Writer(store), name))
        assert isinstance(found, str), interrupt.where
        clear_prepared_data(store)
        assert folders(store) == [], interrupt.where
    assert points > 50


def test_an_interrupt_that_is_looked_at_later_does_not_stop_the_next_fit(store):
    """Notebooks keep the last exception, and with it all that was going on."""
    kept = []
    for n in itertools.count(1):
        interrupt = Interrupt(n)
        try:
            sys.settrace(interrupt)
            use(store, Writer(store))
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        if interrupt.where is None:
            break
        assert use(store, Writer(store))
        clear_prepared_data(store)
    kept.clear()
    use(store, Writer(store))
    clear_prepared_data(store)
    assert folders(store) == []


def test_what_a_killed_writer_left_is_not_listed_and_is_cleared(store):
    process = start(store, "half")
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(folders(store)) == len(dataset_paths(store, "")) == 3
    assert list_prepared_data(store) == []
    (left,) = clear_prepared_data(store)
    assert (left.rows, left.columns, left.num_bytes) == (0, (), 2 * len("half"))
    assert folders(store) == []


def hold_elsewhere(store, index):
    process = start(store, index)
    assert process.stdout.readline() == "holding\n"
    return process


def test_what_another_application_reads_stays_until_it_is_done(store):
    write = Writer(store)
    index = use(store, write)
    reader = hold_elsewhere(store, index)
    assert clear_prepared_data(store) == []
    assert clear_prepared_data(store, index) == []
    for i in range(KEPT_DATASETS + 1):
        use(store, write, f"more {i}")
    clear_training_cache()
    assert [d.index for d in list_prepared_data(store)] == [index]
    # It is paused, which is no end.
    reader.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, reader.pid, os.WSTOPPED | os.WNOWAIT)
    assert clear_prepared_data(store) == []
    reader.send_signal(signal.SIGCONT)
    reader.communicate("\n")
    assert folders(store) == names(index)
    assert [d.index for d in clear_prepared_data(store)] == [index]
    assert folders(store) == []


def test_a_killed_reader_holds_nothing(store):
    index = use(store, Writer(store))
    reader = hold_elsewhere(store, index)
    reader.kill()
    reader.communicate()
    assert len(folders(store)) == len(names(index)) + 1
    assert [d.index for d in clear_prepared_data(store)] == [index]
    assert folders(store) == []


def test_force_takes_what_others_read(store):
    index = use(store, Writer(store))
    with hold_elsewhere(store, index) as reader:
        assert [d.index for d in clear_prepared_data(store, force=True)] == [index]
        reader.communicate("\n")
    assert folders(store) == []


def test_what_others_read_outlives_the_application_that_wrote_it(store):
    writer = start(store, "kept")
    index = writer.stdout.readline().strip()
    reader = hold_elsewhere(store, index)
    writer.communicate("\n")
    assert writer.returncode == 0
    assert [d.index for d in list_prepared_data(store)] == [index]
    use(store, Writer(store))
    assert index in [d.index for d in list_prepared_data(store)]
    reader.communicate("\n")
    use(store, Writer(store), "other")
    assert index not in [d.index for d in list_prepared_data(store)]
    clear_prepared_data(store)
    assert folders(store) == []


def make_foreign(store, path, seconds):
    """Let a claim be of another machine, and its last heartbeat some time ago."""
    claim = Claim.from_json(store.read(path))
    other = dataclasses.replace(claim, owner=Owner("another", 1, "1"))
    store.write_text(path, other.to_json())
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("by", ["clearing", "the next application"])
def test_what_another_machine_left_goes_when_it_has_been_silent_for_long(store, by):
    left = "0123456789ab"
    Writer(store)(left)
    owner, holder = owner_path(store, left), new_hold_path(store, left)
    for path in (owner, holder):
        store.write_text(path, Claim(this_process(), token="t").to_json())

    def cleared():
        if by == "clearing":
            clear_prepared_data(store)
        else:
            use(store, Writer(store), name=None)
        return left not in [d.index for d in list_prepared_data(store)]

    # A minute of silence is a pause.
    for owners_silence, readers_silence, gone in (
        (60, 60, False),
        (STALE_SECONDS + 1, 60, False),
        (60, STALE_SECONDS + 1, False),
        (STALE_SECONDS + 1, STALE_SECONDS + 1, True),
    ):
        make_foreign(store, owner, owners_silence)
        make_foreign(store, holder, readers_silence)
        assert cleared() is gone
    clear_prepared_data(store)
    assert folders(store) == []


def test_who_deletes_a_dataset_and_is_interrupted_leaves_nothing_that_looks_whole(
    store, monkeypatch
):
    index = use(store, Writer(store))
    delete = type(store).delete

    def fail_second(store, path):
        if not deleted:
            deleted.append(path)
            return delete(store, path)
        raise OSError("interrupted")

    deleted = []
    with monkeypatch.context() as patched:
        patched.setattr(type(store), "delete", fail_second)
        with pytest.raises(OSError, match="interrupted"):
            clear_prepared_data(store)
    assert list_prepared_data(store) == []
    assert store.exists(store.get_train_data_path(index))
    assert [d.index for d in clear_prepared_data(store)] == [index]
    assert folders(store) == []
