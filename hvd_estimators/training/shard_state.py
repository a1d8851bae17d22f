"""Per-shard state, for ranks that run several shards: random streams and statistics.

A canonical shard has streams of its own, which begin anew in each epoch (`seed_rank`). A rank that
plays several shards swaps their states; a checkpoint within an epoch holds those of all shards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from hvd_estimators.loading.plan import virtual_shards

__all__ = ["HostStreams", "ShardStates", "StatePart", "capture_by_shard", "of_shards"]

T = TypeVar("T")


class HostStreams:
    """Python's and NumPy's global generators."""

    def capture(self) -> dict[str, Any]:
        """Return the states, as plain values that a checkpoint keeps."""
        version, numbers, gauss = random.getstate()
        return {
            "python": {"version": version, "state": np.array(numbers, "u4"), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the states that `capture` returned."""
        python = state["python"]
        random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
        np.random.set_state(state["numpy"])


def capture_by_shard(shards: ShardStates, capture: Callable[[], T]) -> dict[int, T]:
    """Return what is captured as each of the shards that a rank plays."""
    found: dict[int, T] = {}
    shards.for_each(lambda shard: found.update({shard: capture()}))
    return found


def of_shards(
    ranks: Iterable[Mapping[int, Mapping[str, Any]]], num_shards: int
) -> tuple[Mapping[str, Any], ...]:
    """Return the states of all canonical shards, in order, of what each rank has of its own.

    Parameters
    ----------
    ranks : iterable of mapping
        Canonical shard to its states, of each rank.
    num_shards : int
        The number of canonical shards.
    """
    found = {shard: state for states in ranks for shard, state in states.items()}
    return tuple(found[shard] for shard in range(num_shards))


class StatePart(Protocol):
    """A part of the state of a process, such as its random streams."""

    def capture(self) -> Any:
        """Return the state, as values that nothing changes later."""

    def restore(self, state: Any) -> None:
        """Set the state that `capture` returned."""


class ShardStates:
    """Lets a rank be each of its shards in turn, as if that had a process of its own.

    A rank with one shard does nothing for it. Where it plays several, all begin with the state of
    the process when `for_each` is first called, before the first batch; what is drawn and counted
    while the rank plays one of them is kept for its next turn.

    Parameters
    ----------
    num_shards : int
        Number of canonical shards.
    rank, size : int
        This rank, and the number of ranks.
    parts : sequence of StatePart
        What each shard has for itself.

    Attributes
    ----------
    shards : tuple of int
        The shards that this rank plays.
    passes : int
        Turns of a step: more than its shards on a rank that has one shard fewer than others.
    """

    def __init__(
        self, num_shards: int, rank: int, size: int, parts: Sequence[StatePart] = ()
    ) -> None:
        self.num_shards = num_shards
        self.shards = virtual_shards(num_shards, rank, size)
        self.passes = -(-num_shards // size)
        self._parts = parts
        self._current = 0
        self._states: list[list[Any]] = []

    def enter(self, turn: int) -> None:
        """Be the shard whose turn it is; what happens in an idle turn is forgotten."""
        if self.passes == 1 or turn == self._current:
            return
        self._begin()
        if self._current < len(self.shards):
            self._states[self._current] = self._capture()
        self._current = turn
        if turn < len(self.shards):
            for part, state in zip(self._parts, self._states[turn], strict=True):
                part.restore(state)

    def for_each(self, call: Callable[[int], object]) -> None:
        """Call with each shard that the rank plays, as that shard, and be the first one again."""
        self._begin()
        for turn, shard in enumerate(self.shards):
            self.enter(turn)
            call(shard)
        self.enter(0)

    def _begin(self) -> None:
        if self.passes > 1 and not self._states:
            own = self._capture()
            self._states = [own for _ in self.shards]

    def _capture(self) -> list[Any]:
        return [part.capture() for part in self._parts]
