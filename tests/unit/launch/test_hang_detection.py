"""Ranks that all hang at once: signs of progress, and what comes of it where there are none."""

import os
import queue
import signal
import threading
import time

import pytest

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank import hang_detection
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE
from hvd_estimators.launch.rank.hang_detection import (
    HANG_VARIABLE,
    HangWatch,
    leaving_signs,
    made_progress,
    seconds_without_progress,
    sign_left,
)
from hvd_estimators.training import progress

pytestmark = pytest.mark.timeout(120)


def test_seconds_count_while_a_rank_is_to_leave_signs_and_leaves_none():
    watch = HangWatch(limit=10, most=2)

    # Not before the first sign, and 98 s between two looks are two.
    assert [watch.look(None, now) for now in range(0, 100, 2)] == [None] * 50
    assert [watch.look("a", now) for now in (100, 102, 200, 202, 204)] == [None] * 5
    # Eight seconds; then there is a new one, and nine more.
    assert [watch.look("b", now) for now in range(206, 216)] == [None] * 10
    found = watch.look("b", 216)
    assert found is not None
    assert "no progress for 10 s" in found
    assert HANG_VARIABLE in found
    assert watch.look(None, 217) is None


def test_signs_are_left_in_the_block_only(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(hang_detection, "_SECONDS_BETWEEN", 0.0)
    made_progress()
    assert sign_left(str(tmp_path)) is None
    with leaving_signs():
        first = sign_left(str(tmp_path))
        made_progress()
        assert None is not first != sign_left(str(tmp_path))
    made_progress()
    assert sign_left(str(tmp_path)) is None
    assert seconds_without_progress() == 0


def test_the_driver_is_told_where_a_rank_is_that_makes_no_progress(monkeypatch):
    monkeypatch.setattr(progress, "_HANG_SECONDS", 0.2)
    told: queue.Queue[str] = queue.Queue()

    def waits_for_something() -> str:
        return told.get(timeout=60)

    with leaving_signs(), progress.warning_of_hangs(3, told.put):
        text = waits_for_something()
    assert text.startswith("Rank 3 has made no progress for ")
    assert "in waits_for_something" in text
    with progress.warning_of_hangs(3, told.put), pytest.raises(queue.Empty):
        # Who does not train makes no progress.
        told.get(timeout=1)


def test_ranks_that_all_hang_while_they_train_are_ended():
    def work():
        from hvd_estimators.training import progress

        def waits_for_the_others():
            threading.Event().wait()

        with leaving_signs(), progress.warning_of_hangs(0, print):
            waits_for_the_others()

    with pytest.raises(WorkerFailedError, match="has made no progress for 3 s") as raised:
        LocalBackend(2, env={HANG_VARIABLE: "3"}).run(work)
    assert raised.value.cause == "stalled"
    # The error shows where each rank is.
    for rank in range(2):
        assert f"Rank {rank} waits here:" in str(raised.value)
    assert str(raised.value).count("in waits_for_the_others") == 2


def test_ranks_that_do_not_train_are_left_alone():
    def work():
        # As long as it takes until the other one is ended.
        if os.environ["HOROVOD_RANK"] == "1":
            threading.Event().wait()
        with leaving_signs():
            threading.Event().wait()

    with pytest.raises(WorkerFailedError, match="has made no progress for 2 s") as raised:
        LocalBackend(2, env={HANG_VARIABLE: "2"}).run(work)
    assert raised.value.rank == 0


def test_ranks_that_are_all_stopped_are_ended():
    def work():
        os.kill(os.getpid(), signal.SIGSTOP)

    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    with pytest.raises(WorkerFailedError, match="has been stopped for 2 s") as raised:
        LocalBackend(2, env=env).run(work)
    assert raised.value.cause == "stalled"


def test_sigterm_ends_ranks_that_hang_in_a_call_of_horovod():
    def work():
        import horovod.torch as hvd
        import torch

        from hvd_estimators.training import step_control

        step_control._SECONDS_HUNG = 2.0
        hvd.init()
        with leaving_signs(), step_control.StopRequest(float, hvd.size()):
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            if hvd.rank() == 0:
                hvd.allreduce(torch.ones(1), name="only rank 0 waits for this")
            while True:
                time.sleep(0.1)  # Python handles the signal, and the rank hangs all the same.

    began = time.monotonic()
    with pytest.raises(WorkerFailedError, match="SIGTERM") as raised:
        LocalBackend(2).run(work)
    assert raised.value.cause == "killed"
    assert "Asked to end (SIGTERM), and no progress for 2 s" in raised.value.output_tail
    assert "in work" in raised.value.output_tail
    assert time.monotonic() - began < 60
