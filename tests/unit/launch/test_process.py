"""The process of one rank, seen from its parent."""

import argparse
import atexit
import contextlib
import os
import pickle
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from hvd_estimators.exceptions import DependencyError, ParamError, StoreError, WorkerFailedError
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE
from hvd_estimators.launch.rank.outcome import RankOutcome, results_in_order
from hvd_estimators.launch.rank.process import RankProcess, pickle_call
from hvd_estimators.launch.rank.worker import of_first_rank

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)


def run(fn, *args):
    """Run a function as rank 3 and return its outcome."""
    with RankProcess(3, "here", pickle_call(fn, args, {}), os.environ) as process:
        return process.outcome()


def test_a_call_is_not_written_to_any_file():
    def look(secret):
        # The parent writes rank.pid while this process is already running.
        until = time.monotonic() + 60
        folder = Path(os.environ[DIRECTORY_VARIABLE])
        while not Path(folder, "rank.pid").exists() and time.monotonic() < until:
            time.sleep(0.01)
        files = {path.name: path.read_text() for path in folder.iterdir()}
        return secret, sorted(files), "mark" in str(files), sys.stdin.read()

    call = run(look, "mark")

    files = ["called", "rank.pid"]
    assert pickle.loads(call.result) == ("mark", files, False, "")


def test_ranks_get_the_drivers_command_line_arguments(monkeypatch):
    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float, default=0.1)
        return parser.parse_args().lr

    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5"])
    assert pickle.loads(run(main).result) == 0.5

    # A notebook's kernel has its own arguments, and no file.
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert pickle.loads(run(main).result) == 0.1


def test_the_group_of_a_process_that_has_ended_is_killed_once(monkeypatch):
    killed, kill = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda *call: (killed.append(call), kill(*call)))
    with RankProcess(3, "here", pickle_call(int, (), {}), os.environ) as process:
        assert pickle.loads(process.outcome().result) == 0
        of_outcome = list(killed)
    # Its ID may belong to the group of another program by then.
    assert killed == of_outcome


def test_results_may_be_instances_of_classes_of_the_main_program():
    def make():
        class Point:
            x = 5

        return Point()

    assert pickle.loads(run(make).result).x == 5


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_ends_without_a_result_is_a_failure(status):
    outcome = run(lambda: os._exit(status))

    assert (outcome.failed, outcome.error_type) == (True, "exit")
    assert f"exited with status {status} without a result" in outcome.error


@pytest.mark.parametrize(
    "leave", ["return", "raise", "sys.exit()", "sys.exit(5)", "sys.exit('so')"]
)
def test_a_forked_child_that_leaves_the_function_is_not_the_rank(leave):
    def work():
        print("printed", end=" ")
        sys.stdout.flush()
        atexit.register(print, "hook")
        child = os.fork()
        if not child:
            print("child", end=" ")
            if leave == "raise":
                raise ZeroDivisionError("of the child")
            return None if leave == "return" else eval(leave)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("ended")
        return status

    lines = []
    with RankProcess(
        *(3, "here", pickle_call(work, (), {}), os.environ),
        on_lines=lambda _, new: lines.extend(new),
    ) as process:
        outcome = process.outcome()

    statuses = {"return": 0, "sys.exit()": 0, "raise": 1, "sys.exit(5)": 5, "sys.exit('so')": 1}
    assert not outcome.failed, outcome.error
    assert pickle.loads(outcome.result) == statuses[leave]
    told = "".join(lines)
    assert ("ZeroDivisionError: of the child" in told) == (leave == "raise")
    assert ("so\n" in told) == ("so" in leave)
    assert "child" in told
    assert told.count("hook") == 1


def test_calls_and_results_that_cannot_be_pickled_are_failures():
    class Unloadable:
        def __reduce__(self):
            return (lambda: 1 / 0), ()

    assert run(lambda argument: 1, Unloadable()).error_type == "ZeroDivisionError"
    assert "cannot pickle" in run(lambda: (i for i in [])).error


@pytest.mark.parametrize(
    ("read", "error_type"), [("input()", "EOFError"), ("breakpoint()", "BdbQuit")]
)
def test_standard_input_is_empty(read, error_type):
    assert run(eval, read).error_type == error_type


@pytest.mark.parametrize("executable", ["missing/python", "text", "folder"])
def test_a_python_that_does_not_start_is_named(tmp_path, executable, monkeypatch):
    (tmp_path / "text").write_text("no program")
    (tmp_path / "folder").mkdir()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    path = str(tmp_path / executable)
    descriptors = os.listdir("/proc/self/fd")

    process = RankProcess(3, "here", b"", os.environ, executable=path)
    with pytest.raises(DependencyError, match=f"here cannot start the Python '{path}'"), process:
        raise AssertionError

    assert list(scratch.iterdir()) == []
    assert os.listdir("/proc/self/fd") == descriptors


def outcome(rank, error_type="", ended_at=0.0):
    result = None if error_type else pickle.dumps(rank * 10)
    return RankOutcome(
        rank, f"host{rank}", result, error_type, f"trace of {rank}", f"output of {rank}", ended_at
    )


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([("ValueError", 5.0), ("KeyError", 3.0)], 1),
        # Failures that merely follow from another one are not blamed, even if they came first.
        ([("HorovodInternalError", 1.0), ("ValueError", 3.0), ("aborted", 0.5)], 1),
        ([("aborted", 0.5), ("HorovodInternalError", 1.0)], 1),
        ([("HorovodInternalError", 1.0), ("exit", 3.0)], 1),
    ],
)
def test_the_root_cause_of_several_failures_is_raised(failures, blamed):
    outcomes = [outcome(rank, kind, at) for rank, (kind, at) in enumerate(failures)]

    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([*outcomes, outcome(7)])

    error = raised.value
    assert (error.rank, error.host) == (blamed, f"host{blamed}")
    assert error.output_tail == f"output of {blamed}"
    assert f"Rank {blamed} on host{blamed} failed" in str(error)
    assert f"trace of {blamed}" in str(error)
    assert f"output of {blamed}" in str(error)


@pytest.mark.parametrize(
    ("error_type", "cause", "exception"),
    [
        ("ValueError", "raised", "ValueError"),
        ("SystemExit", "raised", "SystemExit"),
        ("exit", "exited", ""),
        ("killed", "killed", ""),
    ],
)
def test_the_error_has_the_cause_as_attributes(error_type, cause, exception):
    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([outcome(0, error_type), outcome(1)])

    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.rank, error.cause, error.error_type, error.relaunches) == (0, cause, exception, 0)


def test_an_unpicklable_call_is_an_error_on_the_driver_that_names_it():
    lock = threading.Lock()

    def holds_a_lock():
        return lock

    with pytest.raises(ParamError, match="holds_a_lock and its arguments are sent") as raised:
        pickle_call(holds_a_lock, (), {})
    assert isinstance(raised.value.__cause__, TypeError)
    # The name is that of the user's function, not that of its wrapper.
    with pytest.raises(ParamError, match="holds_a_lock and its arguments are sent"):
        pickle_call(of_first_rank, (holds_a_lock, {}), {})


def fill_temporary_folder():
    """Fill the disk of the rank's directory."""
    file = Path(os.environ[DIRECTORY_VARIABLE], "filler")
    with contextlib.suppress(OSError), open(file, "wb", buffering=0) as opened:
        while True:
            opened.write(bytes(1024))


def test_a_rank_on_a_full_disk_reports_a_store_error(small_disk, monkeypatch):
    def main():
        fill_temporary_folder()
        raise StoreError("The checkpoint could not be written.")

    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    monkeypatch.setenv("TMPDIR", str(small_disk))
    outcome = run(main)

    with pytest.raises(StoreError, match=r"Rank 3 on here .*could not be written") as caught:
        results_in_order([outcome])
    assert isinstance(caught.value, WorkerFailedError)
    assert (caught.value.rank, caught.value.cause) == (3, "raised")
    assert pickle.loads(pickle.dumps(caught.value)).rank == 3


def test_a_rank_starts_and_returns_on_a_full_disk(small_disk, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    assert pickle.loads(run(os.getppid).result) > 1
