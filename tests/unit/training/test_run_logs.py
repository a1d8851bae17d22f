"""Loggers of a run: what they are called with, and what their failures do."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.exceptions import DependencyError, LoggerError, TrainingInterruptedError
from hvd_estimators.loggers import LoggedRun, Logger, import_client
from hvd_estimators.training import run_logs
from hvd_estimators.training.run_logs import RunLogs
from hvd_estimators.training.spec import EpochMetrics


class Recorder(Logger):
    """Logger that records its calls, and raises or waits in one method."""

    def __init__(self, fails_in: str = "", error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.waits = threading.Event()
        self._fails_in = fails_in
        self._error = error

    def start(self, run: LoggedRun) -> None:
        self._record("start", run)

    def log_metrics(self, metrics: Any, epoch: int) -> None:
        self._record("log_metrics", epoch, dict(metrics))

    def finish(self, status: str) -> None:
        self._record("finish", status)

    def _record(self, method: str, *arguments: Any) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((method, *arguments))
        if method == self._fails_in:
            if self._error is None:
                self.waits.wait()
            else:
                raise self._error


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(run_logs, "notify_driver", lambda line, verbose: lines.append(line))
    return lines


def logs_of(
    *loggers: Logger, rank: int = 0, epoch: int = 0, directory: str | None = None
) -> RunLogs:
    run = SimpleNamespace(run_id="first", run_path="s3://bucket/runs/first")
    hyperparameters = {"batch_size": 8, "shuffle": False}
    spec: Any = SimpleNamespace(
        run=run, loggers=loggers, hyperparameters=hyperparameters, verbose=1
    )
    return RunLogs(spec, rank, directory, epoch, is_resumed=epoch > 0)


def log_epochs(logs: RunLogs, *epochs: int, rates: tuple[float, ...] = (0.1,)) -> None:
    for epoch in epochs:
        record = EpochMetrics(epoch, {"loss": 1.0 / (epoch + 1)}, {"loss": 2.0, "mae": 3.0})
        logs.epoch(record, rates, rows_per_second=50.0)


def test_a_logger_gets_the_run_its_values_and_its_end(shown: list[str]) -> None:
    logger = Recorder()
    with logs_of(logger) as logs:
        log_epochs(logs, 0, 1)
    (_, run), *values, end = logger.calls
    assert (run.run_id, run.epoch, run.directory) == ("first", 0, None)
    assert run.hyperparameters == {"batch_size": 8, "shuffle": False}
    same = {"learning_rate": 0.1, "rows_per_second": 50.0, "val_loss": 2.0, "val_mae": 3.0}
    assert values == [
        ("log_metrics", 0, {**same, "loss": 1.0}),
        ("log_metrics", 1, {**same, "loss": 0.5}),
    ]
    assert end == ("finish", "finished")
    assert threading.get_ident() not in logger.threads
    assert shown == []

    # A resumed run has the same name and key; another store's run has another key.
    resumed = Recorder()
    with logs_of(resumed, epoch=2) as logs:
        log_epochs(logs, 2, rates=(0.1, 0.2))
    assert resumed.calls[0][1].epoch == 2
    assert resumed.calls[0][1].key == run.key
    assert len(run.key) == 40
    assert run.key.isalnum()
    rates = {key: v for key, v in resumed.calls[1][2].items() if key.startswith("learning_rate")}
    assert rates == {"learning_rate_0": 0.1, "learning_rate_1": 0.2}


def test_only_rank_0_has_loggers(shown: list[str]) -> None:
    logger = Recorder("start", ValueError("not on this rank"))
    with logs_of(logger, rank=1) as logs:
        log_epochs(logs, 0)
    assert logger.calls == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrainingInterruptedError("asked to end"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("lost a peer"), "failed"),
    ],
)
def test_the_status_names_the_kind_of_end(
    shown: list[str], error: BaseException, status: str
) -> None:
    logger = Recorder()
    with pytest.raises(type(error)), logs_of(logger):
        raise error
    assert logger.calls[-1] == ("finish", status)


def test_a_new_run_fails_if_a_logger_does_not_start(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Recorder()
    wrong = Recorder("start", ValueError("no such project"))
    expected = r"loggers: start\(\) of Recorder failed on rank 0: ValueError: no such project\."
    with pytest.raises(LoggerError, match=expected), logs_of(others, wrong):
        pytest.fail("the block must not begin")
    assert [call[0] for call in others.calls] == ["start", "finish"]
    assert [call[0] for call in wrong.calls] == ["start"]

    class NeedsAPackage(Recorder):
        def start(self, run: LoggedRun) -> None:
            import_client("wandb", type(self).__name__)

    monkeypatch.setitem(sys.modules, "wandb", None)
    expected = "NeedsAPackage needs the package wandb.*pip install wandb. The driver does not"
    with pytest.raises(DependencyError, match=expected), logs_of(NeedsAPackage()):
        pytest.fail("the block must not begin")

    monkeypatch.setattr(run_logs, "START_SECONDS", 0.1)
    waiting = Recorder("start")
    with pytest.raises(LoggerError, match=r"no end in 0\.1 s"), logs_of(waiting):
        pytest.fail("the block must not begin")
    waiting.waits.set()


def test_a_resumed_run_warns_of_a_logger_that_does_not_start(shown: list[str]) -> None:
    others = Recorder()
    wrong = Recorder("start", ConnectionError("https://user:secret@host is down"))
    with logs_of(wrong, others, epoch=1) as logs:
        log_epochs(logs, 1)
    assert [call[0] for call in others.calls] == ["start", "log_metrics", "finish"]
    assert [call[0] for call in wrong.calls] == ["start"]
    (line,) = shown
    assert "ConnectionError" in line
    assert "secret" not in line
    assert line.endswith("The run resumes without this logger.")


def test_other_failures_are_warnings_and_a_slow_logger_delays_no_epoch(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = Recorder("log_metrics", TimeoutError("no answer"))
    with logs_of(logger) as logs:
        log_epochs(logs, 0, 1, 2)
    # Each epoch is tried, and one warning names the first failure.
    assert [call[1] for call in logger.calls if call[0] == "log_metrics"] == [0, 1, 2]
    assert logger.calls[-1] == ("finish", "finished")
    expected = "loggers: log_metrics() of Recorder failed on rank 0: TimeoutError: no answer."
    assert shown == [f"{expected} The fit continues."]

    monkeypatch.setattr(run_logs, "FINISH_SECONDS", 0.2)
    hanging = Recorder("log_metrics")
    started = time.monotonic()
    with logs_of(hanging) as logs:
        log_epochs(logs, 0, 1)
    assert time.monotonic() - started < 10
    assert shown[1:] == ["loggers: finish() of Recorder failed on rank 0: no end in 0.2 s."]
    hanging.waits.set()
