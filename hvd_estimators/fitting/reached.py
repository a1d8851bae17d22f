"""How far the ranks of a fit have come, over all of its launches. Runs on the driver."""

from __future__ import annotations

from hvd_estimators.launch.events.stream import Event, Handler, RankEpoch, RankProgress

__all__ = ["Reached"]


class Reached:
    """Follows what ranks tell, and keeps from others what they have been told before.

    Ranks that were launched again train anew what came after the checkpoint that they go on from.

    Attributes
    ----------
    place : (int, int) or None
        Epoch, from 0, and steps of it, as the ranks of the current launch told them last; None
        before they did.
    """

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        self._told: set[tuple[str, int]] = set()
        self._told_before: set[tuple[str, int]] = set()

    def restart(self) -> None:
        """Take note that ranks are launched again."""
        self.place = None
        self._told_before = set(self._told)

    def handler(self, handler: Handler) -> Handler:
        """Return what handles events, and hands on to another handler what is new to it."""

        def handle(event: Event) -> None:
            if self._is_new(event):
                handler(event)

        return handle

    def _is_new(self, event: Event) -> bool:
        if isinstance(event, RankEpoch):
            self._add(event.kind, event.epoch, (event.epoch + 1, 0))
        elif isinstance(event, RankProgress):
            if event.done:
                self._add(event.kind, event.epoch, (event.epoch + 1, 0))
            else:
                self.place = max(self.place or (0, 0), (event.epoch, event.step))
        else:
            return True
        return (event.kind, event.epoch) not in self._told_before

    def _add(self, kind: str, epoch: int, place: tuple[int, int]) -> None:
        self._told.add((kind, epoch))
        self.place = max(self.place or (0, 0), place)
