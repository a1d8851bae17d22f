"""Fits with hanging ranks, whose processes still run, are relaunched automatically."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from reference import fit, write_rows
from resuming import DataDependent
from variants import others_in_soak

from hvd_estimators.fitting import restarts
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank.hang_detection import HANG_VARIABLE
from hvd_estimators.store.runs import read_metadata

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


class Hangs(DataDependent):
    """Model that hangs on rank 1, in the tenth training batch of the first launch."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self.told = told
        self.batches = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and os.environ.get("HOROVOD_RANK") == "1":
            self.batches += 1
            if self.batches == 10 and not Path(self.told).exists():
                Path(self.told).touch()
                threading.Event().wait()
        return super().forward(x)


@pytest.mark.parametrize("library", others_in_soak("horovod", "torch"))
def test_a_hanging_rank_is_relaunched_and_the_result_is_unchanged(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    # The default is half an hour. torch waits for 30 seconds at least.
    monkeypatch.setattr(restarts, "_STALL_SECONDS", 3)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
    for module in ("resuming", __name__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    write_rows(Path(store.get_train_data_path()), 107)

    def run(run_id: str, told: Path) -> dict[str, torch.Tensor]:
        net = Hangs(str(told))
        settings = {"optimizer": torch.optim.Adam(net.parameters(), lr=0.01), "batch_size": 8}
        model, _ = fit(
            *(store, 2, "adam"),
            model=net,
            run_id=run_id,
            epochs=2,
            max_restarts=1,
            backend=LocalBackend(2, env={HANG_VARIABLE: "120"}),
            collectives=library,
            **settings,
        )
        return model.getModel().state_dict()

    found = run("hangs", tmp_path / "told")
    assert (tmp_path / "told").exists()
    noted = read_metadata(store, store.run_paths("hangs").run_path)
    assert noted is not None
    (restart,) = noted["fits"][0]["restarts"]
    assert (restart["cause"], restart["rank"], restart["epoch"]) == ("raised", 0, 1)
    expected = run("whole", tmp_path / "told")
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class SleepyRows:
    """Transformation that hangs on each rank, in its second call of the first launch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.calls = 0

    def __call__(self, columns: Any) -> Any:
        rank = os.environ.get("HOROVOD_RANK")
        if rank is not None:
            self.calls += 1
            told = Path(self.folder, rank)
            if self.calls == 2 and not told.exists():
                told.touch()
                threading.Event().wait()
        return columns


def test_ranks_that_all_wait_for_rows_are_relaunched(store: Any, tmp_path: Path) -> None:
    for module in ("resuming", __name__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    write_rows(Path(store.get_train_data_path()), 107)
    net = DataDependent()
    fit(
        *(store, 2, "adam"),
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        batch_size=8,
        run_id="sleeps",
        epochs=4,
        max_restarts=1,
        data_module="arrow",
        transformation_batch_fn=SleepyRows(str(tmp_path)),
        # The default is four hours.
        backend=LocalBackend(2, env={HANG_VARIABLE: "5"}),
    )
    assert {path.name for path in tmp_path.glob("[01]")} == {"0", "1"}
    noted = read_metadata(store, store.run_paths("sleeps").run_path)
    assert noted is not None
    (restart,) = noted["fits"][0]["restarts"]
    assert restart["cause"] == "stalled"
    assert noted["state"] == "finished"
