"""Stages of a launch: warnings of the driver."""

from __future__ import annotations

import logging
import time

import pytest
from processes import wait_until

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.service.events import RankStage
from hvd_estimators.launch.service.launch_watch import LaunchWatch
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
