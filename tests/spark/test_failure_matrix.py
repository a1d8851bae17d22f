"""Failures of a rank in a Spark task: the error on the driver, and clean-up.

The other rank ends at once, so that nothing waits for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.launch.warm.server import NAME

pytestmark = [pytest.mark.spark, pytest.mark.once]

MARK = "OF_THIS_TEST"


def raise_error() -> None:
    raise LookupError("no such thing")


def leave() -> None:
    print("last words")
    os._exit(7)


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def flood_and_raise() -> None:
    # 100 MB in lines, and 20 MB in one.
    lines = b"flood " * 20 + b"\n"
    for _ in range(100):
        sys.stdout.buffer.write(lines * (2**20 // len(lines)))
    sys.stdout.buffer.write(b"x" * 20 * 2**20 + b" end of the line\n")
    sys.stdout.buffer.flush()
    raise LookupError("after the flood")


def leave_a_child_behind() -> None:
    # In a separate session, without the environment, deaf to SIGTERM, and with the output open.
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 300 & wait"], start_new_session=True, env={})
    time.sleep(0.2)
    raise LookupError("and gone")


def all_below(pid: int) -> set[psutil.Process]:
    return {child for child in psutil.Process(pid).children(recursive=True) if child.is_running()}


def of_this_test(mark: str) -> set[psutil.Process]:
    """Return the processes that have inherited a variable, wherever they are in the tree.

    The process that waits to fork further ranks does not count.
    """
    found = set()
    for process in psutil.process_iter():
        try:
            # It takes the name a moment after its start.
            is_warm = process.name() == NAME or "--warm" in " ".join(process.cmdline())
            is_marked = process.environ().get(MARK) == mark and not is_warm
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
        except psutil.Error:
            continue
    return found


def spawned(before: set[psutil.Process]) -> set[psutil.Process]:
    """Return the new processes below this one, without Spark's own Python processes."""
    own = set()
    for process in all_below(os.getpid()) - before:
        try:
            words = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "daemon" not in words:
                own.add(process)
        except psutil.Error:
            continue
    return own


@pytest.mark.parametrize(
    ("fail", "cause", "says"),
    [
        (raise_error, "raised", "LookupError: no such thing"),
        (leave, "exited", "exited with status 7 without a result"),
        (die, "killed", "was killed by SIGSEGV"),
        (stand_still, "stalled", "has been stopped for 2 s"),
        (flood_and_raise, "raised", "LookupError: after the flood"),
        (leave_a_child_behind, "raised", "LookupError: and gone"),
    ],
)
def test_the_error_names_rank_host_and_cause_and_no_process_is_left(
    spark: Any, fail: Callable[[], None], cause: str, says: str
) -> None:
    mark = uuid.uuid4().hex
    before = all_below(os.getpid())

    def work() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            fail()
            time.sleep(300)

    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2", MARK: mark}
    with pytest.raises(WorkerFailedError, match=says) as raised:
        SparkBackend(2, env=env).run(work)

    error = raised.value
    assert (error.rank, error.cause) == (1, cause)
    assert error.host
    assert f"Rank 1 on {error.host} failed" in str(error)
    assert of_this_test(mark) == set()
    assert spawned(before) == set()
    if fail is flood_and_raise:
        assert len(str(error)) < 2**18
        assert "lines left out" in error.output_tail
        assert " end of the line" in error.output_tail
    if fail is leave:
        assert error.output_tail == "last words\n"
