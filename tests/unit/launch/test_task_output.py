"""Output of a rank in its task: what goes to the executor's log and to the driver."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from hvd_estimators.launch.service.events import EventSender, RankOutput, RankStage, receive_events
from hvd_estimators.launch.service.server import DriverService
from hvd_estimators.launch.stage import Stage
from hvd_estimators.launch.task.output import TaskOutput
from hvd_estimators.launch.task.settings import TaskSettings

pytestmark = pytest.mark.timeout(60)


def job(**settings: Any) -> TaskSettings:
    given: dict[str, Any] = {"one_machine": False, "driver_env": {}, "env": {}, "verbose": 1}
    return TaskSettings(driver_path=(), executable=None, **{**given, **settings})


def test_an_executors_log_has_all_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with TaskOutput(3, job(), EventSender("")) as rank:
        for number in range(50):
            rank.handle("", [f"line {number:02}\n"])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"[3] line {number:02}" for number in range(50)]


def test_a_full_disk_of_the_executors_log_does_not_end_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[Any] = []
    with DriverService("127.0.0.1") as service, receive_events(service, received.append):
        driver = EventSender(service.address)
        with (
            open("/dev/full", "w", buffering=1) as full,
            TaskOutput(3, job(streams=("",)), driver) as rank,
            monkeypatch.context() as patch,
        ):
            patch.setattr("sys.stderr", full)
            with pytest.raises(OSError, match="No space left"):
                print("the fault", file=full)
            for line in ("one\n", "two\n"):
                rank.handle("", [line])
            patch.undo()
            with contextlib.suppress(OSError):
                full.close()
        driver.close()
    assert received == [RankOutput(3, "one\n"), RankOutput(3, "two\n")]


def test_lines_and_the_last_stage_share_a_connection() -> None:
    received: list[Any] = []
    stage = RankStage(3, 1, "host", Stage.FUNCTION)
    with DriverService("127.0.0.1") as service, receive_events(service, received.append):
        driver = EventSender(service.address)
        with TaskOutput(3, job(streams=("",), one_machine=True), driver) as rank:
            rank.report(stage)
            rank.handle("", ["one\n", "two\n"])
        driver.close()
    assert sorted(received, key=str) == [RankOutput(3, "one\n"), RankOutput(3, "two\n"), stage]


def test_without_lines_the_connection_ends_with_the_last_stage() -> None:
    received: list[Any] = []
    stage = RankStage(3, 1, "host", Stage.FUNCTION)
    with DriverService("127.0.0.1") as service, receive_events(service, received.append):
        driver = EventSender(service.address)
        with TaskOutput(3, job(), driver) as rank:
            rank.report(stage)
        assert not driver.is_connected
    assert received == [stage]
