"""The history of a Lightning fit, and what its callbacks monitor, if both steps log the same names.

The reference is Lightning's own Trainer in one process, whose module notes each batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_reference import Regression, fit
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from rank_pool import shared_ranks
from reference import assert_same_weights, global_batches, write_rows

pytestmark = pytest.mark.integration


class Noting(Regression):
    """Module that notes the epoch, stage, rows, loss and accuracy of each batch."""

    def __init__(self) -> None:
        super().__init__("momentum")
        self.noted: list[tuple[int, str, int, float, float]] = []

    def measured(self, stage: str, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        errors = self(batch["features"]) - batch["label"]
        loss, accuracy = (errors**2).mean(), (errors.abs() < 1.5).float().mean()
        values = len(errors), loss.item(), accuracy.item()
        self.noted.append((self.current_epoch, stage, *values))
        return loss, accuracy

    def on_validation_start(self) -> None:
        self.noted = [note for note in self.noted if note[:2] != (self.current_epoch, "val")]

    def means(self, epoch: int, stage: str) -> list[float]:
        """Return the means over the rows of an epoch, or of its last validation."""
        rows, *values = zip(*(n[2:] for n in self.noted if n[:2] == (epoch, stage)), strict=True)
        return [float(np.average(value, weights=rows)) for value in values]


class SameNames(Noting):
    """Module whose steps log the same names."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, accuracy = self.measured("train", batch)
        self.log("loss", loss)
        self.log("acc", accuracy, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, accuracy = self.measured("val", batch)
        self.log("loss", loss)
        self.log("acc", accuracy, on_epoch=True)


class ReturnsLosses(Noting):
    """Module whose steps log nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.measured("train", batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.measured("val", batch)[0]


class Seen(Callback):
    """Callback that keeps, in the module, the values that callbacks see and how they used them."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.seen = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.see(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.see(trainer, pl_module)

    def see(self, trainer: Any, pl_module: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values.pop("acc_step", None)  # of this rank
        pl_module.seen.append(values)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, (EarlyStopping, ModelCheckpoint)):
                names = ("best_score", "wait_count", "best_model_score")
                found = {n: float(v) for n, v in vars(callback).items() if n in names}
                pl_module.seen.append({"monitors": len(callback.monitor), **found})


def callbacks(folder: Path | None = None) -> list[Callback]:
    return [
        EarlyStopping("acc", mode="max", patience=9),
        EarlyStopping("loss", patience=9, check_on_train_epoch_end=True),
        ModelCheckpoint(folder, "{epoch}-acc", monitor="acc", mode="max"),
        ModelCheckpoint(folder, "{epoch}-loss", monitor="loss"),
        Seen(),
    ]


def train_alone(
    module: Any, columns: Any, batches: Any, held_out: Any, **arguments: Any
) -> Trainer:
    """Train in one process, by Lightning alone, and validate on batches of 20 rows."""

    def loader(columns: Any, batches: Any) -> Any:
        given = [
            {name: torch.from_numpy(columns[name][rows]) for name in ("features", "label")}
            for rows in batches
        ]
        return torch.utils.data.DataLoader(given, batch_size=None)

    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    parts = np.array_split(np.arange(len(held_out["label"])), 5)
    trainer.fit(module, loader(columns, batches), loader(held_out, parts))
    return trainer


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_of_training_and_validation_with_the_same_names_stay_apart(
    store: Any, tmp_path: Path, ranks: int
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 97)
    held_out = write_rows(Path(store.get_val_data_path()), 101, seed=1)
    params = {"batch_size": 20 // ranks, "val_batch_size": 7, "validation": 0.5, "epochs": 3}
    params |= {"model": SameNames(), "callbacks": callbacks()}
    model = fit(shared_ranks(ranks), store, **params)
    expected: Any = SameNames()
    batches = global_batches(97, ranks, 20 // ranks)
    train_alone(expected, columns, batches, held_out, callbacks=callbacks(tmp_path))
    for epoch, record in enumerate(model.getHistory()):
        loss, accuracy = expected.means(epoch, "train")
        assert record["train"] == pytest.approx({"loss": loss, "acc": accuracy}, rel=1e-4)
        loss, accuracy = expected.means(epoch, "val")
        assert record["validation"] == pytest.approx({"loss": loss, "acc": accuracy}, rel=1e-4)
    found = model.getModel()
    assert len(found.seen) == len(expected.seen) == 10
    for own, alone in zip(found.seen, expected.seen, strict=True):
        assert own == pytest.approx(alone, rel=1e-4)
    best = torch.load(next(tmp_path.glob("*-acc.ckpt")), weights_only=False)["state_dict"]
    expected.load_state_dict(best)
    assert_same_weights(found.net, expected.net)


def test_the_loss_of_several_validations_in_an_epoch_is_the_last_ones(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 97)
    held_out = write_rows(Path(store.get_val_data_path()), 101, seed=1)
    arguments = {"val_check_interval": 0.4}
    params = {"batch_size": 10, "val_batch_size": 7, "validation": 0.5, "epochs": 3}
    params |= {"model": ReturnsLosses(), "trainer_args": arguments}
    model = fit(shared_ranks(2), store, **params)
    expected: Any = ReturnsLosses()
    batches = global_batches(97, 2, 10)
    assert len(batches) == 5  # two validations in an epoch
    train_alone(expected, columns, batches, held_out, enable_checkpointing=False, **arguments)
    for epoch, record in enumerate(model.getHistory()):
        for stage, values in (("train", record["train"]), ("val", record["validation"])):
            loss = expected.means(epoch, stage)[0]
            assert values == pytest.approx({"loss": loss}, rel=1e-4)
