"""Loggers of a fit: TensorBoard's event files, MLflow, and the user's. Runs on the driver."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_estimators.exceptions import DependencyError, LoggerError
from hvd_estimators.loggers import LoggedRun, Logger
from hvd_estimators.store.redaction import redacted

START_SECONDS = 120.0
"""Time for a logger to start. Clients wait for their servers for up to 90 seconds."""

FINISH_SECONDS = 60.0
"""Time for all loggers to send their remaining values and finish."""

logger = logging.getLogger(__name__)


class RunLoggers:
    """Loggers of one fit, each in a thread, so that a slow service delays nothing else.

    Failures after the start are warnings.

    Parameters
    ----------
    run : LoggedRun
        The run.
    required : sequence of Logger
        Loggers that have to start before the ranks. The fits of a grid share these objects, so a
        fit uses copies.
    optional : sequence of Logger
        Loggers that only cause a warning if they do not start, and are not waited for.
    is_resumed : bool
        Whether the run has a checkpoint, also one within its first epoch. Required loggers that do
        not start then cause a warning, too, as the run may have trained for long.
    """

    def __init__(
        self,
        run: LoggedRun,
        required: Sequence[Logger] = (),
        optional: Sequence[Logger] = (),
        is_resumed: bool = False,
    ) -> None:
        self._run = run
        self._is_resumed = is_resumed
        self._optional = optional
        self._threads = [_LoggerThread(copy.copy(entry), False) for entry in required]

    def start(self) -> None:
        """Start all loggers. After an error, those that have started wait for `finish`.

        Raises
        ------
        DependencyError
            If a required logger of a new run needs a package that is not installed.
        LoggerError
            If a required logger of a new run does not start for another reason.
        """
        started = [thread.call("start", self._run) for thread in self._threads]
        for thread, future in zip(self._threads, started, strict=True):
            error = _start_error(thread.name, future)
            if error is not None:
                thread.is_ignored = True
                if not self._is_resumed:
                    raise error
                logger.warning("%s The run resumes without this logger.", error)
        self._threads += [_LoggerThread(entry, True) for entry in self._optional]
        for thread in self._threads[len(started) :]:
            thread.call("start", self._run)

    def log(self, epochs: Mapping[int, Mapping[str, float]]) -> None:
        """Log the metrics of epochs, by name; a logger gets each epoch until it has logged it."""
        for thread in self._threads:
            for epoch, metrics in epochs.items():
                thread.log(epoch, metrics)

    def wait_for(self, entry: Logger) -> bool:
        """Wait for an optional logger's calls, and return whether they ended in time."""
        return any(
            thread.wait(FINISH_SECONDS) for thread in self._threads if thread.logger is entry
        )

    def finish(self, status: str) -> None:
        """Finish all loggers; see `Logger.finish`."""
        for thread in self._threads:
            thread.call("finish", status)
            thread.close()
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            if not thread.join(max(deadline - time.monotonic(), 0.0)):
                logger.warning(_message(thread.name, "finish", f"no end in {FINISH_SECONDS:g} s"))


def _start_error(name: str, started: concurrent.futures.Future[None]) -> Exception | None:
    """Wait for the start of a logger, and return the error, if any."""
    try:
        started.result(START_SECONDS)
        return None
    except DependencyError as error:
        return error
    except concurrent.futures.TimeoutError as error:
        reason: Exception = error
        text = f"no end in {START_SECONDS:g} s"
    except Exception as error:
        reason, text = error, _text(error)
    failed = LoggerError(_message(name, "start", text))
    failed.__cause__ = reason
    return failed


class _LoggerThread:
    """Daemon thread in which one logger's methods run, one after another.

    Parameters
    ----------
    entry : Logger
        The logger.
    warns : bool
        Whether a failed start is a warning. Otherwise only its future has the error.

    Attributes
    ----------
    is_ignored : bool
        Set for a logger that did not start: its other methods are not called.
    """

    def __init__(self, entry: Logger, warns: bool) -> None:
        self.logger = entry
        self.name = type(entry).__name__
        self.is_ignored = False
        self._logged: set[int] = set()
        self._silent = set() if warns else {"start"}
        self._calls = CallQueue(f"hvd_estimators {self.name}")

    def call(self, method: str, *arguments: Any) -> concurrent.futures.Future[None]:
        """Queue a call, and return its result as a future."""
        return self._put(method, lambda: getattr(self.logger, method)(*arguments))

    def log(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Queue an epoch."""
        self._put("log_metrics", functools.partial(self._log, epoch, metrics))

    def wait(self, seconds: float) -> bool:
        """Wait for the queued calls, and return whether they ended and the logger has started."""
        try:
            self._put("", lambda: None).result(seconds)
        except concurrent.futures.TimeoutError:
            return False
        return not self.is_ignored

    def close(self) -> None:
        """End the thread after the queued calls."""
        self._calls.close()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread, and return whether it has ended; True if ignored."""
        return self.is_ignored or self._calls.join(seconds)

    def _log(self, epoch: int, metrics: Mapping[str, float]) -> None:
        if epoch not in self._logged:
            self.logger.log_metrics(metrics, epoch)
            self._logged.add(epoch)

    def _put(self, method: str, call: Callable[[], None]) -> concurrent.futures.Future[None]:
        return self._calls.put(functools.partial(self._call, method, call))

    def _call(self, method: str, call: Callable[[], None]) -> None:
        if self.is_ignored:
            return
        try:
            call()
        except Exception as error:
            self.is_ignored = method == "start"
            if method not in self._silent:
                self._silent.add(method)
                logger.warning("%s The fit continues.", _message(self.name, method, _text(error)))
            raise


def _message(name: str, method: str, reason: str) -> str:
    return f"loggers: {method}() of {name} failed: {reason}."


def _text(error: Exception) -> str:
    return redacted(f"{type(error).__name__}: {error}".rstrip("."))


class CallQueue:
    """Queue of calls that a daemon thread makes; a call that hangs delays no program's end.

    Parameters
    ----------
    name : str
        Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Queue a call, and return its end, or its exception, as a future."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._calls.put((future, call))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread, and return whether it has ended or never started."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, call = queued
            try:
                call()
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
