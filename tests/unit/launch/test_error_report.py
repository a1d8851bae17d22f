"""Reports of a rank's exception as the user reads them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError

import hvd_estimators.launch.rank.outcome as error_report
from hvd_estimators.exceptions import (
    CollectiveError,
    NotFiniteError,
    ReaderError,
    StoreError,
    StoreUnavailableError,
    TrainingInterruptedError,
    WorkerFailedError,
)
from hvd_estimators.launch.rank.outcome import (
    ErrorReport,
    RankOutcome,
    report_error,
    results_in_order,
)


def caught(function: Any, *args: Any) -> Exception:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def users_loss(value: float) -> None:
    raise ValueError(f"odd label {value}\nsecond line")


def test_the_headline_names_the_users_line() -> None:
    report = report_error(caught(users_loss, 1.5))

    line = users_loss.__code__.co_firstlineno + 1
    assert report.headline == f"ValueError: odd label 1.5 ({__file__}:{line}, in users_loss)"
    assert report.error_type == "ValueError"
    assert report.traceback.endswith("ValueError: odd label 1.5\nsecond line\n")
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (HorovodInternalError("Horovod has been shut down."), True),
        (CollectiveError("a rank has ended"), True),
        (ReaderError("a worker was killed"), True),
        (StoreUnavailableError("no answer"), True),
        (TrainingInterruptedError("asked to end"), True),
        (StoreError("a damaged file"), False),
        (NotFiniteError("the loss is nan"), False),
        (MemoryError(), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_rank_says_whether_its_failure_is_transient(error: BaseException, expected: bool) -> None:
    outcomes = [RankOutcome(0, "far", None, type(error).__name__, report=report_error(error))]
    with pytest.raises(WorkerFailedError) as raised:
        results_in_order(outcomes)
    assert raised.value.is_transient == expected


def test_both_exceptions_of_a_chain_are_kept() -> None:
    def chained() -> None:
        try:
            users_loss(2.5)
        except ValueError as error:
            raise RuntimeError("the step failed") from error

    report = report_error(caught(chained))
    assert report.headline.startswith("RuntimeError: the step failed (")
    assert "odd label 2.5" in report.traceback
    assert "direct cause" in report.traceback


def test_an_error_without_user_frames_names_no_line(monkeypatch: Any) -> None:
    monkeypatch.setattr(error_report, "_OWN", str(Path(__file__).parents[3]))
    assert report_error(caught(users_loss, 1.5)).headline == "ValueError: odd label 1.5"


def failure(rank: int, report: ErrorReport | None, error: str = "", **more: Any) -> RankOutcome:
    error_type = report.error_type if report else "killed"
    return RankOutcome(rank, "here", None, error_type, error, report=report, **more)


def test_the_error_of_the_first_rank_is_reported_once() -> None:
    report = report_error(caught(users_loss, 1.5))
    outcomes = [
        failure(0, report, ended_at=2.0),
        failure(1, report, ended_at=1.0, output_tail="epoch 1\n"),
    ]

    with pytest.raises(WorkerFailedError) as raised:
        results_in_order(outcomes)

    lines = str(raised.value).splitlines()
    assert lines[0] == f"Rank 1 on here failed: {report.headline}"
    assert lines[-2:] == ["The end of its output:", "epoch 1"]
    assert str(raised.value).count("in users_loss\n") == 1
    assert raised.value.error_type == "ValueError"


def test_the_first_line_says_how_a_process_ended() -> None:
    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([failure(0, None, "The process was killed by SIGKILL.")])
    assert str(raised.value) == "Rank 0 on here failed: The process was killed by SIGKILL."
