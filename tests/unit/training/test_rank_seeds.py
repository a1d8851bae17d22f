"""Each rank has its own stream of random numbers in each epoch."""

from __future__ import annotations

import random

import numpy as np

from hvd_estimators.training.horovod_session import rank_seed, seed_rank


def test_ranks_epochs_and_seeds_have_seeds_of_their_own() -> None:
    places = [(s, r, e) for s in (0, 1, 2**31) for r in range(4) for e in range(4)]
    seeds = [rank_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert seeds == [rank_seed(*place) for place in places]
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_python_and_numpy_are_seeded() -> None:
    drawn = []
    for rank in (0, 0, 1):
        seed_rank(7, rank, epoch=2)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]
