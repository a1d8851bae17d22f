"""When a rank counts as stalled, and for whom Horovod says that it has shut down."""

import math
import os
import signal
import subprocess
import sys

import pytest
from processes import wait_until

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.rank.hang_detection import (
    HANG_VARIABLE,
    PATIENCE_VARIABLE,
    StallWatch,
    hang_limit,
    is_stopped,
    stall_environment,
    stall_limit,
    stalled_ranks,
)
from hvd_estimators.launch.rank.outcome import RankOutcome, results_in_order

CHECK, SHUTDOWN = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
DISABLE = "HOROVOD_STALL_CHECK_DISABLE"

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


@pytest.mark.parametrize(
    ("env", "limit", "added"),
    [
        ({}, 60, {}),
        ({SHUTDOWN: "0"}, 60, {}),
        ({SHUTDOWN: "nonsense"}, 60, {}),
        ({SHUTDOWN: "5"}, 5, {CHECK: "2"}),
        ({SHUTDOWN: "1"}, 1, {CHECK: "1"}),
        ({SHUTDOWN: "5", CHECK: "4"}, 5, {}),
        # Horovod looks once a minute by itself, and shuts down at the second look.
        ({SHUTDOWN: "60"}, 60, {CHECK: "30"}),
        ({SHUTDOWN: "3600"}, 3600, {}),
        ({DISABLE: "1"}, math.inf, {}),
        ({DISABLE: "0", SHUTDOWN: "9"}, 9, {CHECK: "4"}),
        # A fit's own limit is not that of a process that is stopped, and gives way to the user's.
        ({PATIENCE_VARIABLE: "1800"}, 60, {SHUTDOWN: "1800"}),
        ({PATIENCE_VARIABLE: "100"}, 60, {SHUTDOWN: "100", CHECK: "50"}),
        ({PATIENCE_VARIABLE: "1800", SHUTDOWN: "0"}, 60, {}),
        ({PATIENCE_VARIABLE: "1800", SHUTDOWN: "5"}, 5, {CHECK: "2"}),
    ],
)
def test_horovods_variables_set_the_limits(env, limit, added):
    assert stall_limit(env) == limit
    assert stall_environment(env) == added


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        ({}, math.inf),
        ({HANG_VARIABLE: "90"}, 90),
        ({HANG_VARIABLE: "0", PATIENCE_VARIABLE: "1800"}, math.inf),
        # Four hours in a fit that launches ranks again.
        ({PATIENCE_VARIABLE: "1800"}, 4 * 3600),
        ({PATIENCE_VARIABLE: "1800", SHUTDOWN: "600"}, 4 * 3600),
        ({PATIENCE_VARIABLE: "1800", SHUTDOWN: "0"}, math.inf),
        ({HANG_VARIABLE: "90", SHUTDOWN: "0"}, 90),
        ({HANG_VARIABLE: "90", DISABLE: "1"}, math.inf),
    ],
)
def test_how_long_all_ranks_may_make_no_progress(env, limit):
    assert hang_limit(env) == limit


def test_time_counts_only_while_a_rank_is_stopped_and_somebody_looks():
    watch = StallWatch(limit=10, most=2)
    looks = [(False, 0), (True, 1), (True, 2), (True, 100), (True, 102), (False, 103)]

    # A pause of 98 seconds between two looks counts for two.
    assert [watch.look(stopped, now) for stopped, now in looks] == [None] * 6
    assert [watch.look(True, now) for now in range(104, 113)] == [None] * 9
    found = watch.look(True, 113)
    assert found is not None
    assert "has been stopped for 10 s" in found
    assert SHUTDOWN in found


def test_a_process_is_stopped_by_a_signal_and_goes_on_by_another_one():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: not is_stopped(process.pid))
        process.kill()
    assert not is_stopped(process.pid)


def test_horovods_words_tell_for_whom_it_has_shut_down():
    assert stalled_ranks(SHUT_DOWN) == (5, {2: "allreduce.noname.1, other"})
    # A warning alone ends nothing.
    warning = SHUT_DOWN.replace("2!:", "2:").replace("Will shutdown", "")
    assert stalled_ranks(warning) is None
    assert stalled_ranks("") is None


def test_the_rank_that_held_up_the_others_is_named():
    def outcome(rank, kind, tail=""):
        return RankOutcome(rank, f"host{rank}", None, kind, f"{kind}: {rank}", tail, rank)

    shut_down = [
        outcome(0, "HorovodInternalError", SHUT_DOWN),
        outcome(1, "UnknownError"),
        outcome(2, "aborted", "validating"),
    ]
    with pytest.raises(WorkerFailedError, match="Rank 2 on host2 has held up the others") as raised:
        results_in_order(shut_down)
    error = raised.value
    assert (error.rank, error.host, error.cause) == (2, "host2", "stalled")
    assert error.output_tail == "validating"
    assert "more than 5 s" in str(error)
    assert "allreduce.noname.1, other" in str(error)

    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([shut_down[0], outcome(2, "killed")])
    assert raised.value.cause == "killed"
