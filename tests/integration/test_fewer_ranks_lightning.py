"""4 canonical shards on fewer ranks: the same rows in the same steps, the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer_ranks import FourShards, fits_of_the_same_steps, note
from pytorch_lightning import LightningModule
from rank_pool import shared_ranks
from reference import WIDTH, write_rows
from resuming import kept_checkpoints
from torchmetrics import MeanSquaredError

from hvd_estimators.lightning import LightningEstimator

pytestmark = [pytest.mark.soak, pytest.mark.integration]


class FourShardsEstimator(FourShards, LightningEstimator):
    pass


class Module(LightningModule):
    """Module with dropout, batch statistics and a step scheduler that records its rows."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.folder = folder
        self.squared = MeanSquaredError()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        ).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        import horovod.torch as hvd

        if self._trainer is not None:
            note(self.folder, hvd.rank(), batch["id"])
        loss = self.loss(batch)
        self.log("train_mse", loss, on_step=False, on_epoch=True)
        # Some ranks have no second batch in this step, and must not be waited for.
        self.log("of_batch", float(batch_idx), sync_dist=True)
        self.squared(loss.detach(), torch.zeros_like(loss))
        self.log("squared", self.squared, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.log("of_rank", torch.ones(()), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def loss(self, batch: Any) -> torch.Tensor:
        output = self.layers(batch["features"].double())[:, 0]
        return torch.nn.functional.mse_loss(output, batch["label"].double())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


def test_fewer_ranks_train_the_same(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 58)
    write_rows(Path(store.get_val_data_path()), 7, seed=1)

    def fit(ranks: int, folder: Path, run_id: str | None = None) -> Any:
        estimator = FourShardsEstimator(
            backend=shared_ranks(ranks),
            store=store,
            model=Module(str(folder)),
            feature_cols=["features", "id"],
            label_cols=["label"],
            validation=0.5,
            batch_size=5,
            val_batch_size=1,
            backward_passes_per_step=2,
            epochs=2,
            random_seed=3,
            run_id=run_id or f"of-{ranks}",
            checkpoint_every_n_steps=1,
            keep_checkpoints=9,
            dry_run=False,
            verbose=0,
        )
        return estimator.fit_on_parquet()

    found = fits_of_the_same_steps(tmp_path, fit)
    for ranks in (3, 2, 1):
        assert_same(found[ranks], found[4], f"{ranks}")

    # After the first of two steps of an epoch, by 4 ranks or by 2.
    kept = {run_id: position for run_id, position in kept_checkpoints(store, "of-4")}
    kept |= {run_id: position for run_id, position in kept_checkpoints(store, "of-2")}
    assert kept["of-4-at-0-40"] == (0, 40)
    for run_id, ranks in (("of-4-at-0-40", 3), ("of-2-at-1-40", 3)):
        folder = tmp_path / run_id
        folder.mkdir()
        resumed = fit(ranks, folder, run_id)
        # Logged values cover the part since the restart; torchmetrics metrics continue.
        expected = copy.deepcopy(found[4].getHistory())
        epoch = int(run_id[-4])
        for name in ("loss", "train_mse"):
            assert resumed.getHistory()[epoch]["train"][name] != pytest.approx(
                expected[epoch]["train"][name]
            )
            expected[epoch]["train"][name] = resumed.getHistory()[epoch]["train"][name]
        assert_same(resumed, found[4], run_id, expected)


def assert_same(found: Any, expected: Any, told: str, history: Any = None) -> None:
    weights, expected_weights = found.getModel().state_dict(), expected.getModel().state_dict()
    for (name, value), same in zip(expected_weights.items(), weights.values(), strict=True):
        torch.testing.assert_close(same, value, rtol=1e-6, atol=1e-6, msg=f"{told}: {name}")
    history = history or expected.getHistory()
    for epoch, same_epoch in zip(history, found.getHistory(), strict=True):
        for stage in ("train", "validation"):
            assert same_epoch[stage] == pytest.approx(epoch[stage], rel=1e-5), told
