"""The states of what draws random numbers on a rank: Python and NumPy; frameworks add their own.

A canonical shard has streams of its own, which begin anew in each epoch (`seed_rank`). A rank that
plays several shards swaps their states; a checkpoint within an epoch holds those of all shards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from hvd_estimators.training.shards import ShardStates

__all__ = ["HostStreams", "captured", "of_shards"]

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


def captured(shards: ShardStates, capture: Callable[[], T]) -> dict[int, T]:
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
