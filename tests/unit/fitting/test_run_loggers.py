"""Loggers of a run: what they are called with, and what their failures do."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from hvd_estimators.exceptions import DependencyError, LoggerError
from hvd_estimators.fitting import run_loggers
from hvd_estimators.fitting.run_loggers import RunLoggers
from hvd_estimators.loggers import LoggedRun, Logger, import_client


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


def run_from(epoch: int = 0) -> LoggedRun:
    return LoggedRun("first", "0123456789" * 4, epoch, {"batch_size": 8, "shuffle": False})


def started(
    *required: Logger, optional: tuple[Logger, ...] = (), epoch: int = 0, is_resumed: bool = False
) -> RunLoggers:
    loggers = RunLoggers(run_from(epoch), required, optional, is_resumed)
    loggers.start()
    return loggers


def epochs(*numbers: int) -> dict[int, dict[str, float]]:
    return {n: {"loss": 1.0 / (n + 1), "val_loss": 2.0} for n in numbers}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_logger_gets_the_run_its_values_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    logger = Recorder()
    loggers = started(logger)
    loggers.log(epochs(0))
    loggers.log(epochs(1))
    # Ranks that are relaunched repeat an epoch.
    loggers.log(epochs(1))
    # The end has all epochs, and the logger lacks one.
    loggers.log(epochs(0, 1, 2))
    loggers.finish("finished")
    assert logger.calls == [
        ("start", run_from()),
        *(("log_metrics", n, epochs(n)[n]) for n in (0, 1, 2)),
        ("finish", "finished"),
    ]
    assert threading.get_ident() not in logger.threads
    assert warnings(caplog) == []


def test_a_new_run_fails_if_a_logger_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    others, optional = Recorder(), Recorder()
    wrong = Recorder("start", ValueError("no such project"))
    loggers = RunLoggers(run_from(), [others, wrong], [optional])
    expected = r"loggers: start\(\) of Recorder failed: ValueError: no such project\."
    with pytest.raises(LoggerError, match=expected):
        loggers.start()
    loggers.finish("failed")
    assert others.calls == [("start", run_from()), ("finish", "failed")]
    assert [call[0] for call in wrong.calls] == ["start"]
    assert optional.calls == []

    class NeedsAPackage(Recorder):
        def start(self, run: LoggedRun) -> None:
            import_client("wandb", type(self).__name__)

    monkeypatch.setitem(sys.modules, "wandb", None)
    expected = "NeedsAPackage needs the package wandb.*on the driver: pip install wandb"
    with pytest.raises(DependencyError, match=expected):
        started(NeedsAPackage())

    monkeypatch.setattr(run_loggers, "START_SECONDS", 0.1)
    waiting = Recorder("start")
    with pytest.raises(LoggerError, match=r"no end in 0\.1 s"):
        started(waiting)
    waiting.waits.set()


# A run may resume within its first epoch.
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_resumed_run_warns_of_a_logger_that_does_not_start(
    caplog: pytest.LogCaptureFixture, epoch: int
) -> None:
    others = Recorder()
    wrong = Recorder("start", ConnectionError("https://user:secret@host is down"))
    loggers = started(wrong, others, epoch=epoch, is_resumed=True)
    loggers.log(epochs(epoch))
    loggers.finish("finished")
    assert [call[0] for call in others.calls] == ["start", "log_metrics", "finish"]
    assert [call[0] for call in wrong.calls] == ["start"]
    (line,) = warnings(caplog)
    assert "ConnectionError" in line
    assert "secret" not in line
    assert line.endswith("The run resumes without this logger.")


def test_other_failures_are_warnings_and_a_slow_logger_delays_no_epoch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = Recorder("log_metrics", TimeoutError("no answer"))
    loggers = started(logger)
    loggers.log(epochs(0, 1))
    loggers.log(epochs(0, 1))
    loggers.finish("finished")
    # Each epoch is tried twice, and one warning names the first failure.
    assert [call[1] for call in logger.calls if call[0] == "log_metrics"] == [0, 1, 0, 1]
    assert logger.calls[-1] == ("finish", "finished")
    expected = "loggers: log_metrics() of Recorder failed: TimeoutError: no answer."
    assert warnings(caplog) == [f"{expected} The fit continues."]

    monkeypatch.setattr(run_loggers, "FINISH_SECONDS", 0.2)
    hanging = Recorder("log_metrics")
    begun = time.monotonic()
    loggers = started(optional=(hanging,))
    loggers.log(epochs(0, 1))
    assert not loggers.wait_for(hanging)
    loggers.finish("interrupted")
    assert time.monotonic() - begun < 10
    assert warnings(caplog)[1:] == ["loggers: finish() of Recorder failed: no end in 0.2 s."]
    hanging.waits.set()


def test_each_fit_calls_a_copy() -> None:
    """The fits of a grid share the loggers, and run at the same time."""

    class KeepsRun(Recorder):
        def start(self, run: LoggedRun) -> None:
            super().start(run)
            self.run = run

    logger = KeepsRun()
    for number in range(2):
        loggers = started(logger, epoch=number)
        assert not hasattr(logger, "run")
        loggers.finish("finished")
    assert [call[0] for call in logger.calls] == ["start", "finish"] * 2
