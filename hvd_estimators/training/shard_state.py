"""Per-shard state: random streams, statistics, and their reduction over the shards.

Each canonical shard has its own random streams, which are reseeded in each epoch (`seed_rank`). A
rank that runs several virtual shards swaps their states. A mid-epoch checkpoint contains the states
of all shards.

Layers compute some tensors from batches, such as running means. In torch and Lightning they are
the module's buffers, whose reduction over the shards the param ``buffer_reduction`` selects. In
Keras they are variables that are not trained, and are averaged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.loading.plan import micro_batches_per_step, virtual_shards

T = TypeVar("T")


class HostStreams:
    """Python's and NumPy's global random generators."""

    def capture(self) -> dict[str, Any]:
        """Return the states as plain values that a checkpoint can contain."""
        version, numbers, gauss = random.getstate()
        return {
            "python": {"version": version, "state": np.array(numbers, "u4"), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore states that `capture` returned."""
        python = state["python"]
        random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
        np.random.set_state(state["numpy"])

    def changed(self, state: Mapping[str, Any]) -> dict[Any, Any]:
        """Return nothing: each shard draws its own numbers."""
        return {}


def capture_by_shard(shards: ShardStates, capture: Callable[[], T]) -> dict[int, T]:
    """Call ``capture`` as each of the rank's shards, and return the results by shard."""
    captured: dict[int, T] = {}
    shards.for_each(lambda shard: captured.update({shard: capture()}))
    return captured


def merge_by_shard(
    ranks: Iterable[Mapping[int, Mapping[str, Any]]], num_shards: int
) -> tuple[Mapping[str, Any], ...]:
    """Merge the per-shard states of all ranks into one tuple, in the order of the canonical shards.

    Parameters
    ----------
    ranks : iterable of mapping
        For each rank, a mapping of canonical shard to states.
    num_shards : int
        The number of canonical shards.
    """
    by_shard = {shard: state for states in ranks for shard, state in states.items()}
    return tuple(by_shard[shard] for shard in range(num_shards))


class StatePart(Protocol):
    """A part of the state of a process, such as its random streams."""

    def capture(self) -> Any:
        """Return the state, as values that do not change later."""

    def restore(self, state: Any) -> None:
        """Restore a state that `capture` returned."""

    def changed(self, state: Any) -> dict[Any, Any]:
        """Return the values that have changed since a state was restored, by their keys in it."""


class ShardStates:
    """Switches a rank between its virtual shards, as if each shard had a separate process.

    On a rank with one shard, it does nothing. On a rank with several shards, all shards start with
    the state of the process at the first call of `for_each`, before the first batch. The random
    draws and statistics of a shard are saved until the rank runs that shard again.

    Parameters
    ----------
    num_shards : int
        Number of canonical shards.
    rank, size : int
        This rank, and the number of ranks.
    parts : sequence of StatePart
        The state that is separate for each shard.

    Attributes
    ----------
    num_shards, rank, size : int
        As given.
    shards : tuple of int
        The shards that this rank runs.
    passes : int
        Micro-batches per step. On a rank that has one shard fewer than other ranks, it exceeds the
        number of shards.
    """

    def __init__(
        self, num_shards: int, rank: int, size: int, parts: Sequence[StatePart] = ()
    ) -> None:
        self.num_shards = num_shards
        self.rank, self.size = rank, size
        self.shards = virtual_shards(num_shards, rank, size)
        self.passes = micro_batches_per_step(num_shards, size)
        self._parts = parts
        self._current = 0
        self._states: list[list[Any]] = []

    def begin_step(self) -> None:
        """Give all shards the values that hooks have set since the last step.

        Hooks run once per step, while the first shard is current. With a process per shard, each
        process would run them.
        """
        if self._current or not self._states:
            return
        for index, part in enumerate(self._parts):
            for key, value in part.changed(self._states[0][index]).items():
                for state in self._states:
                    state[index][key] = value

    def keep_own(self) -> None:
        """Take the current values as the first shard's own, which no hook has set."""
        if self._states:
            self._states[0] = self._capture()

    def enter(self, micro_batch: int) -> None:
        """Switch to the shard of a micro-batch; state from an empty micro-batch is discarded."""
        if self.passes == 1 or micro_batch == self._current:
            return
        self._initialize()
        if self._current < len(self.shards):
            self._states[self._current] = self._capture()
        self._current = micro_batch
        if micro_batch < len(self.shards):
            for part, state in zip(self._parts, self._states[micro_batch], strict=True):
                part.restore(state)

    def for_each(self, call: Callable[[int], object]) -> None:
        """Call a function as each of the rank's shards, then switch back to the first shard."""
        self.begin_step()
        self._initialize()
        for index, shard in enumerate(self.shards):
            self.enter(index)
            call(shard)
        self.enter(0)

    def _initialize(self) -> None:
        if self.passes > 1 and not self._states:
            own = self._capture()
            self._states = [own for _ in self.shards]

    def _capture(self) -> list[Any]:
        return [part.capture() for part in self._parts]


BUFFER_REDUCTIONS = ("mean", "max", "min", "sum", "rank0")


def parse_buffer_reduction(name: str, value: Mapping[str, str]) -> dict[str, str]:
    """Validate a dict of buffer name to reduction."""
    if not isinstance(value, Mapping):
        raise ParamError(
            f"{name}: expected a dict of buffer name to reduction, such as "
            f"{{'running_max': 'max'}}, found {value!r}."
        )
    for buffer, reduction in value.items():
        if not isinstance(buffer, str):
            raise ParamError(f"{name}: expected names of buffers, found {buffer!r}.")
        if reduction not in BUFFER_REDUCTIONS:
            raise ParamError(
                f"{name}: expected one of {', '.join(map(repr, BUFFER_REDUCTIONS))} for "
                f"{buffer!r}, found {reduction!r}."
            )
    return dict(value)


def find_buffers(reductions: Mapping[str, str], buffers: Mapping[str, str]) -> dict[str, str]:
    """Return the reduction of each buffer that the param names.

    A name is a buffer's name, or its last parts. For example, ``running_max`` matches all buffers
    of this name, in any layer. If two names match a buffer, the longer one applies.

    Parameters
    ----------
    reductions : mapping
        The value of the param.
    buffers : mapping
        The model's buffers: name to kind (``"float"``, ``"int"``, ``"bool"`` or ``"complex"``).

    Raises
    ------
    ParamError
        If a name does not match a buffer, or the reduction does not apply to the buffer's kind.
    """
    by_buffer: dict[str, str] = {}
    for name in sorted(reductions, key=len):
        named = _named(name, buffers)
        if not named:
            listed = ", ".join(map(repr, buffers)) or "none"
            raise ParamError(
                f"buffer_reduction: the model has no buffer {name!r}. Its buffers: {listed}."
                f"{did_you_mean(name, buffers)}"
            )
        for buffer in named:
            _check_kind(buffer, buffers[buffer], reductions[name])
            by_buffer[buffer] = reductions[name]
    return by_buffer


def _named(name: str, buffers: Iterable[str]) -> list[str]:
    return [b for b in buffers if b == name or b.endswith(f".{name}")]


def _check_kind(buffer: str, kind: str, reduction: str) -> None:
    unusable = {"bool": ("mean", "sum"), "complex": ("max", "min")}.get(kind, ())
    if reduction in unusable:
        usable = [r for r in BUFFER_REDUCTIONS if r not in unusable]
        raise ParamError(
            f"buffer_reduction: {buffer!r} is {kind}, which has no {reduction!r}. Set one of "
            f"{', '.join(map(repr, usable))}."
        )
