"""Share of a step that ranks wait for each other: a text for the display, and one warning per fit.

Runs on the driver.
"""

from __future__ import annotations

import logging

from hvd_estimators.launch.service.events import RankWaiting

logger = logging.getLogger(__name__)

_MUCH = 0.5


class StepWaiting:
    """Newest step times of each rank.

    Parameters
    ----------
    run_id : str
        The run, for the warning.
    num_ranks : int
        Number of ranks of the launch.
    """

    def __init__(self, run_id: str, num_ranks: int) -> None:
        self._run_id = run_id
        self._num_ranks = num_ranks
        self._newest: dict[int, RankWaiting] = {}
        self._has_warned = False

    def add(self, event: RankWaiting) -> None:
        """Add a rank's report; log a warning if ranks wait for most of a step."""
        if event.steps <= 0 or event.seconds <= 0:
            return
        self._newest[event.rank] = event
        # A rank that has not reported yet may be the slow one.
        is_complete = len(self._newest) >= self._num_ranks
        if not self._has_warned and is_complete and self._share() > _MUCH:
            self._has_warned = True
            logger.warning("Run %r: %s. %s", self._run_id, self.text(), self._cause())

    def restart(self, num_ranks: int) -> None:
        """Forget the reports of earlier ranks, when ranks are launched again."""
        self._num_ranks = num_ranks
        self._newest.clear()

    def text(self) -> str:
        """Return the time of a step, and the share that ranks wait; empty without reports."""
        if not self._newest:
            return ""
        events = self._newest.values()
        seconds = sum(event.seconds for event in events) / sum(event.steps for event in events)
        text = f"{seconds:.3g} s per step"
        if not any(event.waited for event in events):
            return text
        return f"{text}, {100 * self._share():.0f} % of it waiting for other ranks"

    def _share(self) -> float:
        """Return the mean share of the ranks, without the one that waits least."""
        shares = sorted(event.waited / event.seconds for event in self._newest.values())
        waiting = shares[1:] or shares
        return sum(waiting) / len(waiting)

    def _cause(self) -> str:
        least = min(self._newest.values(), key=lambda event: event.waited / event.seconds)
        share = least.waited / least.seconds
        if share < _MUCH / 2:
            return (
                f"Rank {least.rank} on {least.host} waits least ({100 * share:.0f} %): the others "
                "wait for it. See what else runs on that machine, how fast it reads its rows, and "
                "whether its rows take longer than others."
            )
        return (
            f"Also the rank that waits least, rank {least.rank} on {least.host}, waits "
            f"{100 * share:.0f} %: the network between the hosts is probably slow. "
            "'hvd-estimators doctor --cluster' checks it. Larger batches, gradient_compression and "
            "backward_passes_per_step need less of it."
        )
