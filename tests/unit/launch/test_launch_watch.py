"""Stages of a launch: warnings of the driver."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.service.events import RankStage
from hvd_estimators.launch.service.launch_watch import (
    LaunchState,
    LaunchWatch,
    observing_launches,
)
from hvd_estimators.launch.stage import Stage

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STAGE_WARNING", 0.3)
    monkeypatch.setattr(timeouts, "STAGE_POLL", 0.02)


def test_the_driver_names_the_earliest_stage_its_rank_and_its_host(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(3) as watch:
        for rank, stage in ((0, Stage.FUNCTION), (1, Stage.FUNCTION)):
            watch.record(RankStage(rank, rank, "host-a", stage))
        watch.record(RankStage(2, 2, "host-b", Stage.CONNECTED))
        wait_until(lambda: caplog.records)
        time.sleep(0.5)

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "The launch waits for rank 2 on host-b, in stage 'connected' for"
    )


def test_each_stage_is_warned_about_separately(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(1) as watch:
        watch.record(RankStage(-1, 0, "host", Stage.STARTED))
        wait_until(lambda: "the rank of task 0 on host, in stage 'started'" in caplog.text)
        watch.record(RankStage(0, 0, "host", Stage.CONNECTED))
        wait_until(lambda: "rank 0 on host, in stage 'connected'" in caplog.text)


def test_no_warning_names_ranks_that_are_in_their_function(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(2) as watch:
        for rank in range(2):
            watch.record(RankStage(rank, rank, "host", Stage.FUNCTION))
        watch.record(RankStage(0, 0, "host", Stage.CONNECTED))  # late
        time.sleep(0.6)
    assert not caplog.records


def test_ranks_that_all_hang_before_their_function_are_named(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(2) as watch:
        for rank in range(2):
            watch.record(RankStage(rank, rank, "host", Stage.CONNECTED))
        wait_until(lambda: caplog.records)
    assert "waits for rank 0 on host, rank 1 on host, in stage 'connected'" in caplog.text


def test_spark_names_the_host_of_a_task_whose_python_does_not_start(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(2).with_running_tasks(lambda: {0: "host-a", 1: "host-b"}) as watch:
        watch.record(RankStage(-1, 0, "host-a", Stage.STARTED))
        wait_until(lambda: caplog.records)
    assert "the rank of task 1 on host-b, in stage 'waiting'" in caplog.text
    assert "or its Python has not started" in caplog.text


def test_a_failing_query_to_spark_does_not_end_the_watch(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the context was stopped")

    with LaunchWatch(1).with_running_tasks(fail):
        wait_until(lambda: "the rank of task 0, in stage 'waiting'" in caplog.text)
    assert "Spark has not started the task" in caplog.text


def test_a_local_rank_stopped_before_its_function_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "STAGE_WARNING", 2.0)

    class Stopping:
        """Stops rank 1, which unpickles its arguments."""

        def __reduce__(self) -> tuple[Any, ...]:
            return stop_rank_1, ()

    def stop_rank_1() -> int:
        import os
        import signal

        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return int(os.environ["HOROVOD_RANK"])

    def go_on() -> None:
        wait_until(lambda: re.search("waits for rank 1 on .* 'connected'", caplog.text), 40)
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if path.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T":
                    environ = path.joinpath("environ").read_bytes().split(b"\0")
                    if f"HVD_TEST_STAGES={os.getpid()}".encode() in environ:
                        os.kill(int(path.name), signal.SIGCONT)
            except OSError:
                continue

    thread = threading.Thread(target=go_on)
    thread.start()
    backend = LocalBackend(2, warm_start=False, env={"HVD_TEST_STAGES": str(os.getpid())})
    assert backend.run(int, (Stopping(),)) == [0, 1]
    thread.join()


def test_a_local_rank_whose_python_does_not_start_is_named(
    fast: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nsleep 1.5\nexec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    assert LocalBackend(1, warm_start=False).run(len, ("ab",)) == [2]
    assert f"rank 0 on {socket.gethostname()}, in stage 'connected'" in caplog.text


def test_observers_get_the_earliest_stage_of_launches_in_their_block() -> None:
    states: list[LaunchState] = []
    with observing_launches(states.append):
        watch = LaunchWatch(2)
    LaunchWatch(7)  # outside the block
    for task, stage in ((0, Stage.STARTED), (1, Stage.FUNCTION), (0, Stage.CONNECTED)):
        watch.record(RankStage(-1, task, "host", stage))
    watch.record(RankStage(-1, 0, "host", Stage.STARTED))  # late
    assert states == [
        LaunchState(2, Stage.WAITING, 2),
        LaunchState(2, Stage.WAITING, 1),
        LaunchState(2, Stage.STARTED, 1),
        LaunchState(2, Stage.CONNECTED, 1),
    ]
