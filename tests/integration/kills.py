"""Ranks that are killed once, at a moment of their training that chance has chosen.

What a rank does tells of itself (`event`): models and callbacks of steps and of validation, the
store of checkpoints, the backend of launches. The event that a `Kill` waits for kills a rank, with
SIGKILL, at once or a moment later.
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
# By the folder, too: classes that come back from ranks bring along what these have counted.
_seen: collections.Counter[tuple[str, str]] = collections.Counter()


@dataclass(frozen=True)
class Kill:
    """When which rank is killed.

    Attributes
    ----------
    moment : str
        What it is killed in, for people.
    kind : str
        Kind of event: ``"launch"``, ``"step"``, ``"validation"`` or ``"checkpoint"``.
    number : int
        Which event of that kind, from 1.
    rank : int
        Which rank is killed. It tells of the event itself, but for checkpoints, of which rank 0
        tells.
    delay : float
        Seconds after the event.
    latest : int
        Step at which the rank is killed if it comes before the delay has passed. Default: none.
    """

    moment: str
    kind: str
    number: int
    rank: int
    delay: float = 0.0
    latest: int = 0


@dataclass(frozen=True)
class Length:
    """How many events of each kind a run has on a rank, and between two checkpoints."""

    steps: int
    validations: int
    checkpoints: int


def draw_kills(seed: str, number: int, length: Length) -> list[Kill]:
    """Draw kills by a seed: of each moment one, in any order, before there is another of it."""
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
            # A rank with warm imports may train in less time than the delay.
            latest = length.steps if kind == "launch" else 0
            rank = chance.randrange(RANKS)
            drawn.append(Kill(moment, kind, count, rank, round(delay, 4), latest))
    return drawn[:number]


def event(kind: str, ids: Any = None) -> None:
    """Tell, on a rank, that something happens now, to rows of these ids; does nothing elsewhere."""
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
    # It may have ended by itself, when the last checkpoint is written.
    over = (FileExistsError, ProcessLookupError)
    with contextlib.suppress(*over), open(Path(folder, "killed"), "x"):
        os.kill(int(Path(folder, f"rank-{rank}").read_text()), signal.SIGKILL)


def was_killed(folder: Path) -> bool:
    """Return whether a rank was killed."""
    return bool(list(folder.glob("launch-*/killed")))


def events_of(folder: Path, kind: str) -> list[int]:
    """Return how many events of a kind each process has told of."""
    return [len(path.read_text()) for path in folder.glob(f"launch-*/*.{kind}")]


class KillingBackend(LocalBackend):
    """Runs ranks of one thread each, and kills one of them in a launch.

    Parameters
    ----------
    folder : Path
        Gets a folder for each launch, with what its ranks tell.
    *kills : Kill
        Of the first launch, the second, and so on. Default: none.
    slots : sequence of int
        Ranks of each launch.
    """

    def __init__(self, folder: Path, *kills: Kill, slots: Sequence[int] = ()) -> None:
        super().__init__(slots[0] if slots else RANKS, env=_QUIET)
        self._folder, self._kills, self._slots = folder, kills, slots
        # Shared with those that are made for another number of ranks.
        self._launches: list[int] = []

    @property
    def launches(self) -> int:
        """How many there were."""
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
    """Tells of what is done to checkpoints: before, while and after a file is written, deleted."""

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
    """Send what is defined here to ranks by value, as they cannot import it."""
    for module in (sys.modules[__name__], fewer_ranks):
        cloudpickle.register_pickle_by_value(module)
