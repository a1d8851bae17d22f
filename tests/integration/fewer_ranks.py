"""Fits in which 4 canonical shards are played by as many ranks, or by fewer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd_estimators.loading.sharding import played_shards
from hvd_estimators.loading.spec import DataSpec

SHARDS = 4


class FourShards:
    """Lets an estimator train as a run does that began with 4 ranks."""

    def _plan(self, manifest: Any, num_shards: int, num_ranks: int, seed: int) -> DataSpec:
        data: DataSpec = super()._plan(  # type: ignore[misc]
            manifest, SHARDS, num_ranks, seed
        )
        return data


def note(folder: str, rank: int, ids: Any) -> None:
    """Take down, on a rank, the ids of a batch of training."""
    with open(Path(folder, f"{rank}.json"), "a") as file:
        file.write(json.dumps(np.asarray(ids).reshape(-1).astype(int).tolist()) + "\n")


def noted_steps(folder: Path, ranks: int) -> list[list[int]]:
    """Return the ids of each step of all ranks, in the order of the shards."""
    of_shards: dict[int, Iterator[list[int]]] = {}
    for rank in range(ranks):
        shards = played_shards(SHARDS, rank, ranks)
        lines = Path(folder, f"{rank}.json").read_text().splitlines()
        # A rank without a shard in some turn has an empty batch there, or none.
        batches = [batch for batch in map(json.loads, lines) if batch]
        for turn, shard in enumerate(shards):
            of_shards[shard] = iter(batches[turn :: len(shards)])
    steps = zip(*(of_shards[shard] for shard in range(SHARDS)), strict=True)
    return [[number for batch in batches for number in batch] for batches in steps]
