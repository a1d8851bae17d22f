"""A rank killed at a random moment costs only time: the run ends with the same weights.

The weights are bit-for-bit identical after one restart, as on CPUs with one thread.
``KILLS_SEED`` selects other moments.
"""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import kill_fits
import kills
import pytest
from kill_fits import (
    EVERY,
    LENGTH,
    MOST_LOST,
    assert_equal_bits,
    end_of,
    make_estimator,
    write_data,
)
from kills import KillingBackend, TellingStore, events_of, was_killed
from variants import others_in_soak

from hvd_estimators.exceptions import HvdEstimatorsError

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FRAMEWORKS = ("torch", "keras", "lightning")
READERS = ("arrow", "petastorm") if importlib.util.find_spec("petastorm") else ("arrow",)


def setup_module() -> None:
    kills.send_by_value()
    kill_fits.send_by_value()


def check(framework: str, reader: str, folder: Path, seed: int, number: int, **params: Any) -> None:
    """Kill a rank in each of several runs, and compare each with an undisturbed run."""
    store = TellingStore(str(folder / "store"))
    write_data(store)

    def fit(name: str, kill: kills.Kill | None = None, **more: Any) -> Any:
        backend = KillingBackend(folder / name, *([kill] if kill else []))
        estimator = make_estimator(
            framework,
            store=store,
            run_id=name,
            backend=backend,
            data_module=reader,
            max_restarts=1,
            **params,
            **more,
        )
        found = end_of(framework, estimator.fit_on_parquet())
        # A kill after the rank's work is done does not matter.
        had_ended = kill is not None and kill.kind == "checkpoint" and backend.launches == 1
        assert had_ended or backend.launches == 1 + was_killed(folder / name)
        return found

    whole = fit("whole")
    assert events_of(folder / "whole", "step") == [LENGTH.steps] * kills.RANKS
    drawn = kills.draw_kills(f"{seed} {framework} {reader}", number, LENGTH)
    failed: list[str] = []
    for index, kill in enumerate(drawn):
        name = f"killed-{index}"
        told = f"seed {seed}, {framework}, {reader}, {index}: {kill}"
        print(told, flush=True)
        try:
            found = fit(name, kill, checkpoint_every_n_steps=EVERY)
            assert was_killed(folder / name), "the run has ended before it"
            assert_equal_bits(found, whole)
            # Steps before the second-to-last checkpoint are not trained again.
            again = sum(events_of(folder / name, "step")) - kills.RANKS * LENGTH.steps
            assert again <= MOST_LOST, again
        except (AssertionError, HvdEstimatorsError) as error:
            # Further runs may show more about the cause.
            failed.append(f"{told}: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("framework", others_in_soak("torch", "keras", "lightning"))
def test_a_killed_rank_does_not_change_the_result(framework: str, tmp_path: Path) -> None:
    reader = READERS[FRAMEWORKS.index(framework) % len(READERS)]
    check(framework, reader, tmp_path, int(os.environ.get("KILLS_SEED", "17")), 1)


@pytest.mark.parametrize(
    ("framework", "sharding"),
    [
        ("torch", None),
        pytest.param("keras", None, marks=pytest.mark.soak),
        pytest.param("torch", "full", marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_of_torch_distributed_does_not_change_the_result(
    framework: str, sharding: str | None, tmp_path: Path
) -> None:
    seed = int(os.environ.get("KILLS_SEED", "17"))
    check(framework, READERS[0], tmp_path, seed, 1, **of_torch(sharding))


@pytest.mark.parametrize("framework", others_in_soak("torch", "keras", "lightning"))
def test_a_kill_in_validation_repeats_steps_since_the_last_checkpoint(
    framework: str, tmp_path: Path
) -> None:
    store = TellingStore(str(tmp_path / "store"))
    write_data(store)
    kill = kills.Kill("validation", "validation", LENGTH.validations // 2 + 1, rank=1)
    found = {}
    for name, chosen in (("whole", None), ("killed", kill)):
        backend = KillingBackend(tmp_path / name, *([chosen] if chosen else []))
        params = {"store": store, "run_id": name, "backend": backend, "max_restarts": 1}
        estimator = make_estimator(framework, checkpoint_every_n_steps=EVERY, **params)
        model = estimator.fit_on_parquet()
        found[name] = end_of(framework, model)
        assert model.summary.restarts == (name == "killed")
    assert was_killed(tmp_path / "killed")
    assert_equal_bits(found["killed"], found["whole"])
    whole, killed = (sum(events_of(tmp_path / name, "step")) for name in found)
    assert whole == kills.RANKS * LENGTH.steps
    assert 0 < killed - whole <= MOST_LOST


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_kills_at_twenty_moments_do_not_change_the_result(
    framework: str, reader: str, tmp_path: Path
) -> None:
    seed = int(os.environ.get("KILLS_SEED", random.SystemRandom().randrange(10**6)))
    check(framework, reader, tmp_path, seed, 20)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("framework", "sharding"),
    [("torch", None), ("torch", "full"), ("lightning", None), ("lightning", "full")],
)
def test_kills_of_torch_distributed_ranks_at_twenty_moments(
    framework: str, sharding: str | None, tmp_path: Path
) -> None:
    seed = int(os.environ.get("KILLS_SEED", random.SystemRandom().randrange(10**6)))
    check(framework, READERS[0], tmp_path, seed, 20, **of_torch(sharding))


def of_torch(sharding: str | None) -> dict[str, Any]:
    return {"collectives": "torch"} if sharding is None else {"sharding": sharding}
