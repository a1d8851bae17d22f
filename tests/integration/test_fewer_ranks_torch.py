"""4 canonical shards on fewer ranks: the same rows in the same steps, the same weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer_ranks import FourShards, fits_of_the_same_steps, note
from rank_pool import shared_ranks
from reference import WIDTH, write_rows
from torchmetrics import MeanAbsoluteError, PearsonCorrCoef, SpearmanCorrCoef
from variants import others_in_soak

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration


class FourShardsEstimator(FourShards, TorchEstimator):
    pass


def squared_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output.reshape(-1) - label.double().reshape(-1)) ** 2).mean()


class Net(torch.nn.Module):
    """Net with dropout and batch statistics that records its training rows.

    It uses double precision, as batch normalization of a few rows magnifies rounding errors.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.folder = folder
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        ).double()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.training and "HOROVOD_RANK" in os.environ:
            note(self.folder, int(os.environ["HOROVOD_RANK"]), ids)
        return self.layers(x.double())


def fit(
    store: Any, ranks: int, folder: Path, cls: type[TorchEstimator] = TorchEstimator, **params: Any
) -> Any:
    folder.mkdir(exist_ok=True)
    net = Net(str(folder))
    given = {
        "backend": shared_ranks(ranks),
        "store": store,
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9),
        "loss": squared_error,
        # Metrics with summed, list and combined states.
        "metrics": [MeanAbsoluteError(), SpearmanCorrCoef(), PearsonCorrCoef()],
        "feature_cols": ["features", "id"],
        "label_cols": ["label"],
        "validation": 0.5,
        "batch_size": 5,
        "val_batch_size": 1,
        "epochs": 2,
        "random_seed": 3,
        "verbose": 0,
    }
    return cls(**{**given, **params}).fit_on_parquet()


def assert_same(model: Any, expected: Any, told: str) -> None:
    weights, same = expected.getModel().state_dict(), model.getModel().state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(
            same[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{told}: {n}: {m}"
        )
    for epoch, same_epoch in zip(expected.getHistory(), model.getHistory(), strict=True):
        for stage in ("train", "validation"):
            assert same_epoch[stage]["loss"] == pytest.approx(epoch[stage]["loss"], rel=1e-6), told
            pairs = zip(same_epoch[stage]["all_metrics"], epoch[stage]["all_metrics"], strict=True)
            for found, wanted in pairs:
                assert found == pytest.approx(wanted, rel=1e-4, nan_ok=True), told


def test_fewer_ranks_train_the_same(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 58)
    write_rows(Path(store.get_val_data_path()), 7, seed=1)
    params = {"cls": FourShardsEstimator, "backward_passes_per_step": 2}
    models = fits_of_the_same_steps(
        tmp_path, lambda ranks, folder: fit(store, ranks, folder, **params)
    )
    for ranks in (3, 2, 1):
        assert_same(models[ranks], models[4], f"{ranks} ranks")


@pytest.mark.parametrize("library", others_in_soak("horovod", "torch"))
def test_a_run_of_three_ranks_resumes_with_two(store: Any, tmp_path: Path, library: str) -> None:
    write_rows(Path(store.get_train_data_path()), 58)
    write_rows(Path(store.get_val_data_path()), 7, seed=1)
    common = {"collectives": library}
    whole = fit(store, 3, tmp_path / "whole", **common)
    fit(store, 3, tmp_path / "parts", epochs=1, run_id="mine", **common)
    resumed = fit(store, 2, tmp_path / "parts", run_id="mine", **common)
    assert_same(resumed, whole, "resumed")
    with pytest.raises(ParamError, match="num_proc: the run 'mine' began with 3 ranks"):
        fit(store, 4, tmp_path / "parts", epochs=3, run_id="mine")
