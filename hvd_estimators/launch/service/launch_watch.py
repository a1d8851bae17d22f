"""The driver's warnings about ranks that stay in a stage of their launch.

Each rank's task reports the stages, and the warning names the stage, the ranks and their hosts, as
far as they have reported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Self

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.service.events import Event, Handler, RankStage
from hvd_estimators.launch.stage import EXPLANATIONS, Stage

logger = logging.getLogger(__name__)

_MOST_NAMED_RANKS = 8


class LaunchWatch:
    """Watch over the stages of a launch. Runs on the driver; used as a context manager.

    A thread warns if ranks stay in the earliest stage of all ranks for 10 seconds, and again if the
    stage or the ranks change. It ends when all ranks are in their function.

    Parameters
    ----------
    num_ranks : int
        Number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._stages = {task: RankStage(-1, task, "", Stage.WAITING) for task in range(num_ranks)}
        self._since = dict.fromkeys(self._stages, time.monotonic())
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def handler(self, handler: Handler) -> Handler:
        """Return an event handler that records stages and passes on all other events."""

        def handle(event: Event) -> None:
            if isinstance(event, RankStage):
                self.record(event)
            else:
                handler(event)

        return handle

    def record(self, event: RankStage) -> None:
        """Record the stage of a task, unless the task is already known to be in a later one.

        Raises
        ------
        ValueError
            If a task reports a stage that this version does not have.
        """
        stage = Stage(event.stage)
        with self._lock:
            if event.task not in self._stages or stage <= self._stages[event.task].stage:
                return
            self._stages[event.task] = event
            self._since[event.task] = time.monotonic()
        logger.info("%s is %s", _title(event), stage.label)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._finished.set()
        self._thread.join()

    def _watch(self) -> None:
        warned: list[RankStage] = []
        while not self._finished.wait(timeouts.STAGE_POLL):
            before = time.monotonic() - timeouts.STAGE_WARNING
            with self._lock:
                stage = Stage(min(at.stage for at in self._stages.values()))
                late = [
                    at
                    for task, at in self._stages.items()
                    if at.stage == stage and self._since[task] <= before
                ]
            if stage == Stage.FUNCTION:
                return
            if late and late != warned:
                logger.warning(
                    "The launch waits for %s, in stage '%s' for %.0f s or more: %s.",
                    *(_titles(late), stage.label, timeouts.STAGE_WARNING, EXPLANATIONS[stage]),
                )
                warned = late


def _title(at: RankStage) -> str:
    """Return a rank's name and host, or its task's while the rank is not assigned."""
    name = f"rank {at.rank}" if at.rank >= 0 else f"the rank of task {at.task}"
    return f"{name} on {at.host}" if at.host else name


def _titles(ranks: Sequence[RankStage]) -> str:
    named = ", ".join(map(_title, ranks[:_MOST_NAMED_RANKS]))
    more = len(ranks) - _MOST_NAMED_RANKS
    return f"{named} and {more} more ranks" if more > 0 else named
