"""Fits of 4 canonical shards on 4 or fewer ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from hvd_estimators.fitting import fit
from hvd_estimators.fitting.run import ReadOrder
from hvd_estimators.loading.plan import virtual_shards

SHARDS = 4

Fitted = TypeVar("Fitted")


class FourShards:
    """Mixin that makes an estimator train as in a run started with 4 ranks."""

    shards = SHARDS

    def _fit(self, dataset: Any) -> Any:
        with self._beginning():
            return super()._fit(dataset)  # type: ignore[misc]

    def fit_on_parquet(self, *args: Any, **kwargs: Any) -> Any:
        with self._beginning():
            return super().fit_on_parquet(*args, **kwargs)  # type: ignore[misc]

    def _beginning(self) -> Any:
        order = lambda num_ranks, seed: ReadOrder(self.shards, seed)  # noqa: E731
        return mock.patch.object(fit, "ReadOrder", order)


class ThreeShards(FourShards):
    """Mixin that makes an estimator train as in a run started with 3 ranks."""

    shards = 3


def note(folder: str, rank: int, ids: Any) -> None:
    """Write down the ids of a training batch on a rank."""
    with open(Path(folder, f"{rank}.json"), "a") as file:
        file.write(json.dumps(np.asarray(ids).reshape(-1).astype(int).tolist()) + "\n")


def noted_steps(folder: Path, ranks: int, ended: bool = True) -> list[list[int]]:
    """Return the ids of each step of all ranks, in the order of the shards.

    If the ranks have not ``ended`` but were killed, return only steps that all ranks started.
    """
    of_shards: dict[int, Iterator[list[int]]] = {}
    for rank in range(ranks):
        shards = virtual_shards(SHARDS, rank, ranks)
        lines = Path(folder, f"{rank}.json").read_text().splitlines()
        # A rank without a shard in a turn has an empty batch there, or none.
        batches = [batch for batch in map(json.loads, lines) if batch]
        for turn, shard in enumerate(shards):
            of_shards[shard] = iter(batches[turn :: len(shards)])
    steps = zip(*(of_shards[shard] for shard in range(SHARDS)), strict=ended)
    return [[number for batch in batches for number in batch] for batches in steps]


def fits_of_the_same_steps(tmp_path: Path, fit: Callable[[int, Path], Fitted]) -> dict[int, Fitted]:
    """Fit with 4, 3, 2 and 1 ranks, which must train on the same rows in each global step.

    Parameters
    ----------
    tmp_path : Path
        Folder for the ids of the batches.
    fit : callable
        Fits 2 epochs of 3 steps over 58 rows with ids, given the number of ranks and the folder
            for their notes.
    """
    fitted, noted = {}, {}
    for ranks in (SHARDS, 3, 2, 1):
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        fitted[ranks] = fit(ranks, folder)
        noted[ranks] = noted_steps(folder, ranks)
    steps = noted[SHARDS]
    assert len(steps) == 6
    assert sorted(number for step in steps[:3] for number in step) == list(range(58))
    assert steps[:3] != steps[3:]
    for ranks in (3, 2, 1):
        assert noted[ranks] == steps, ranks
    return fitted
