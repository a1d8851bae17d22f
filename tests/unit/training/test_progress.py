"""Times of a rank's steps and of its waiting."""

from __future__ import annotations

import types
from typing import Any

import pytest
from fake_clock import FakeClock, set_clock

from hvd_estimators.launch.service.events import RankWaiting
from hvd_estimators.training import progress
from hvd_estimators.training.progress import Progress, StepTimes, add_waiting


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeClock, list[RankWaiting]]:
    """Return a clock, and the reports that were sent."""
    clock, reports = set_clock(monkeypatch, progress), list[RankWaiting]()
    sender = types.SimpleNamespace(send=reports.append, close=lambda: None)
    monkeypatch.setattr(progress, "EventSender", lambda: sender)
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    return clock, reports


def test_a_minute_of_steps_is_reported_without_validation(
    sent: tuple[FakeClock, list[RankWaiting]],
) -> None:
    clock, reports = sent
    times = StepTimes(1)
    for _ in range(3):
        times.resume()
        for _ in range(3):
            clock.now += 8.0
            add_waiting(6.0)
            times.step()
        times.pause()
        clock.now += 500.0
        add_waiting(100.0)
        times.step()
    # Eight steps of 8 s are the first that take at least a minute; one is left.
    (report,) = reports
    assert (report.rank, report.steps, report.seconds, report.waited) == (1, 8, 64.0, 48.0)
    times.resume()
    clock.now += 60.0
    times.step()
    assert (reports[1].steps, reports[1].seconds, reports[1].waited) == (2, 68.0, 6.0)


def test_the_rate_of_an_epoch_is_that_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reports = set_clock(monkeypatch, progress), list[Any]()
    data = types.SimpleNamespace(
        train_steps_per_epoch=4, rows_after=lambda epoch, steps: min(10 * steps, 35)
    )
    shown: Any = Progress(types.SimpleNamespace(verbose=1, epochs=2, data=data), rank=1)
    shown._sender = types.SimpleNamespace(send=reports.append)
    shown.start_epoch(0, steps_before=1)
    clock.now += 5.0
    shown.step(2, {})
    clock.now += 5.0
    shown.end_training()
    clock.now += 1000.0  # validation
    shown.end_epoch({})

    assert [report.rows_per_second for report in reports] == [2.0, 2.5]
    assert shown.rows_per_second == 2.5


def test_a_single_rank_reports_nothing(
    sent: tuple[FakeClock, list[RankWaiting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, reports = sent
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    times = StepTimes(0)
    times.resume()
    clock.now += 100.0
    times.step()
    assert reports == []
