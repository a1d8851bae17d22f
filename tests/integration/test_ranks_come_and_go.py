"""A run of 4 ranks resumes with 2 and then with 3, as slots are lost and found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kill_fits
import kills
import numpy as np
import pytest
from fewer_ranks import noted_steps
from kill_fits import EVERY, ROWS, end_of, make_estimator, write_data
from kills import Kill, KillingBackend, TellingStore

from hvd_estimators.store.runs import read_metadata

pytestmark = [pytest.mark.soak, pytest.mark.integration]

EPOCHS, STEPS = 3, 4
SLOTS = (4, 2, 3)
# In the second epoch, and in the third, where each of two ranks has two batches per step.
KILLS = (Kill("the second epoch", "step", 6, 3), Kill("the third epoch", "step", 12, 0))


def setup_module() -> None:
    kills.send_by_value()
    kill_fits.send_by_value()


def steps_of(folder: Path) -> list[list[list[int]]]:
    """Return the ids of each step that each launch has trained."""
    return [
        noted_steps(folder / f"launch-{launch}", ranks, ended=launch == len(SLOTS) - 1)
        for launch, ranks in enumerate(SLOTS)
        if (folder / f"launch-{launch}").exists()
    ]


def check_rows(folder: Path, store: Any) -> None:
    """Check that each epoch trains on all rows, and that no step is repeated or left out."""
    (steps,) = steps_of(folder / "whole")
    assert len(steps) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        of_epoch = steps[epoch * STEPS : (epoch + 1) * STEPS]
        assert sorted(number for step in of_epoch for number in step) == list(range(ROWS))
    # Steps of each launch up to the position from which the next one resumes.
    restarts = (read_metadata(store, store.get_run_path("parts")) or {})["fits"][-1]["restarts"]
    begins = [0, *(note["epoch"] * STEPS + note["step"] for note in restarts)]
    ends = [*begins[1:], EPOCHS * STEPS]
    assert 0 < begins[1] < begins[2]
    trained = [
        step
        for of_launch, begin, end in zip(steps_of(folder / "parts"), begins, ends, strict=True)
        for step in of_launch[: end - begin]
    ]
    assert trained == steps


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("torch", {}),
        pytest.param("torch", {"sharding": "full"}, id="parts"),
        ("keras", {}),
        ("lightning", {}),
    ],
)
def test_a_run_of_four_ranks_resumes_with_two_and_then_three(
    framework: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_estimators.launch.relaunch._RETURN_SECONDS", 0.0)
    store = TellingStore(str(tmp_path / "store"))
    write_data(store)

    def fit(name: str, backend: Any, **params: Any) -> dict[str, Any]:
        settings = {"store": store, "run_id": name, "backend": backend, "epochs": EPOCHS, **given}
        return end_of(framework, make_estimator(framework, **settings, **params).fit_on_parquet())

    whole = fit("whole", KillingBackend(tmp_path / "whole", slots=SLOTS[:1]))
    backend = KillingBackend(tmp_path / "parts", *KILLS, slots=SLOTS)
    parts = fit("parts", backend, max_restarts=2, min_num_proc=2, checkpoint_every_n_steps=EVERY)
    assert backend._launches == list(SLOTS)

    if not given:
        # Ranks that hold parts are noted with the rows with which they only keep others company.
        check_rows(tmp_path, store)
    for name, value in whole.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(parts[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
