"""Output of a rank on its way from the task to the executor's log and the driver."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import Self

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.output import Relay
from hvd_estimators.launch.service.events import EventSender, RankOutput, RankStage
from hvd_estimators.launch.task.settings import TaskSettings


class TaskOutput:
    """Context manager around a rank's process that forwards the lines of its output.

    All lines go to the executor's log. Streams that the job requests also go to the driver.

    Parameters
    ----------
    rank : int
        The rank.
    settings : TaskSettings
        The driver's settings for every task.
    driver : EventSender
        Connection to the driver.
    """

    def __init__(self, rank: int, settings: TaskSettings, driver: EventSender) -> None:
        self._rank = rank
        self._settings = settings
        self._driver = driver
        self._reporting: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._relay = Relay(self._send) if self._settings.streams else None
        return self

    def handle(self, stream: str, lines: list[str]) -> None:
        """Forward lines of a stream."""
        is_sent = stream in self._settings.streams
        if is_sent and self._relay is not None:
            self._relay.put(stream, lines)
        # On one machine, the log is the driver's standard error. There, lines would be shown twice,
        # or nothing should be shown.
        is_shown = is_sent and self._driver.is_connected
        if not self._settings.one_machine or (self._settings.verbose > 0 and not is_shown):
            # The disk of the executor's log may be full, and the driver still gets the lines.
            with contextlib.suppress(OSError):
                sys.stderr.write(self._marked(lines))

    def report(self, stage: RankStage) -> None:
        """Report the rank's last stage, in another thread: the driver may read output slowly."""

        def send() -> None:
            self._driver.send(stage)
            if self._relay is None:
                self._driver.close()

        self._reporting = threading.Thread(target=send, daemon=True)
        self._reporting.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._reporting is not None:
            self._reporting.join(timeouts.STAGE_CLOSE)

    def _marked(self, lines: Sequence[str]) -> str:
        return "".join(f"[{self._rank}] {line}" for line in lines)

    def _send(self, stream: str, lines: Sequence[str]) -> None:
        self._driver.send_all([RankOutput(self._rank, line, stream) for line in lines])
