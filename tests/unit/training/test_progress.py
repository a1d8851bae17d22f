"""The rate of an epoch that a rank reports."""

from __future__ import annotations

import types
from typing import Any

import pytest
from fake_clock import set_clock

from hvd_estimators.training import progress
from hvd_estimators.training.progress import Progress


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
