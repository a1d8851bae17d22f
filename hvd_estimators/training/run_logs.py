"""Logs of a run, written by rank 0: TensorBoard's event files, and the user's loggers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from hvd_estimators.exceptions import DependencyError, LoggerError, TrainingInterruptedError
from hvd_estimators.loggers import LoggedRun, Logger
from hvd_estimators.store.redaction import redacted
from hvd_estimators.training.progress import notify_driver
from hvd_estimators.training.spec import EpochMetrics, TrainSpec, measured
from hvd_estimators.training.tensorboard import EventWriter, epoch_scalars

START_SECONDS = 120.0
"""Time for a logger to start. Clients wait for their servers for up to 90 seconds."""

FINISH_SECONDS = 60.0
"""Time for all loggers to send their remaining values and finish."""


class RunLogs:
    """Event files and loggers of a run, as a context manager on every rank; only rank 0 logs.

    Parameters
    ----------
    spec : TrainSpec
        The training job.
    rank : int
        This rank.
    directory : str or None
        Local directory of the run's logs; None for no event files.
    epoch : int
        First epoch that is logged.
    is_resumed : bool
        Whether the run resumes from a checkpoint. Loggers that fail to start then only cause a
        warning, as the run may have trained for long.

    Raises
    ------
    DependencyError
        If a new run's logger needs a package that is not installed.
    LoggerError
        If a new run's logger does not start for another reason.
    """

    def __init__(
        self, spec: TrainSpec, rank: int, directory: str | None, epoch: int, is_resumed: bool
    ) -> None:
        self._spec = spec
        self._is_resumed = is_resumed
        self._writer = EventWriter(directory, epoch, spec.hyperparameters)
        self._run = LoggedRun(
            run_id=spec.run.run_id,
            key=hashlib.sha256(spec.run.run_path.encode()).hexdigest()[:40],
            epoch=epoch,
            hyperparameters=dict(spec.hyperparameters),
            directory=directory,
        )
        loggers = spec.loggers if rank == 0 else ()
        self._threads = [_LoggerThread(logger, self._warn) for logger in loggers]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._writer)
            stack.push(self._finish)
            started = [thread.call("start", self._run) for thread in self._threads]
            for thread, future in zip(self._threads, started, strict=True):
                self._await_start(thread, future)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)

    def epoch(
        self,
        record: EpochMetrics,
        learning_rates: Sequence[float],
        rows_per_second: float,
        has_own_tensorboard: bool = False,
    ) -> None:
        """Log an epoch.

        Parameters
        ----------
        record : EpochMetrics
            Its losses and metrics.
        learning_rates : sequence of float
            The optimizer's rates, by parameter group, without the factor for the number of ranks.
        rows_per_second : float
            Training rows of all ranks per second.
        has_own_tensorboard : bool
            Whether a callback of the user writes losses and metrics for TensorBoard.
        """
        names = (
            ["learning_rate"]
            if len(learning_rates) == 1
            else [f"learning_rate_{group}" for group in range(len(learning_rates))]
        )
        values = dict(zip(names, learning_rates, strict=True))
        values["rows_per_second"] = rows_per_second
        scalars = {} if has_own_tensorboard else epoch_scalars(record)
        self._writer.scalars(record.epoch, {**values, **scalars})
        for thread in self._threads:
            thread.call("log_metrics", {**values, **measured(record)}, record.epoch)

    def _await_start(self, thread: _LoggerThread, started: concurrent.futures.Future[None]) -> None:
        try:
            started.result(START_SECONDS)
            return
        except DependencyError as error:
            reason: Exception = error
        except concurrent.futures.TimeoutError as error:
            reason = LoggerError(_message(thread.name, "start", f"no end in {START_SECONDS:g} s"))
            reason.__cause__ = error
        except Exception as error:
            reason = LoggerError(_message(thread.name, "start", _text(error)))
            reason.__cause__ = error
        thread.is_ignored = True
        if not self._is_resumed:
            raise reason
        self._warn(f"{reason} The run resumes without this logger.")

    def _finish(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        for thread in self._threads:
            thread.call("finish", _status(exc))
            thread.close()
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            if not thread.join(max(deadline - time.monotonic(), 0.0)):
                self._warn(_message(thread.name, "finish", f"no end in {FINISH_SECONDS:g} s"))

    def _warn(self, text: str) -> None:
        notify_driver(text, self._spec.verbose)


class _LoggerThread:
    """Daemon thread in which one logger's methods run, one after another.

    Parameters
    ----------
    logger : Logger
        The logger.
    warn : callable
        Called with the text of the first failure of each method but ``start``.

    Attributes
    ----------
    is_ignored : bool
        Set for a logger that did not start: its other methods are not called.
    """

    def __init__(self, logger: Logger, warn: Callable[[str], None]) -> None:
        self.name = type(logger).__name__
        self.is_ignored = False
        self._logger = logger
        self._warn = warn
        self._has_failed: set[str] = set()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"hvd_estimators {self.name}", daemon=True
        )
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> concurrent.futures.Future[None]:
        """Queue a call, and return its result as a future."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._calls.put((future, method, arguments))
        return future

    def close(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread, and return whether it has ended; True if ignored."""
        if not self.is_ignored:
            self._thread.join(seconds)
        return self.is_ignored or not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, method, arguments = call
            if self.is_ignored:
                continue
            try:
                getattr(self._logger, method)(*arguments)
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
                if method == "start":
                    self.is_ignored = True
                elif method not in self._has_failed:
                    self._has_failed.add(method)
                    self._warn(f"{_message(self.name, method, _text(error))} The fit continues.")


def _status(error: BaseException | None) -> str:
    """Return the argument of `Logger.finish` for the error that ends training on a rank."""
    if error is None:
        return "finished"
    stopped = (TrainingInterruptedError, KeyboardInterrupt, SystemExit)
    return "interrupted" if isinstance(error, stopped) else "failed"


def _message(logger: str, method: str, reason: str) -> str:
    return f"loggers: {method}() of {logger} failed on rank 0: {reason}."


def _text(error: Exception) -> str:
    return redacted(f"{type(error).__name__}: {error}".rstrip("."))
