"""Lightning 1's hooks at the end of epochs, with a Trainer of Lightning 2 in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

from hvd_estimators.lightning.callbacks import EpochEnds, has_epoch_ends, without_epoch_ends
from hvd_estimators.lightning.package import flavor_of, of_flavor

X = torch.arange(6.0)[:, None]


class Steps(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.linear(batch).square().mean()
        return {"loss": loss, "twice": 2 * loss}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return None if batch_idx == 1 else batch.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


class Legacy(Steps):
    def training_epoch_end(self, outputs: Any) -> None:
        self.calls.append(("train", outputs))
        self.log("mean_loss", torch.stack([o["loss"] for o in outputs]).mean())

    def on_train_epoch_end(self) -> None:
        self.calls.append("after")

    def validation_epoch_end(self, outputs: Any) -> None:
        self.calls.append(("val", outputs))


def train(module: Steps, folder: Path, loaders: int) -> Trainer:
    callbacks = []
    if has_epoch_ends(module):
        flavor = flavor_of(module)
        assert flavor is not None
        callbacks.append(of_flavor(EpochEnds, flavor)(module))
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        num_sanity_val_steps=0,
        **dict.fromkeys(
            ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        ),
    )
    data = [torch.utils.data.DataLoader(X, batch_size=2) for _ in range(loaders)]
    with without_epoch_ends(module):
        trainer.fit(module, data[0], data[0] if loaders == 1 else data)
    return trainer


def test_hooks_get_outputs_of_steps_in_the_order_of_lightning_1(tmp_path: Path) -> None:
    module = Legacy()
    trainer = train(module, tmp_path, loaders=1)

    assert [call if call == "after" else call[0] for call in module.calls] == 2 * [
        "val",
        "train",
        "after",
    ]
    (_, validated), (_, trained), _ = module.calls[3:]
    # The second batch's None is omitted.
    assert [float(value) for value in validated] == [1.0, 9.0]
    with torch.no_grad():
        losses = [float(module.linear(X[i : i + 2]).square().mean()) for i in (0, 2, 4)]
    assert [float(output["loss"]) for output in trained] == pytest.approx(losses)
    assert [float(output["twice"]) for output in trained] == pytest.approx([2 * x for x in losses])
    assert not any(output["twice"].requires_grad for output in trained)
    assert float(trainer.callback_metrics["mean_loss"]) == pytest.approx(sum(losses) / 3)
    # The module is unchanged.
    assert "training_epoch_end" not in vars(module)
    assert has_epoch_ends(module)


def test_each_loader_has_a_list_of_outputs(tmp_path: Path) -> None:
    module = Legacy()
    train(module, tmp_path, loaders=2)
    outputs = next(call[1] for call in module.calls if call[0] == "val")
    assert [[float(value) for value in of_loader] for of_loader in outputs] == 2 * [[1.0, 9.0]]


def test_hooks_set_on_an_instance_are_kept(tmp_path: Path) -> None:
    module = Steps()
    assert not has_epoch_ends(module)
    seen: list[Any] = []
    hook = vars(module)["validation_epoch_end"] = seen.append
    train(module, tmp_path, loaders=1)
    assert len(seen) == 2
    assert vars(module)["validation_epoch_end"] is hook
