"""Stages of a launch: reports from tasks and warnings of the driver."""

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
from hvd_estimators.launch.service.events import RankStage, receive_events
from hvd_estimators.launch.service.launch_watch import (
    LaunchState,
    LaunchWatch,
    StageReporter,
    observing_launches,
    started_task,
)
from hvd_estimators.launch.service.server import DriverService
from hvd_estimators.launch.stage import Stage

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STAGE_WARNING", 0.3)
    monkeypatch.setattr(timeouts, "STAGE_WARNING_IF_BUSY", 0.3)
    monkeypatch.setattr(timeouts, "STAGE_POLL", 0.02)


def test_the_driver_names_the_earliest_stage_its_rank_and_its_host(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(3) as watch:
        for rank, stage in ((0, Stage.HOROVOD_INIT), (1, Stage.RANK_PROCESS)):
            watch.record(RankStage(rank, rank, "host-a", stage))
        watch.record(RankStage(2, 2, "host-b", Stage.PROCESS_START))
        wait_until(lambda: caplog.records)
        time.sleep(0.5)

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "The launch waits for rank 2 on host-b, in stage 'process start' for"
    )


@pytest.mark.parametrize(("load", "warns"), [(0.5, True), (1000.0, False)])
def test_on_a_busy_machine_the_warning_comes_later(
    fast: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    load: float,
    warns: bool,
) -> None:
    monkeypatch.setattr(timeouts, "STAGE_WARNING_IF_BUSY", 60.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    with LaunchWatch(1) as watch:
        watch.record(RankStage(0, 0, "host", Stage.PROCESS_START))
        time.sleep(1.0)
    assert bool(caplog.records) is warns


def test_each_stage_is_warned_about_separately(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(1) as watch:
        watch.record(RankStage(-1, 0, "host", Stage.EXCHANGE))
        wait_until(lambda: "the rank of task 0 on host, in stage 'exchange'" in caplog.text)
        watch.record(RankStage(0, 0, "host", Stage.HOROVOD_INIT))
        wait_until(lambda: "rank 0 on host, in stage 'Horovod init'" in caplog.text)


@pytest.mark.parametrize("last", [Stage.HOROVOD_JOINED, Stage.ENDED])
def test_no_warning_names_ranks_that_have_joined_or_ended(
    fast: None, caplog: pytest.LogCaptureFixture, last: Stage
) -> None:
    with LaunchWatch(2) as watch:
        for rank in range(2):
            watch.record(RankStage(rank, rank, "host", last))
        time.sleep(0.6)
    assert not caplog.records


def test_ranks_without_horovod_are_not_waited_for(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(2) as watch:
        for rank in range(2):
            watch.record(RankStage(rank, rank, "host", Stage.FUNCTION))
        time.sleep(0.6)
        watch.record(RankStage(0, 0, "host", Stage.ENDED))
        time.sleep(0.6)
        assert not caplog.records
        watch.record(RankStage(1, 1, "host", Stage.HOROVOD_INIT))
        wait_until(lambda: "waits for rank 1 on host, in stage 'Horovod init'" in caplog.text)


def test_ranks_that_all_hang_before_their_function_are_named(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(2) as watch:
        for rank in range(2):
            watch.record(RankStage(rank, rank, "host", Stage.RANK_PROCESS))
        wait_until(lambda: caplog.records)
    assert "waits for rank 0 on host, rank 1 on host, in stage 'rank process'" in caplog.text


def test_a_late_stage_does_not_set_a_rank_back(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(1) as watch:
        watch.record(RankStage(0, 0, "host", Stage.HOROVOD_JOINED))
        watch.record(RankStage(0, 0, "host", Stage.RANK_PROCESS))
        time.sleep(0.6)
    assert not caplog.records


def test_spark_names_the_host_of_a_task_whose_python_does_not_start(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    running = [started_task(0, "host-a"), started_task(1, "host-b")]
    with LaunchWatch(2).with_running_tasks(lambda: running) as watch:
        watch.record(RankStage(-1, 0, "host-a", Stage.EXCHANGE))
        wait_until(lambda: caplog.records)
    assert "the rank of task 1 on host-b, in stage 'Python start'" in caplog.text


def test_no_warning_is_logged_while_a_launch_waits_its_turn(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LaunchWatch(2).with_running_tasks(lambda: None):
        time.sleep(0.6)
    assert not caplog.records


def test_a_failing_query_to_spark_does_not_end_the_watch(
    fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the context was stopped")

    with LaunchWatch(1).with_running_tasks(fail):
        wait_until(lambda: "the rank of task 0, in stage 'task slot'" in caplog.text)


def test_a_reporter_sends_the_latest_stage_and_closes_once_its_rank_has_joined() -> None:
    received: list[Any] = []
    with DriverService("127.0.0.1") as service, receive_events(service, received.append):
        reporter = StageReporter(3, "host", service.address, writes_log=False)
        reporter.enter(Stage.IMPORTS)
        wait_until(lambda: received)
        reporter.enter(Stage.RENDEZVOUS, 5)
        reporter.enter(Stage.HOROVOD_JOINED)
        wait_until(lambda: received[-1].stage == Stage.HOROVOD_JOINED)
        wait_until(lambda: not reporter._thread.is_alive())
        reporter.close()
    assert received[0] == RankStage(-1, 3, "host", Stage.IMPORTS)
    assert received[-1] == RankStage(5, 3, "host", Stage.HOROVOD_JOINED)


def test_a_reporter_whose_driver_is_unreachable_delays_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as silent:  # accepts connections but never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        target = f"127.0.0.1:{silent.getsockname()[1]}:{'00' * 32}"
        reporter = StageReporter(3, "host", target, writes_log=True)
        reporter.enter(Stage.IMPORTS)
        reporter.enter(Stage.EXCHANGE)
        reporter.enter(Stage.IMPORTS)  # earlier than the last one
        reporter.close()
        assert time.monotonic() - started < 0.5
    lines = [line.partition(" INFO ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "the rank of task 3 on host: launch stage 'imports'",
        "the rank of task 3 on host: launch stage 'exchange'",
    ]


def test_a_local_rank_stopped_before_joining_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "STAGE_WARNING", 2.0)
    monkeypatch.setattr(timeouts, "STAGE_WARNING_IF_BUSY", 2.0)

    def stop_rank_1() -> int:
        import os
        import signal

        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        import horovod.torch as hvd

        hvd.init()
        return int(hvd.rank())

    def go_on() -> None:
        wait_until(lambda: re.search("waits for rank 1 on .* 'function'", caplog.text), 40)
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
    assert backend.run(stop_rank_1) == [0, 1]
    thread.join()


def test_a_local_rank_whose_python_does_not_start_is_named(
    fast: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nsleep 1.5\nexec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    assert LocalBackend(1, warm_start=False).run(len, ("ab",)) == [2]
    assert f"rank 0 on {socket.gethostname()}, in stage 'process start'" in caplog.text


def test_observers_get_the_earliest_stage_of_launches_in_their_block() -> None:
    states: list[LaunchState] = []
    with observing_launches(states.append):
        watch = LaunchWatch(2)
    LaunchWatch(7)  # outside the block
    for task, stage in ((0, Stage.IMPORTS), (1, Stage.ENDED), (0, Stage.HOROVOD_INIT)):
        watch.record(RankStage(-1, task, "host", stage))
    watch.record(RankStage(-1, 0, "host", Stage.IMPORTS))  # late
    assert states == [
        LaunchState(2, Stage.TASK_SLOT, 2),
        LaunchState(2, Stage.TASK_SLOT, 1),
        LaunchState(2, Stage.IMPORTS, 1),
        LaunchState(2, Stage.HOROVOD_INIT, 1),
    ]
