"""4 canonical shards, played by fewer ranks: the same rows in the same steps, the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fewer_ranks import FourShards, fits_of_the_same_steps, note
from pytorch_lightning import LightningModule
from reference import WIDTH, RecordingBackend, write_rows

from hvd_estimators.lightning import LightningEstimator

pytestmark = pytest.mark.integration


class FourShardsEstimator(FourShards, LightningEstimator):
    pass


class Module(LightningModule):
    """Has random numbers, statistics and a scheduler that counts steps; takes down its rows."""

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

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        import horovod.torch as hvd

        strategy: Any = self.trainer.strategy if self._trainer is not None else None
        # A rank goes along with rows that count for nothing where it has no shard to play.
        if strategy is not None and not strategy._train.share.is_stand_in:
            note(self.folder, hvd.rank(), batch["id"])
        loss = self.loss(batch)
        self.log("train_mse", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
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

    def fit(ranks: int, folder: Path) -> Any:
        estimator = FourShardsEstimator(
            backend=RecordingBackend(ranks),
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
            dry_run=False,
            verbose=0,
        )
        return estimator.fit_on_parquet()

    found = fits_of_the_same_steps(tmp_path, fit)
    module, history = found[4].getModel(), found[4].getHistory()
    for ranks in (3, 2, 1):
        same_module, same_history = found[ranks].getModel(), found[ranks].getHistory()
        for (name, value), same in zip(
            module.state_dict().items(), same_module.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(same, value, rtol=1e-6, atol=1e-6, msg=f"{ranks}: {name}")
        for epoch, same_epoch in zip(history, same_history, strict=True):
            for stage in ("train", "validation"):
                assert same_epoch[stage] == pytest.approx(epoch[stage], rel=1e-5), ranks
