"""A rank's Horovod session: process sets and seeds."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from hvd_estimators.training.horovod_session import rank_seed, seed_rank

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import horovod.{first} as hvd
from horovod.common import process_sets
from hvd_estimators.training.horovod_session import horovod_session

for _ in range(2):
    with horovod_session(hvd, None):
        import horovod.{second}

        print(hvd.global_process_set.size(), process_sets.global_process_set.rank())
horovod.{second}.init()
print(horovod.{second}.global_process_set.size())
"""


def test_importing_another_framework_keeps_the_process_sets() -> None:
    program = textwrap.dedent(PROGRAM).format(first="tensorflow", second="torch")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.stdout.splitlines() == ["1 0", "1 0", "1"], ended.stderr[-4000:]


def test_seeds_differ_between_ranks_epochs_and_seeds() -> None:
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
