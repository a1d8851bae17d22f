"""Random states of the process, which fits in several threads share."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hvd_estimators._util.random_state import kept_random_state, seeded


def test_threads_that_build_models_with_a_seed_get_the_numbers_of_one() -> None:
    """A CrossValidator with ``parallelism`` builds its models in threads."""

    def build(seed: int) -> list[float]:
        drawn = []
        with seeded(seed):
            for _ in range(3):
                drawn += [random.random(), float(np.random.random()), float(torch.rand(()))]
                time.sleep(0.01)
        with kept_random_state():  # a trial of the model
            random.seed(0)
            np.random.seed(0)
        return drawn

    seeds = [7, 7, 8, 8] * 3
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(build, seeds))
    alone = {seed: build(seed) for seed in set(seeds)}
    assert found == [alone[seed] for seed in seeds]
