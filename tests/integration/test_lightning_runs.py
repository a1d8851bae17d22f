"""What a run does beside exact steps: random numbers, parts of epochs, and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_reference import InThisProcess, Regression, fit
from pytorch_lightning import LightningDataModule
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
from reference import (
    OPTIMIZERS,
    WIDTH,
    assert_same_weights,
    global_batches,
    train_alone,
    write_rows,
)

from hvd_estimators.exceptions import ParamError

pytestmark = pytest.mark.integration


class Noisy(Regression):
    """Draws a random number in each step, and keeps what training makes of it."""

    def on_train_start(self) -> None:
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.draws.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.all_draws = self.all_gather(torch.tensor(self.draws)).tolist()


def test_each_rank_draws_numbers_of_its_own_and_the_live_module_comes_back(
    backend: Any, store: Any
) -> None:
    write_rows(Path(store.get_train_data_path()), 64)
    write_rows(Path(store.get_val_data_path()), 10, seed=1)

    def run(run_id: str, epochs: int) -> Any:
        settings = {"model": Noisy(), "batch_size": 16, "run_id": run_id, "epochs": epochs}
        return fit(backend, store, **settings).getModel()

    whole = run("whole", 2)
    draws = np.array(whole.all_draws)
    # Two ranks, two epochs of two steps.
    assert draws.shape == (2, 4)
    assert len(np.unique(draws)) == 8
    run("parts", 1)
    np.testing.assert_array_equal(np.array(run("parts", 2).all_draws), draws[:, 2:])


class Configured(Regression):
    """Brings its own callback, and something that cannot be pickled."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor([3.0, 1.0, 2.0])[self.current_epoch])

    def configure_callbacks(self) -> Any:
        return [ModelCheckpoint(monitor="val_loss", filename="best")]

    def on_train_end(self) -> None:
        import threading

        self.lock = threading.Lock()


def test_a_modules_own_checkpoint_says_what_is_best(
    backend: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    write_rows(Path(store.get_val_data_path()), 10, seed=1)
    settings = {"validation": 0.5, "batch_size": 16, "epochs": 3, "run_id": "own"}
    model = fit(backend, store, model=Configured(), **settings)
    expected = train_alone(columns, global_batches(64, 2, 16), OPTIMIZERS["adam"], epochs=2)
    assert_same_weights(model.getModel().net, expected)
    assert Path(store.get_run_path("own"), "checkpoints", "best.ckpt").exists()
    assert "cannot be pickled because of lock." in caplog.text


class Seen(Regression):
    """Notes the first feature of each row."""

    def on_train_start(self) -> None:
        self.rows: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows.append(batch["features"][:, 0].tolist())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("arguments", "shuffle"), [({"limit_train_batches": 2}, False), ({"overfit_batches": 2}, True)]
)
def test_a_part_of_the_batches_is_the_same_in_every_epoch(
    backend: Any, store: Any, arguments: Any, shuffle: bool
) -> None:
    write_rows(Path(store.get_train_data_path()), 100)
    settings = {"batch_size": 10, "shuffle": shuffle, "epochs": 3, "trainer_args": arguments}
    rows = fit(backend, store, model=Seen(), **settings).getModel().rows
    assert len(rows) == 6
    assert rows[0] != rows[1]
    assert rows[:2] == rows[2:4] == rows[4:]


def test_steps_alone_end_training(backend: Any, store: Any, tmp_path: Path) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    called = str(tmp_path / "called")
    counting = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: Path(f"{called}-{trainer.global_step}").touch()
    )
    model = fit(
        backend,
        store,
        batch_size=16,
        callbacks=[counting],
        trainer_args={"max_epochs": -1, "max_steps": 5},
    )
    batches = global_batches(64, 2, 16)
    expected = train_alone(columns, (batches * 3)[:5], OPTIMIZERS["adam"], epochs=1)
    assert_same_weights(model.getModel().net, expected)
    assert Path(f"{called}-5").exists()
    for arguments in ({"max_epochs": -1}, {"max_epochs": 0}):
        with pytest.raises(ParamError, match=r"train nothing|without end"):
            fit(backend, store, trainer_args=arguments)


class Running(LightningDataModule):
    """Its loader runs dry: an iterator, or none at all."""

    def __init__(self, train_dir: str, cur_shard: int, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        batches = [{"features": torch.randn(4, WIDTH), "label": torch.randn(4)} for _ in range(2)]
        self.batches = iter(batches)

    def train_dataloader(self) -> Any:
        return self.batches


class Empty(Running):
    def train_dataloader(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("data_module", "message"),
    [(Running, "no batch in epoch 2"), (Empty, "has no batches: nothing was trained")],
)
def test_a_users_loader_that_has_nothing_more_is_an_error(
    store: Any, data_module: Any, message: str
) -> None:
    write_rows(Path(store.get_train_data_path()), 8)
    with pytest.raises(RuntimeError, match=message):
        fit(InThisProcess(), store, data_module=data_module, epochs=3)
