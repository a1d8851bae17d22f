"""Ranks that are killed once, at a random moment of their training.

Models and callbacks report steps and validations as events (`event`), the store reports
checkpoints, and the backend reports launches. The event of a `Kill` triggers SIGKILL for a
rank, at once or a moment later.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle
import fewer_ranks
from fewer_ranks import note

from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.store import LocalStore

RANKS = 2
_KILL, _FOLDER = "OF_TESTS_KILL", "OF_TESTS_FOLDER"
_QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
# Counted per folder, because classes returned from ranks bring these counts along.
_seen: collections.Counter[tuple[str, str]] = collections.Counter()


@dataclass(frozen=True)
class Kill:
    """Moment and rank of a kill.

    Attributes
    ----------
    moment : str
        Description of the moment, for people.
    kind : str
        Kind of event: ``"launch"``, ``"step"``, ``"validation"`` or ``"checkpoint"``.
    number : int
        Number of the event within its kind, from 1.
    rank : int
        Rank to kill. It reports the event itself, except for checkpoints, which rank 0
            reports.
    delay : float
        Seconds after the event.
    latest : int
        Step at which the rank is killed if the delay has not passed by then. Default: none.
    """

    moment: str
    kind: str
    number: int
    rank: int
    delay: float = 0.0
    latest: int = 0


@dataclass(frozen=True)
class Length:
    """Number of events of each kind on a rank in a run, and between two checkpoints."""

    steps: int
    validations: int
    checkpoints: int


def draw_kills(seed: str, number: int, length: Length) -> list[Kill]:
    """Draw kills by a seed: one for each moment, in random order, before any moment repeats."""
    chance = random.Random(seed)
    moments = {
        "launch": lambda: ("launch", 1, chance.uniform(0, 1.5)),
        "first step": lambda: ("step", 1, chance.choice([0, chance.uniform(0, 0.02)])),
        "within an epoch": lambda: (
            "step",
            chance.randint(2, length.steps - 1),
            chance.choice([0, chance.uniform(0, 0.02)]),
        ),
        "validation": lambda: ("validation", chance.randint(1, length.validations), 0),
        "checkpoint": lambda: ("checkpoint", chance.randint(1, length.checkpoints), 0),
        "last step": lambda: ("step", length.steps, 0),
    }
    drawn: list[Kill] = []
    while len(drawn) < number:
        for moment in chance.sample(list(moments), len(moments)):
            kind, count, delay = moments[moment]()
            # A rank with warm imports may train faster than the delay.
            latest = length.steps if kind == "launch" else 0
            rank = chance.randrange(RANKS)
            drawn.append(Kill(moment, kind, count, rank, round(delay, 4), latest))
    return drawn[:number]


def event(kind: str, ids: Any = None) -> None:
    """Report an event, with the ids of its rows, on a rank; elsewhere, do nothing."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return
    if ids is not None:
        note(folder, int(os.environ["HOROVOD_RANK"]), ids)
    _seen[folder, kind] += 1
    with open(Path(folder, f"{os.getpid()}.{kind}"), "a") as file:
        file.write(".")
    kill = Kill(**json.loads(os.environ[_KILL])) if _KILL in os.environ else None
    if kill is None:
        return
    now = (kind, _seen[folder, kind])
    if now == ("step", kill.latest) and int(os.environ["HOROVOD_RANK"]) == kill.rank:
        _strike(folder, kill.rank)
    if now != (kill.kind, kill.number):
        return
    if kind != "checkpoint" and int(os.environ["HOROVOD_RANK"]) != kill.rank:
        return
    if kill.delay:
        timer = threading.Timer(kill.delay, _strike, (folder, kill.rank))
        timer.daemon = True
        timer.start()
    else:
        _strike(folder, kill.rank)


def _strike(folder: str, rank: int) -> None:
    """Kill a rank, unless one was killed before."""
    # The rank may have ended normally after the last checkpoint was written.
    over = (FileExistsError, ProcessLookupError)
    with contextlib.suppress(*over), open(Path(folder, "killed"), "x"):
        os.kill(int(Path(folder, f"rank-{rank}").read_text()), signal.SIGKILL)


def was_killed(folder: Path) -> bool:
    """Return whether a rank was killed."""
    return bool(list(folder.glob("launch-*/killed")))


def events_of(folder: Path, kind: str) -> list[int]:
    """Return the number of events of a kind that each process has reported."""
    return [len(path.read_text()) for path in folder.glob(f"launch-*/*.{kind}")]


class KillingBackend(LocalBackend):
    """Backend with single-threaded ranks that kills one of them in a launch.

    Parameters
    ----------
    folder : Path
        Receives a folder for each launch, with the events of its ranks.
    *kills : Kill
        Kills for the first launch, the second, and so on. Default: none.
    slots : sequence of int
        Number of ranks in each launch.
    """

    def __init__(self, folder: Path, *kills: Kill, slots: Sequence[int] = ()) -> None:
        super().__init__(slots[0] if slots else RANKS, env=_QUIET)
        self._folder, self._kills, self._slots = folder, kills, slots
        # Shared with backends that are made for another number of ranks.
        self._launches: list[int] = []

    @property
    def launches(self) -> int:
        """Number of launches."""
        return len(self._launches)

    def task_slots(self) -> int | None:
        return self._slots[self.launches] if self._slots else None

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: Any = None,
        **unknown: Any,
    ) -> list[Any]:
        folder = self._folder / f"launch-{self.launches}"
        folder.mkdir(parents=True)
        told = {_FOLDER: str(folder)}
        if self.launches < len(self._kills):
            told[_KILL] = json.dumps(asdict(self._kills[self.launches]))
        self._launches.append(self.num_processes())
        arguments = ((fn, *args), kwargs, {**(env or {}), **told}, on_event)
        return super().run(_tell_and_run, *arguments, **unknown)


def _tell_and_run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rank = os.environ["HOROVOD_RANK"]
    Path(os.environ[_FOLDER], f"rank-{rank}").write_text(f"{os.getpid()}")
    event("launch")
    return fn(*args, **kwargs)


class TellingStore(LocalStore):
    """Store that reports writes of checkpoints (before, during, after) and deletions."""

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        tell = event if "/checkpoints/" in path else _nothing
        tell("checkpoint")
        with super().open_atomic(path) as file:
            tell("checkpoint")
            yield file
            tell("checkpoint")
        tell("checkpoint")

    def delete(self, path: str) -> None:
        super().delete(path)
        if "/checkpoints/" in path:
            event("checkpoint")


def _nothing(kind: str) -> None:
    pass


def send_by_value() -> None:
    """Pickle this module by value, as ranks cannot import it."""
    for module in (sys.modules[__name__], fewer_ranks):
        cloudpickle.register_pickle_by_value(module)
