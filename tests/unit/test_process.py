"""One rank's process, seen from its parent."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.process import RankOutcome, RankProcess, pickle_call, results_in_order

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)


def run(fn, *args, env=None, on_line=None):
    """Run a function as rank 3 and return its outcome."""
    call = pickle_call(fn, args, {})
    with RankProcess(3, "here", call, {**os.environ, **(env or {})}, on_line) as process:
        return process.outcome()


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def ended(pid):
    """Return whether a process has gone, or waits only for somebody to take note of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sleep_and_tell(path):
    """Start a grandchild, write the ids of both, and sleep."""
    child = subprocess.Popen(["sleep", "300"])
    partial = Path(f"{path}.partial")
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.rename(path)
    time.sleep(300)


def pids(path):
    wait_until(path.exists)
    return [int(pid) for pid in path.read_text().split()]


def test_the_outcome_holds_what_the_function_returned():
    outcome = run(lambda *args: {"sum": sum(args), "pid": os.getpid()}, 1, 2)

    result = pickle.loads(outcome.result)
    assert result["sum"] == 3
    assert result["pid"] != os.getpid()
    assert not outcome.failed
    assert (outcome.rank, outcome.host, outcome.error) == (3, "here", "")


def test_results_may_be_of_classes_that_only_the_main_program_knows():
    def make():
        class Point:
            x = 5

        return Point()

    assert pickle.loads(run(make).result).x == 5


def test_the_environment_is_the_given_one_alone(monkeypatch):
    monkeypatch.setenv("ONLY_OF_THE_PARENT", "1")
    call = pickle_call(lambda: dict(os.environ), (), {})
    needed = {"PATH": os.environ["PATH"], "GIVEN": "größe"}

    with RankProcess(0, "here", call, needed) as process:
        env = pickle.loads(process.outcome().result)

    assert env["GIVEN"] == "größe"
    assert "ONLY_OF_THE_PARENT" not in env


def test_an_exceptions_name_and_traceback_are_in_the_outcome():
    def fail(number):
        print("before the end")
        return 1 / number

    outcome = run(fail, 0)

    assert outcome.failed
    assert outcome.error_type == "ZeroDivisionError"
    assert "in fail\n" in outcome.error
    assert outcome.error.endswith("ZeroDivisionError: division by zero\n")
    assert outcome.output_tail.startswith("before the end\n")


@pytest.mark.parametrize("status", [0, 3])
def test_leaving_by_sys_exit_is_a_failure(status):
    assert run(lambda: sys.exit(status)).error_type == "SystemExit"


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_ends_without_a_result_is_a_failure(status):
    outcome = run(lambda: os._exit(status))

    assert (outcome.failed, outcome.error_type) == (True, "exit")
    assert f"exited with status {status} without a result" in outcome.error


def test_a_process_that_is_killed_is_a_failure_that_names_the_signal():
    outcome = run(lambda: os.kill(os.getpid(), signal.SIGKILL))

    assert (outcome.failed, outcome.error_type) == (True, "exit")
    assert "killed by SIGKILL; the machine may have run out of memory" in outcome.error


def test_a_call_or_a_result_that_cannot_be_pickled_is_a_failure_with_its_reason():
    class Unloadable:
        def __reduce__(self):
            return (lambda: 1 / 0), ()

    assert run(lambda argument: 1, Unloadable()).error_type == "ZeroDivisionError"
    assert "cannot pickle" in run(lambda: (i for i in [])).error


def test_the_end_of_a_long_output_is_kept_and_every_line_is_passed_on():
    lines = []

    def chatter():
        for number in range(5000):
            print("line", number)
        sys.stderr.write("last words, without a newline")
        raise ValueError

    outcome = run(chatter, on_line=lines.append)

    assert lines[:5000] == [f"line {number}\n" for number in range(5000)]
    assert "line 4999\nlast words, without a newline" in outcome.output_tail
    assert "line 4000\n" not in outcome.output_tail


def test_an_outcome_waits_for_lines_that_are_still_on_their_way():
    def chatter():
        print(*range(50), sep="\n")
        os._exit(1)

    outcome = run(chatter, on_line=lambda line: time.sleep(0.01))

    assert outcome.output_tail.endswith("\n48\n49\n")


def test_output_that_is_no_text_does_not_disturb():
    outcome = run(lambda: sys.stdout.buffer.write(b"\xff\xfe\n"))

    assert pickle.loads(outcome.result) == 3


def test_what_a_rank_started_ends_with_it(tmp_path):
    def start():
        return subprocess.Popen(["sleep", "300"]).pid

    outcome = run(start)

    wait_until(lambda: ended(pickle.loads(outcome.result)))


@pytest.mark.parametrize("how", ["abort", "leave the block"])
def test_a_rank_that_is_not_wanted_any_more_ends_with_all_it_started(tmp_path, how):
    path = tmp_path / "pids"
    call = pickle_call(sleep_and_tell, (str(path),), {})
    with RankProcess(3, "here", call, os.environ) as process:
        rank, grandchild = pids(path)
        assert process.running()
        if how == "abort":
            assert process.abort().error_type == "aborted"
            assert not process.running()

    wait_until(lambda: ended(rank) and ended(grandchild))


def test_aborting_a_rank_that_has_ended_keeps_its_outcome():
    with RankProcess(3, "here", pickle_call(lambda: 5, (), {}), os.environ) as process:
        wait_until(lambda: not process.running())

        assert pickle.loads(process.abort().result) == 5


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_ends_with_all_it_started_when_its_parent_is_killed(tmp_path, end):
    path = tmp_path / "pids"
    (tmp_path / "parent.py").write_text(
        textwrap.dedent(
            f"""
            import os, subprocess, time
            from hvd_estimators.launch.process import RankProcess, pickle_call

            def rank():
                child = subprocess.Popen(["sleep", "300"])
                with open({str(path)!r} + ".partial", "w") as file:
                    file.write(f"{{os.getpid()}} {{child.pid}}")
                os.rename({str(path)!r} + ".partial", {str(path)!r})
                time.sleep(300)

            with RankProcess(0, "here", pickle_call(rank, (), {{}}), os.environ) as process:
                process.outcome()
            """
        )
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], env={**os.environ, "TMPDIR": str(scratch)}
    )
    try:
        rank, grandchild = pids(path)
        assert not ended(rank)
        parent.send_signal(end)

        wait_until(lambda: ended(rank) and ended(grandchild))
        assert list(scratch.iterdir()) == []
    finally:
        parent.kill()
        parent.wait()


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    run(lambda: 1 / 0)

    assert list(tmp_path.iterdir()) == []


def outcome(rank, error_type="", ended_at=0.0):
    result = None if error_type else pickle.dumps(rank * 10)
    return RankOutcome(
        rank, f"host{rank}", result, error_type, f"trace of {rank}", f"output of {rank}", ended_at
    )


def test_results_are_in_the_order_of_the_ranks():
    assert results_in_order([outcome(2), outcome(0), outcome(1)]) == [0, 10, 20]


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([("ValueError", 5.0), ("KeyError", 3.0)], 1),
        # What only follows from another's failure is not blamed, though it came first.
        ([("HorovodInternalError", 1.0), ("ValueError", 3.0), ("aborted", 0.5)], 1),
        ([("aborted", 0.5), ("HorovodInternalError", 1.0)], 1),
        ([("HorovodInternalError", 1.0), ("exit", 3.0)], 1),
    ],
)
def test_the_failure_that_caused_the_others_is_the_one_that_is_raised(failures, blamed):
    outcomes = [outcome(rank, kind, at) for rank, (kind, at) in enumerate(failures)]

    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([*outcomes, outcome(7)])

    error = raised.value
    assert (error.rank, error.host) == (blamed, f"host{blamed}")
    assert error.output_tail == f"output of {blamed}"
    assert f"Rank {blamed} on host{blamed} failed" in str(error)
    assert f"trace of {blamed}" in str(error)
    assert f"output of {blamed}" in str(error)
