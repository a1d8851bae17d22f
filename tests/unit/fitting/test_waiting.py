"""Share of a step that ranks wait for each other, on the driver."""

from __future__ import annotations

import logging

import pytest

from hvd_estimators.fitting.waiting import StepWaiting
from hvd_estimators.launch.service.events import RankWaiting, decoded, encoded


def report(rank: int, waited: float, steps: int = 5, seconds: float = 60.0) -> RankWaiting:
    return RankWaiting(rank, f"host-{rank}", steps, seconds, waited)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_rank_that_others_wait_for_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    waiting = StepWaiting("mine", 3)
    waiting.add(report(0, 54.0))
    waiting.add(report(2, 57.0))
    # The rank without a report may wait as long.
    assert warnings(caplog) == []
    waiting.add(report(1, 1.2))
    (line,) = warnings(caplog)
    # (54 / 60 + 57 / 60) / 2 = 92.5 %
    assert line.startswith("Run 'mine': 12 s per step, 92 % of it waiting for other ranks. Rank 1 ")
    assert "Rank 1 on host-1 waits least (2 %): the others wait for it" in line
    waiting.add(report(1, 1.2))
    assert len(warnings(caplog)) == 1


def test_a_slow_network_is_suspected_if_all_ranks_wait(caplog: pytest.LogCaptureFixture) -> None:
    waiting = StepWaiting("mine", 2)
    for rank in (0, 1):
        waiting.add(report(rank, 45.0, steps=100))
    (line,) = warnings(caplog)
    assert "0.6 s per step, 75 % of it waiting" in line
    assert "waits 75 %: the network between the hosts is probably slow" in line


def test_steps_without_much_waiting_only_have_a_time(caplog: pytest.LogCaptureFixture) -> None:
    waiting = StepWaiting("mine", 2)
    assert waiting.text() == ""
    waiting.add(report(0, 0.0))
    waiting.add(report(1, 0.0))
    assert waiting.text() == "12 s per step"
    waiting.add(report(0, 6.0))
    assert waiting.text() == "12 s per step, 10 % of it waiting for other ranks"
    assert warnings(caplog) == []


def test_ranks_that_are_launched_again_start_anew(caplog: pytest.LogCaptureFixture) -> None:
    waiting = StepWaiting("mine", 2)
    waiting.add(report(1, 50.0))
    waiting.restart(2)
    assert waiting.text() == ""
    waiting.add(report(0, 50.0))
    assert warnings(caplog) == []


def test_reports_are_sent_as_messages() -> None:
    assert decoded(encoded(report(3, 1.5))) == report(3, 1.5)
