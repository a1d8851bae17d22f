"""Relaunches of ranks, for elastic jobs and fits: time, number of ranks. Runs on the driver."""

from __future__ import annotations

import abc
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from hvd_estimators.exceptions import SlotsError, UnreachableError, WorkerFailedError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.service.elastic_state import CommitStore, run_in_rank

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# Lost executors are usually replaced within seconds.
_RETURN_SECONDS = 15.0
# Spark's default number of attempts for a failing task.
_MOST_FRUITLESS = 4


class RelaunchLoop(abc.ABC):
    """Loop that launches ranks until a launch succeeds.

    Subclasses launch the ranks, and decide which failures allow a relaunch.

    Parameters
    ----------
    least, most : int or None
        Minimum and maximum number of ranks of a relaunch. None: the first number of ranks.
    timeout : float
        Seconds to wait for ``least`` task slots after a failure.
    setting : str
        Name of the setting of ``timeout``, for errors.

    Attributes
    ----------
    failures : list of WorkerFailedError
        Errors of the launches that were followed by a relaunch.
    """

    def __init__(self, least: int | None, most: int | None, timeout: float, setting: str) -> None:
        self.failures: list[WorkerFailedError] = []
        self._least, self._most = least, most
        self._timeout, self._setting = timeout, setting
        self._deadline = math.inf

    @abc.abstractmethod
    def run_on(self, backend: Any) -> list[Any]:
        """Launch the ranks once, and return their results."""

    @abc.abstractmethod
    def reason_to_end(self, error: WorkerFailedError) -> str | None:
        """Return why no relaunch may follow a failure, as a clause; None if one may follow.

        An empty clause: the error is raised unchanged.
        """

    def after_failure(self) -> None:  # noqa: B027 - optional
        """Record a failure and pause, before the loop looks for slots; by default, do nothing."""

    @abc.abstractmethod
    def before_relaunch(self, num_ranks: int) -> None:
        """Report a relaunch after a failure of ranks."""

    def launch(self, backend: Backend) -> list[Any]:
        """Launch the ranks until a launch succeeds, and return their results.

        Parameters
        ----------
        backend : Backend
            Backend of the first launch.

        Raises
        ------
        WorkerFailedError
            If no relaunch may follow a failure.
        SlotsError
            If there were too few task slots for too long.
        JobCancelledError
            If the Spark job of a launch was cancelled.
        """
        current = backend
        while True:
            try:
                return self.run_on(current)
            except WorkerFailedError as error:
                why = self.reason_to_end(error)
                if why:
                    error.relaunches = len(self.failures)
                    error.add_remedy(_history(self.failures, why))
                if why is not None:
                    raise
                self.failures.append(error)
                self._deadline = time.monotonic() + self._timeout
                self.after_failure()
                current = self._for_slots(backend, current)
                self.before_relaunch(current.num_processes())
            except (SlotsError, UnreachableError) as error:
                # Task slots may have been lost since they were counted.
                if not self.failures:
                    raise
                if time.monotonic() > self._deadline:
                    raise self._too_few(backend, str(error)) from self.failures[-1]
                time.sleep(_POLL_SECONDS)
                current = self._for_slots(backend, current)

    def _for_slots(self, first: Backend, before: Backend) -> Backend:
        """Wait for enough task slots, and return a backend with as many ranks as fit.

        If slots were lost, waits for a moment for replacements. A warning reports a longer wait.
        """
        if first.task_slots() is None:
            return first
        least, settled = self._fewest(first), time.monotonic() + _RETURN_SECONDS
        is_reported = False
        while True:
            slots, now = first.task_slots() or 0, time.monotonic()
            if slots >= least and (slots >= before.num_processes() or now > settled):
                break
            if now > self._deadline:
                raise self._too_few(first, available(slots)) from self.failures[-1]
            if now > settled and not is_reported:
                is_reported = True
                logger.warning(
                    "%s Waiting up to %.0f s for %d task slots to launch ranks again: %s.",
                    *(summary(self.failures[-1]), self._deadline - now, least, available(slots)),
                )
            time.sleep(_POLL_SECONDS)
        ranks = first.num_processes()
        number = min(slots, self._most or ranks)
        return first if number == ranks else first.resized(number) or first

    def _fewest(self, first: Backend) -> int:
        """Return the minimum number of ranks; the first number if the backend has no other."""
        ranks = first.num_processes()
        least = ranks if self._least is None else self._least
        return ranks if least < ranks and first.resized(least) is None else least

    def _too_few(self, first: Backend, reason: str) -> SlotsError:
        return SlotsError(
            f"{summary(self.failures[-1])} A relaunch needs {self._fewest(first)} task slots "
            f"(min_num_proc), which were not free within {self._timeout:g} s ({self._setting}): "
            f"{reason}. The ranks had been launched again {len(self.failures) - 1} times."
        )


class ElasticLaunches(RelaunchLoop):
    """Launches of an elastic job, whose ranks commit their states.

    Parameters
    ----------
    call : tuple
        The function, its arguments and keyword arguments.
    least, most : int
        Minimum and maximum number of ranks of a relaunch.
    timeout : float
        Seconds to wait for ``least`` slots.
    limit : int or None
        Maximum number of relaunches.
    """

    def __init__(
        self, call: tuple[Any, ...], least: int, most: int, timeout: float, limit: int | None
    ) -> None:
        super().__init__(least, most, timeout, "elastic_timeout, HOROVOD_ELASTIC_TIMEOUT")
        self._call, self._limit = call, limit
        self._fruitless = 0
        self._commits = CommitStore()
        self._before = 0

    def run_on(self, backend: Any) -> list[Any]:
        """Launch the ranks once, with the states that were committed so far."""
        self._before = self._commits.count
        call = (*self._call, len(self.failures))
        results: list[Any] = backend.run_with_commits(run_in_rank, call, self._commits)
        return results

    def reason_to_end(self, error: WorkerFailedError) -> str | None:
        """Return why no relaunch may follow: the limit, or several launches without a commit."""
        self._fruitless = self._fruitless + 1 if self._commits.count == self._before else 0
        if self._limit is not None and len(self.failures) >= self._limit:
            return f", and reset_limit={self._limit} allows no more"
        if self._limit is None and self._fruitless >= _MOST_FRUITLESS:
            return (
                f", and the last {self._fruitless} launches have made no progress; set "
                "reset_limit to try more often"
            )
        return None

    def before_relaunch(self, num_ranks: int) -> None:
        """Log a relaunch."""
        logger.warning(
            "%s Launching %d ranks again (relaunch %d%s; %d commits so far).",
            *(summary(self.failures[-1]), num_ranks, len(self.failures)),
            *("" if self._limit is None else f" of at most {self._limit}", self._commits.count),
        )


def available(slots: int) -> str:
    """Return a clause about the task slots that a cluster has."""
    if slots:
        return f"the cluster has {slots}"
    return (
        "the cluster has none. A Spark master that was restarted without recovery "
        "(spark.deploy.recoveryMode) has lost this application; in that case start a new one"
    )


def _history(earlier: Sequence[WorkerFailedError], why: str) -> str:
    """Return a sentence about earlier failures and the reason against another relaunch."""
    lost = "".join(f"\n  {summary(failure)}" for failure in earlier[-10:])
    before = f" Lost before:{lost}" if lost else ""
    return f"The ranks had been launched again {len(earlier)} times{why}.{before}"


_HOW = {
    "raised": "raised {error_type}",
    "exited": "exited",
    "killed": "was killed",
    "stalled": "has stalled",
    "lost": "was lost",
}


def summary(error: WorkerFailedError) -> str:
    """Return a one-sentence summary of a failure."""
    subject = "The Spark job of the ranks" if error.rank is None else f"Rank {error.rank}"
    if error.rank is None and error.cause == "lost":
        subject = "An executor, or a Python process of it,"
    where = f" on {error.host}" if error.host else ""
    how = _HOW.get(error.cause or "", "failed").format(error_type=error.error_type)
    return f"{subject}{where} {how}."
