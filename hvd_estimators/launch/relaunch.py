"""Relaunches of an elastic job: time, number of ranks and limit. Runs on the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import (
    SlotsError,
    UnreachableError,
    WorkerFailedError,
)
from hvd_estimators.launch.service.elastic_state import CommitStore, run_in_rank

if TYPE_CHECKING:
    from hvd_estimators.launch.spark_backend import SparkBackend

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# Lost executors are usually replaced within seconds.
_RETURN_SECONDS = 15.0
# Spark's default number of attempts for a failing task.
_MOST_FRUITLESS = 4


@dataclass
class Launches:
    """Launches of one job.

    Attributes
    ----------
    backend : callable
        Returns the backend for a number of ranks.
    least, most : int
        Minimum and maximum number of ranks of a relaunch.
    timeout : float
        Seconds to wait for ``least`` slots.
    limit : int or None
        Maximum number of relaunches.
    """

    backend: Callable[[int], SparkBackend]
    least: int
    most: int
    timeout: float
    limit: int | None
    failures: list[WorkerFailedError] = field(default_factory=list)
    fruitless: int = 0

    def run(self, num_proc: int, call: tuple[Any, ...]) -> list[Any]:
        """Launch ranks until they return, and return their results."""
        deadline = float("inf")
        with CommitStore() as commits:
            while True:
                before = commits.count
                backend = self.backend(num_proc)
                try:
                    arguments = (*call, len(self.failures))
                    return backend.run_with_commits(run_in_rank, arguments, commits)
                except WorkerFailedError as error:
                    self._add(error, commits.count - before)
                    deadline = time.monotonic() + self.timeout
                except (SlotsError, UnreachableError) as error:
                    # Slots that were available a moment ago may be lost.
                    if not self.failures:
                        raise
                    if time.monotonic() > deadline:
                        raise self._too_few(str(error)) from self.failures[-1]
                    time.sleep(_POLL_SECONDS)
                num_proc = self._await_slots(num_proc, deadline)
                logger.warning(
                    "%s Launching %d ranks again (relaunch %d%s; %d commits so far).",
                    *(summary(self.failures[-1]), num_proc, len(self.failures)),
                    *("" if self.limit is None else f" of at most {self.limit}", commits.count),
                )

    def _add(self, error: WorkerFailedError, commits: int) -> None:
        """Record a failed launch; raise its error if it was the last one."""
        last = self.failures[-1] if self.failures else None
        is_alike = last is not None and error.error_type and error.error_type == last.error_type
        self.fruitless = self.fruitless + 1 if commits <= (1 if is_alike else 0) else 0
        if self.limit is not None and len(self.failures) >= self.limit:
            why = f", and reset_limit={self.limit} allows no more"
            raise final_error(error, self.failures, why) from error
        if self.limit is None and self.fruitless >= _MOST_FRUITLESS:
            why = (
                f", and the last {self.fruitless} launches have made no progress; set reset_limit "
                "to try more often"
            )
            raise final_error(error, self.failures, why) from error
        self.failures.append(error)

    def _await_slots(self, before: int, deadline: float) -> int:
        """Wait for enough slots and return the number of ranks to launch."""
        count = self.backend(self.least).task_slots
        slots = await_relaunch_slots(self.failures[-1], count, self.least, before, deadline)
        if slots < self.least:
            raise self._too_few(available(slots)) from self.failures[-1]
        return min(slots, self.most)

    def _too_few(self, reason: str) -> SlotsError:
        limit = f"{self.timeout:g} s (elastic_timeout, HOROVOD_ELASTIC_TIMEOUT)"
        return too_few_slots(self.failures, self.least, limit, reason)


def await_relaunch_slots(
    failure: WorkerFailedError,
    count: Callable[[], int],
    least: int,
    before: int,
    deadline: float,
) -> int:
    """Wait until there are enough slots to relaunch ranks.

    If slots were lost, waits for a moment for replacements. A warning reports a longer wait.

    Parameters
    ----------
    failure : WorkerFailedError
        The failure that requires the relaunch.
    count : callable
        Returns the number of task slots.
    least : int
        Minimum number of ranks.
    before : int
        Number of ranks that were lost.
    deadline : float
        Time, by `time.monotonic`, until which to wait for ``least`` slots.

    Returns
    -------
    int
        Task slots; fewer than ``least`` if there were never enough.
    """
    settled = time.monotonic() + _RETURN_SECONDS
    is_reported = False
    while True:
        slots, now = count(), time.monotonic()
        if slots >= least and (slots >= before or now > settled):
            return slots
        if now > deadline:
            return slots
        if now > settled and not is_reported:
            is_reported = True
            logger.warning(
                "%s Waiting up to %.0f s for %d task slots to launch ranks again: %s.",
                *(summary(failure), deadline - now, least, available(slots)),
            )
        time.sleep(_POLL_SECONDS)


def available(slots: int) -> str:
    """Return a clause about the task slots that a cluster has."""
    if slots:
        return f"the cluster has {slots}"
    return (
        "the cluster has none. A Spark master that was restarted without recovery "
        "(spark.deploy.recoveryMode) has lost this application; in that case start a new one"
    )


def too_few_slots(
    failures: Sequence[WorkerFailedError], least: int, limit: str, reason: str
) -> SlotsError:
    """Return the error of a relaunch that has too few task slots.

    Parameters
    ----------
    failures : sequence of WorkerFailedError
        Errors of the launches so far.
    least : int
        Minimum number of ranks.
    limit : str
        The time limit, and its setting.
    reason : str
        Clause about the task slots that there are.
    """
    return SlotsError(
        f"{summary(failures[-1])} A relaunch needs {least} task slots (min_num_proc), which were "
        f"not free within {limit}: {reason}. The ranks had been launched again "
        f"{len(failures) - 1} times."
    )


def final_error(
    error: WorkerFailedError, earlier: Sequence[WorkerFailedError], why: str
) -> WorkerFailedError:
    """Return the error of the last launch, extended by the earlier failures.

    Parameters
    ----------
    error : WorkerFailedError
        Error of the last launch.
    earlier : sequence of WorkerFailedError
        Errors of the launches that were followed by a relaunch.
    why : str
        Reason against another relaunch; completes a sentence on the number of relaunches.
    """
    lost = "".join(f"\n  {summary(failure)}" for failure in earlier[-10:])
    before = f" Lost before:{lost}" if lost else ""
    return type(error)(
        f"{error}\nThe ranks had been launched again {len(earlier)} times{why}.{before}",
        rank=error.rank,
        host=error.host,
        output_tail=error.output_tail,
        cause=error.cause,
        error_type=error.error_type,
        relaunches=len(earlier),
    )


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
