"""What a rank prints, in a Spark task: into the executor's log, and to the driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from typing_extensions import Self

from hvd_estimators.launch.events.stream import EVENTS_VARIABLE, EventSender, RankOutput
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.relay import Allowance, Relay, lines_left_out

if TYPE_CHECKING:
    from hvd_estimators.launch.task.job import Job

__all__ = ["TaskOutput"]

# An executor's log is a file on its disk, which Spark does not limit: a day has 1.5 GiB at most.
_LOG_CHARS = 2**26
_LOG_CHARS_PER_SECOND = 2**20 / 60
_LOG_AGAIN_CHARS = 2**16
# A driver may be slow, as a laptop that is asleep.
_SEND_SECONDS = 3600.0


class TaskOutput:
    """Passes on the lines of a rank, as a context manager around its process.

    All of them go into the executor's log: 64 MiB of a rank's, and 1 MiB a minute above that; a
    line says how many are left out. Those that the job asks for go to the driver.

    Parameters
    ----------
    rank : int
        The rank.
    job : Job
        What the task was told.
    """

    def __init__(self, rank: int, job: Job) -> None:
        self._rank = rank
        self._job = job
        self._log_allowance = Allowance(_LOG_CHARS, _LOG_CHARS_PER_SECOND)
        self._not_logged = 0

    def __enter__(self) -> Self:
        streams, target = self._job.streams, self._job.events.get(EVENTS_VARIABLE)
        self._sender = EventSender(target, _SEND_SECONDS) if streams and target else None
        self._relay = Relay(self._send) if self._sender is not None else None
        self.on_lines = self._taker("stdout" if self._job.apart else "")
        """Takes lines of standard output, or of both streams."""
        self.on_error_lines = self._taker("stderr") if self._job.apart else None
        """Takes lines of standard error; None where they are among the others."""
        return self

    def log_error(self, outcome: RankOutcome) -> None:
        """Write the whole traceback of a rank's exception into the log of a remote executor."""
        if outcome.report is not None and not self._job.one_machine:
            self._log(outcome.report.full_traceback.splitlines(keepends=True))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._sender is not None:
            self._sender.close()
        self._note_what_is_not_logged()

    def _taker(self, stream: str) -> Callable[[list[str]], None]:
        is_sent = stream in self._job.streams

        def take(lines: list[str]) -> None:
            if is_sent and self._relay is not None:
                self._relay.put(stream, lines)
            if self._is_logged(is_sent):
                self._log(lines)

        return take

    def _is_logged(self, is_sent: bool) -> bool:
        """Return whether lines go into the executor's log.

        On one machine that is the driver's standard error, where lines would be shown twice, or
        where nothing is to be shown.
        """
        if not self._job.one_machine:
            return True
        return self._job.verbose > 0 and not (is_sent and self._is_connected())

    def _is_connected(self) -> bool:
        return self._sender is not None and self._sender.is_connected

    def _log(self, lines: list[str]) -> None:
        text = "".join(f"[{self._rank}] {line}" for line in lines)
        if self._log_allowance.left() < (_LOG_AGAIN_CHARS if self._not_logged else 1):
            self._not_logged += len(lines)
            return
        self._note_what_is_not_logged()
        self._log_allowance.use(len(text))
        sys.stderr.write(text)

    def _note_what_is_not_logged(self) -> None:
        if self._not_logged:
            sys.stderr.write(f"[{self._rank}] {lines_left_out(self._not_logged)}")
            self._not_logged = 0

    def _send(self, lines: Sequence[tuple[str, str]]) -> None:
        assert self._sender is not None
        self._sender.send_all([RankOutput(self._rank, line, stream) for stream, line in lines])
