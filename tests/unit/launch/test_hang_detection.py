"""Detection of ranks that are stopped, that hold up others, or that all hang at once."""

import math
import os
import queue
import signal
import subprocess
import sys
import threading

import pytest
from processes import wait_until

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank import hang_detection
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE
from hvd_estimators.launch.rank.hang_detection import (
    HANG_VARIABLE,
    STALL_VARIABLE,
    StallWatch,
    hang_limit,
    is_stopped,
    made_progress,
    read_progress,
    recording_progress,
    seconds_without_progress,
    stall_environment,
)
from hvd_estimators.launch.rank.outcome import RankOutcome, results_in_order
from hvd_estimators.training import progress

pytestmark = pytest.mark.timeout(120)

SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"

SHUT_DOWN = """before
[2026-11-22 16:00:00.000000: E /horovod/common/stall_inspector.cc:105] One or more tensors were \
submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder \
of ranks for more than 2 seconds. This may indicate a deadlock.
Missing ranks:
1: [late.tensor]
2!: [allreduce.noname.1, other]
One or more rank (marked by "!") is stalled for longer than 5 seconds. Will shutdown.
Traceback (most recent call last):
"""


def test_time_counts_while_a_rank_should_leave_signs_but_leaves_none():
    watch = StallWatch({HANG_VARIABLE: "10"}, most=2)

    def look(mark, now):
        return watch.update(False, mark, now)

    # No time counts before the first sign, and 98 s between two looks count as two.
    assert [look(None, now) for now in range(0, 100, 2)] == [None] * 50
    assert [look("a", now) for now in (100, 102, 200, 202, 204)] == [None] * 5
    # Eight seconds without a new sign, then a new sign, and nine more seconds.
    assert [look("b", now) for now in range(206, 216)] == [None] * 10
    found = look("b", 216)
    assert found is not None
    assert "no progress for 10 s" in found
    assert HANG_VARIABLE in found
    assert look(None, 217) is None


def test_signs_are_left_only_inside_the_block(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(hang_detection, "_SECONDS_BETWEEN", 0.0)
    made_progress()
    assert read_progress(str(tmp_path)) is None
    with recording_progress():
        first = read_progress(str(tmp_path))
        made_progress()
        assert None is not first != read_progress(str(tmp_path))
    made_progress()
    assert read_progress(str(tmp_path)) is None
    assert seconds_without_progress() == 0


def test_the_driver_learns_where_a_hanging_rank_waits(monkeypatch):
    monkeypatch.setattr(progress, "_HANG_SECONDS", 0.2)
    told: queue.Queue[str] = queue.Queue()

    def waits_for_something() -> str:
        return told.get(timeout=60)

    with recording_progress(), progress.warning_of_hangs(3, told.put):
        text = waits_for_something()
    assert text.startswith("Rank 3 has made no progress for ")
    assert "in waits_for_something" in text
    with progress.warning_of_hangs(3, told.put), pytest.raises(queue.Empty):
        # A rank that does not train is not expected to make progress.
        told.get(timeout=1)


def test_ranks_that_all_hang_during_training_are_ended():
    def work():
        from hvd_estimators.training import progress

        def waits_for_the_others():
            threading.Event().wait()

        with recording_progress(), progress.warning_of_hangs(0, print):
            waits_for_the_others()

    with pytest.raises(WorkerFailedError, match="has made no progress for 3 s") as raised:
        LocalBackend(2, env={HANG_VARIABLE: "3"}).run(work)
    assert raised.value.cause == "stalled"
    # The end of the rank's output shows where it is.
    assert "in waits_for_the_others" in str(raised.value)


def test_ranks_that_do_not_train_are_left_alone():
    def work():
        # Hangs until the other rank is ended.
        if os.environ["HOROVOD_RANK"] == "1":
            threading.Event().wait()
        with recording_progress():
            threading.Event().wait()

    with pytest.raises(WorkerFailedError, match="has made no progress for 2 s") as raised:
        LocalBackend(2, env={HANG_VARIABLE: "2"}).run(work)
    assert raised.value.rank == 0


@pytest.mark.parametrize(
    ("env", "added"),
    [
        ({}, {}),
        ({STALL_VARIABLE: "1800"}, {SHUTDOWN: "1800"}),
        # The user's own value wins.
        ({STALL_VARIABLE: "1800", SHUTDOWN: "0"}, {}),
        ({STALL_VARIABLE: "1800", SHUTDOWN: "5"}, {}),
    ],
)
def test_horovods_variables_set_the_stall_limits(env, added):
    assert stall_environment(env) == added


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        ({}, math.inf),
        ({HANG_VARIABLE: "90"}, 90),
        ({HANG_VARIABLE: "0", STALL_VARIABLE: "1800"}, math.inf),
        # Four hours in a fit that relaunches ranks.
        ({STALL_VARIABLE: "1800"}, 4 * 3600),
        ({STALL_VARIABLE: "1800", SHUTDOWN: "600"}, 4 * 3600),
        ({HANG_VARIABLE: "90", STALL_VARIABLE: "1800"}, 90),
    ],
)
def test_variables_set_the_limit_for_ranks_without_progress(env, limit):
    assert hang_limit(env) == limit


def test_time_counts_only_while_a_rank_is_stopped_and_watched():
    watch = StallWatch({SHUTDOWN: "10"}, most=2)
    looks = [(False, 0), (True, 1), (True, 2), (True, 100), (True, 102), (False, 103)]

    # A pause of 98 seconds between two looks counts as two.
    assert [watch.update(stopped, None, now) for stopped, now in looks] == [None] * 6
    assert [watch.update(True, None, now) for now in range(104, 113)] == [None] * 9
    found = watch.update(True, None, 113)
    assert found is not None
    assert "has been stopped for 10 s" in found


def test_a_stopped_process_is_detected_until_it_continues():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: not is_stopped(process.pid))
        process.kill()
    assert not is_stopped(process.pid)


def test_the_error_of_a_stall_contains_what_horovod_says_on_rank_0():
    def outcome(rank, kind, tail=""):
        return RankOutcome(rank, f"host{rank}", None, kind, f"{kind}: {rank}", tail, 9 - rank)

    shut_down = [
        outcome(0, "HorovodInternalError", SHUT_DOWN),
        outcome(1, "HorovodInternalError"),
        outcome(2, "aborted", "validating"),
    ]
    with pytest.raises(WorkerFailedError, match="Rank 0 on host0 failed") as raised:
        results_in_order(shut_down)
    assert "2!: [allreduce.noname.1, other]" in str(raised.value)

    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([shut_down[0], outcome(2, "killed")])
    assert raised.value.cause == "killed"
