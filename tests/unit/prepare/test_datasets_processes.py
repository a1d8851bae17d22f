"""Prepared datasets that other processes write, read and leave behind. No Spark."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from prepared_sets import Writer, folders, names, use

from hvd_estimators import clear_prepared_data, list_prepared_data
from hvd_estimators.prepare.datasets import acquire, dataset_paths, load_manifest

pytestmark = pytest.mark.usefixtures("cleared_cache")


PROGRAM = """
    import sys, threading, time
    from hvd_estimators import Store
    from hvd_estimators.prepare.datasets import acquire, dataset_paths
    from hvd_estimators.store import retries
    from tests.helpers.prepared_sets import Writer

    store, what = Store.create(sys.argv[1]), sys.argv[2]
    def killed(index):
        for path in dataset_paths(store, index)[:-1]:
            store.fs.makedirs(path)
            store.write_text(path + "/part.parquet", "half")
        print("writing", flush=True)
        time.sleep(60)

    def use():
        with acquire(store, killed if what == "half" else Writer(store)) as index:
            print(index, flush=True)
            if what == "kept":
                sys.stdin.readline()
            if what != "thread":
                sys.exit()
            while threading.main_thread().is_alive():
                time.sleep(0.1)
            # Python waits for this thread, after the functions that run before.
            time.sleep(1)
            path = dataset_paths(store, index)[0]
            print(bool(store.exists(path)), retries.RETRY_SECONDS > 30, flush=True)
            del index

    if what == "thread":
        threading.Thread(target=use).start()
    else:
        use()
"""


def start(store, what):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), store.prefix_path, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_datasets_are_deleted_when_the_interpreter_exits(store):
    process = start(store, "whole")
    assert len(process.communicate(timeout=60)[0]) == len("0123456789ab\n")
    assert process.returncode == 0
    assert store.exists(store.prefix_path)
    assert folders(store) == []


def test_datasets_of_threads_for_which_python_waits_stay(store):
    process = start(store, "thread")
    told = process.communicate(timeout=60)[0].splitlines()
    assert told[1:] == ["True True"]
    assert process.returncode == 0
    assert folders(store) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_writer_deletes_datasets_of_killed_processes(store, number):
    process = start(store, "kept")
    left = process.stdout.readline().strip()
    # The dataset stays while its process lives.
    write = Writer(store)
    use(store, write)
    assert clear_prepared_data(store) == []
    assert [d.index for d in list_prepared_data(store)] == [left]
    process.send_signal(number)
    process.wait(60)
    assert [d.index for d in list_prepared_data(store)] == [left]
    with acquire(store, write) as index:
        assert folders(store) == names(index)


def test_datasets_of_living_processes_are_cleared_by_name_or_force(store):
    with start(store, "kept") as process:
        left = process.stdout.readline().strip()
        assert clear_prepared_data(store) == []
        assert [d.index for d in clear_prepared_data(store, left)] == [left]
        assert folders(store) == []
    with start(store, "kept") as process:
        left = process.stdout.readline().strip()
        assert [d.index for d in clear_prepared_data(store, force=True)] == [left]
        assert folders(store) == []


def test_partly_written_datasets_are_not_listed_but_cleared(store):
    process = start(store, "half")
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(folders(store)) == len(dataset_paths(store, "0123456789ab")) == 4
    assert list_prepared_data(store) == []
    (left,) = clear_prepared_data(store)
    assert (left.rows, left.columns, left.num_bytes) == (0, (), 3 * len("half"))
    assert folders(store) == []


def test_two_applications_prepare_the_same_data_at_once(store):
    processes = [start(store, "kept") for _ in range(2)]
    indices = [process.stdout.readline().strip() for process in processes]
    assert len(set(indices)) == 2
    assert {dataset.index for dataset in list_prepared_data(store)} == set(indices)
    for position, process in enumerate(processes):
        process.communicate("\n", timeout=60)
        # The rows of one application do not end with the other.
        left = indices[position + 1 :]
        assert [dataset.index for dataset in list_prepared_data(store)] == left
        assert [load_manifest(store, index).train.rows for index in left] == [5] * len(left)
    assert folders(store) == []
