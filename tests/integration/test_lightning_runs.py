"""Lightning runs apart from exact steps: random numbers, partial epochs, returned modules."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import InProcessBackend
from lightning_reference import Regression, fit
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from rank_pool import shared_ranks
from reference import (
    OPTIMIZERS,
    WIDTH,
    assert_same_weights,
    global_batches,
    train_alone,
    write_rows,
)
from resuming import kept_checkpoints

pytestmark = pytest.mark.integration


class Noisy(Regression):
    """Module that draws a random number in each step, and keeps the draws of all ranks."""

    def on_train_start(self) -> None:
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.draws.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.all_draws = self.all_gather(torch.tensor(self.draws)).tolist()


def test_random_numbers_differ_between_ranks_and_the_live_module_is_returned(
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


class EndsOfEpochs(Regression):
    """Module with hooks that Lightning 2 rejects."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["label"].sum() if batch_idx else None

    def training_epoch_end(self, outputs: Any) -> None:
        self.calls.append("training_epoch_end")
        losses = torch.stack([output["loss"] for output in outputs])
        assert not losses.requires_grad
        self.log("mean_loss", losses.mean())

    def on_train_epoch_end(self) -> None:
        self.calls.append("on_train_epoch_end")

    def validation_epoch_end(self, outputs: Any) -> None:
        self.calls.append("validation_epoch_end")
        self.log("labels", torch.stack(outputs).sum(), reduce_fx="sum")


@pytest.mark.usefixtures("compat")
def test_horovods_estimator_calls_and_keeps_hooks_of_lightning_1(backend: Any, store: Any) -> None:
    from horovod.spark.lightning import TorchEstimator

    write_rows(Path(store.get_train_data_path()), 64)
    held_out = write_rows(Path(store.get_val_data_path()), 12, seed=1)
    settings = {"model": EndsOfEpochs(), "batch_size": 16, "epochs": 2, "validation": True}
    model = fit(backend, store, TorchEstimator, val_batch_size=3, **settings)
    for entry in model.getHistory():
        # With equal batch sizes, the mean over the ranks' rows is that of their steps.
        assert entry["train"]["mean_loss"] == pytest.approx(entry["train"]["loss"], rel=1e-6)
        # Lightning 1 left out the outputs that are None: the first batch of each rank.
        counted = held_out["label"].reshape(2, 2, 3)[:, 1].sum()
        assert entry["validation"]["labels"] == pytest.approx(counted, rel=1e-5)
    order = ["validation_epoch_end", "training_epoch_end", "on_train_epoch_end"]
    assert model.getModel().calls == 2 * order
    assert callable(model.getModel().validation_epoch_end)


class LogsSteps(Regression):
    """Module that logs numbers of each step's rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = len(batch["label"])
        self.log("rows", float(rows), reduce_fx="sum")
        self.log("all_rows", float(rows), reduce_fx="sum", sync_dist=True)
        self.log("most", batch["label"].max(), reduce_fx="max")
        self.log("mean", batch["label"].mean())
        return super().training_step(batch, batch_idx)


def test_values_of_a_step_are_reduced_as_stated(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 36)
    for ranks in (1, 2):
        params = {"model": LogsSteps(), "batch_size": 36 // ranks, "epochs": 1}
        model = fit(shared_ranks(ranks), store, **params)
        (found,) = model.getHistory()
        logged = found["train"]
        assert (logged["rows"], logged["all_rows"]) == (36, 36)
        assert logged["most"] == pytest.approx(columns["label"].max())
        assert logged["mean"] == pytest.approx(columns["label"].mean(), abs=1e-6)


class Configured(Regression):
    """Module with its own callback and an attribute that cannot be pickled."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor([3.0, 1.0, 2.0])[self.current_epoch])

    def configure_callbacks(self) -> Any:
        return [ModelCheckpoint(monitor="val_loss", filename="best")]

    def on_train_end(self) -> None:
        import threading

        self.lock = threading.Lock()


def test_a_checkpoint_callback_of_the_module_selects_the_best_model(
    backend: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    write_rows(Path(store.get_val_data_path()), 10, seed=1)
    settings = {"validation": 0.5, "batch_size": 16, "epochs": 3, "run_id": "own"}
    model = fit(backend, store, model=Configured(), **settings)
    expected = train_alone(columns, global_batches(64, 2, 16), OPTIMIZERS["adam"], epochs=2)
    assert_same_weights(model.getModel().net, expected)
    assert Path(store.get_run_path("own"), "checkpoints", "best.ckpt").exists()
    assert "cannot pickle '_thread.lock' object" in caplog.text


class Running(LightningDataModule):
    """Data module whose loader is an exhausted iterator in the second epoch."""

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
def test_an_exhausted_or_empty_loader_is_an_error(
    store: Any, data_module: Any, message: str
) -> None:
    write_rows(Path(store.get_train_data_path()), 8)
    with pytest.raises(RuntimeError, match=message):
        fit(InProcessBackend(), store, data_module=data_module, epochs=3)


class Shuffling(LightningDataModule):
    """Data module whose loader shuffles each epoch and does not report its position."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.rows = list(range(12))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, batch_size=2, shuffle=True)


class Positioned(Shuffling):
    """Data module whose loader reports its position and never ends."""

    def train_dataloader(self) -> Any:
        return Counter()


class Counter:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            yield torch.tensor([self.position, -self.position])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Rows(LightningModule):
    """Module that keeps the epoch's rows and all losses as state, and learns from the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows: list[int] = []
        self.losses: list[float] = []

    def get_extra_state(self) -> dict[str, list[Any]]:
        return {"rows": list(self.rows), "losses": list(self.losses)}

    def set_extra_state(self, state: dict[str, list[Any]]) -> None:
        self.rows, self.losses = list(state["rows"]), list(state["losses"])

    def on_train_epoch_start(self) -> None:
        self.rows = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows += batch.tolist()
        loss = ((self.weight - batch * (batch_idx + 1)) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("first", float(self.rows[0]))
        self.log("rows", float(sum(row * 3**index for index, row in enumerate(self.rows))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("data_module", [Shuffling, Positioned])
def test_a_custom_loader_resumes_within_an_epoch(store: Any, data_module: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 12)

    def run(run_id: str, **further: Any) -> Any:
        settings = {"model": Rows(), "data_module": data_module, "batch_size": 2, "epochs": 2}
        fitted = fit(InProcessBackend(), store, run_id=run_id, **settings, **further)
        module = fitted.getModel()
        return fitted.getHistory(), module.weight.item(), module.rows, module.losses

    whole = run("whole", checkpoint_every_n_steps=4, keep_checkpoints=9)
    losses = whole[3]
    assert (len(whole[2]), len(losses)) == (12, 12)
    found = {}
    for run_id, (epoch, rows) in kept_checkpoints(store, "whole"):
        if rows:
            found[epoch, rows] = run(run_id)
            # A resumed epoch reports the loss of its second part; an epoch has six steps.
            second_part = losses[6 * epoch + rows // 2 : 6 * (epoch + 1)]
            train = found[epoch, rows][0][epoch]["train"]
            assert train["loss"] == pytest.approx(sum(second_part) / len(second_part))
            train["loss"] = whole[0][epoch]["train"]["loss"]
    # After steps 4 and 8 of twelve; the second epoch starts after six.
    assert found == {(0, 8): whole, (1, 4): whole}


def test_a_csv_file_has_the_rows_of_each_step_once(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 35)
    logger = CSVLogger("/nowhere", name="", version="")
    settings = {"batch_size": 5, "epochs": 2, "run_id": "kept", "logger": logger}
    within = {"log_every_n_steps": 1, "checkpoint_every_n_steps": 4, "keep_checkpoints": 9}

    def rows() -> list[dict[str, str]]:
        fit(InProcessBackend(), store, **settings, **within)
        with Path(store.get_logs_path("kept"), "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    whole = rows()
    assert [int(row["step"]) for row in whole if row["train_mse"]] == list(range(14))
    assert rows() == whole  # the run had ended
    for path in store.get_checkpoints("kept")[-2:]:
        Path(path).unlink()
    assert rows() == whole


def test_tensorboard_shows_each_step_once(store: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_rows(Path(store.get_train_data_path()), 35)
    settings = {"batch_size": 5, "epochs": 2, "run_id": "shown", "logger": None}
    within = {"log_every_n_steps": 1, "checkpoint_every_n_steps": 4, "keep_checkpoints": 9}

    def shown() -> list[int]:
        fit(InProcessBackend(), store, **settings, **within)
        events = EventAccumulator(store.get_logs_path("shown"))
        events.Reload()
        return [event.step for event in events.Scalars("train_mse")]

    assert shown() == list(range(14))
    # The run lost its last checkpoints after their steps were logged: it resumes after eight.
    for path in store.get_checkpoints("shown")[-2:]:
        Path(path).unlink()
    assert shown() == list(range(14))
