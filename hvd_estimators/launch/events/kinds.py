"""What ranks tell the driver while a job runs; see `hvd_estimators.launch.events.stream`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

__all__ = [
    "Event",
    "Handler",
    "RankEpoch",
    "RankMessage",
    "RankOutput",
    "RankProgress",
    "decoded",
    "encoded",
]


@dataclass(frozen=True)
class RankProgress:
    """How far a rank has come; rank 0 tells it for all.

    Attributes
    ----------
    rank : int
        Who tells it.
    epoch : int
        The current epoch, from 0.
    epochs : int
        Epochs of the whole run.
    step : int
        Steps of the epoch that are done.
    steps : int
        Steps of an epoch.
    rows_per_second : float
        Rows of all ranks in a second, since the epoch began.
    means : mapping of str to float
        What was measured, in the mean over the epoch so far.
    done : bool
        Whether the epoch has ended.
    """

    kind: ClassVar[str] = "progress"

    rank: int
    epoch: int
    epochs: int
    step: int
    steps: int
    rows_per_second: float
    means: Mapping[str, float] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True)
class RankEpoch:
    """What was measured in an epoch that is over; rank 0 tells it for all.

    Attributes
    ----------
    rank : int
        Who tells it.
    epoch : int
        The epoch, from 0.
    rows : sequence of (str, str, float)
        Stage (``"train"`` or ``"validation"``), name and value of each number.
    """

    kind: ClassVar[str] = "epoch"

    rank: int
    epoch: int
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class RankOutput:
    """A line that a rank has printed.

    Attributes
    ----------
    rank : int
        The rank.
    line : str
        The line with its end; of a long one the two ends only. Where lines have been left out,
        because nobody took them for long, one says how many.
    stream : str
        ``"stdout"`` or ``"stderr"``; empty where the two are not told apart.
    time : float
        When it came to the driver, in seconds since the epoch; 0 where that is not to be shown.
    """

    kind: ClassVar[str] = "output"

    rank: int
    line: str
    stream: str = ""
    time: float = 0.0

    def text(self) -> str:
        """Return the line as it is shown: as ``horovod.spark.run`` does if its stream is known."""
        when = time.asctime(time.localtime(self.time)) if self.time else ""
        between = f"<{self.stream}>:" if self.stream else " "
        return f"{when}[{self.rank}]{between}{self.line}"


@dataclass(frozen=True)
class RankMessage:
    """A message of a rank to the driver, see `hvd_estimators.log_to_driver`.

    Attributes
    ----------
    rank : int
        Who sends it.
    message : str
        The message; of a long one the two ends only.
    """

    kind: ClassVar[str] = "message"

    rank: int
    message: str


Event = RankProgress | RankEpoch | RankOutput | RankMessage

Handler = Callable[[Event], None]
"""Called on the driver with one event at a time, from another thread."""

_KINDS: dict[str, Callable[..., Event]] = {
    kind.kind: kind for kind in (RankProgress, RankEpoch, RankOutput, RankMessage)
}


def encoded(event: Event) -> dict[str, Any]:
    """Return an event as it travels."""
    return {"kind": event.kind, **asdict(event)}


def decoded(message: Mapping[str, Any]) -> Event:
    """Return the event that a message tells of."""
    values = dict(message)
    return _KINDS[values.pop("kind")](**values)
