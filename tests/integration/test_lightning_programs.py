"""LightningEstimator trains programs as Lightning's pages write them, as one process does."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from backends import InProcessBackend
from fewer_ranks import FourShards
from lightning_reference import Regression, fit
from parquet_files import write_columns
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    WeightAveraging,
)
from rank_pool import shared_ranks
from reference import (
    OPTIMIZERS,
    WIDTH,
    assert_same_weights,
    global_batches,
    make_net,
    train_alone,
    write_rows,
)
from torch.nn import functional

from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.lightning import LightningEstimator

pytestmark = pytest.mark.integration

WEIGHT = torch.tensor([0.2, 1.0, 5.0])


def setup_module() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


class FourShardsEstimator(FourShards, LightningEstimator):
    pass


def write_classes(path: Path, rows: int) -> dict[str, np.ndarray]:
    """Write rows of three classes that are sorted, so that batches differ in their weights."""
    rng = np.random.default_rng(5)
    columns = {
        "features": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "label": (np.arange(rows) % 50 // 17).astype(np.int64),
    }
    write_columns(path, columns, row_group_size=17, name="part-0.parquet")
    return columns


class Columns(torch.utils.data.Dataset[Any]):
    """Rows of columns, for Lightning alone."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = {name: torch.from_numpy(values) for name, values in columns.items()}

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


def train_in_lightning(
    module: LightningModule, columns: Any, batches: Any, epochs: int = 2, **arguments: Any
) -> Trainer:
    """Train a module in one process, on batches of these rows."""
    sampler = [batch.tolist() for batch in batches]
    rows = torch.utils.data.DataLoader(Columns(columns), batch_sampler=sampler)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {**dict.fromkeys(quiet, False), **arguments}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", **given)
    trainer.fit(module, rows)
    return trainer


def make_classifier() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


class Weighted(LightningModule):
    """Classifier with a weighted cross entropy that states its denominator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self.net(batch["features"]), batch["label"], WEIGHT)
        return {"loss": loss, "denominator": WEIGHT[batch["label"]].sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class Manual(Weighted):
    """Classifier that accumulates two batches by itself, as on Lightning's page."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.alone = alone

    def training_step(self, batch: Any, batch_idx: int) -> None:
        found = super().training_step(batch, batch_idx)
        found["loss"] = found["loss"] / 2
        self.manual_backward(found["loss"] if self.alone else found)
        if (batch_idx + 1) % 2 == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("accumulated", ["by a param", "by the Trainer", "by itself"])
def test_a_weighted_cross_entropy_accumulates_as_in_one_process(
    backend: Any, store: Any, accumulated: str
) -> None:
    columns = write_classes(Path(store.get_train_data_path()), 130)
    # An odd number of batches: the last step of an epoch has one.
    batches = global_batches(130, 2, 14)
    assert len(batches) == 5
    params: dict[str, Any] = {"model": Weighted(), "column_dtypes": {"label": "int64"}}
    expected: Any = Weighted()
    if accumulated == "by itself":
        params["model"], expected = Manual(), Manual(alone=True)
    else:
        batches = [np.concatenate(batches[first : first + 2]) for first in (0, 2, 4)]
    if accumulated == "by a param":
        params["backward_passes_per_step"] = 2
    elif accumulated == "by the Trainer":
        params["trainer_args"] = {"accumulate_grad_batches": 2}
    model = fit(backend, store, batch_size=14, epochs=2, **params)
    train_in_lightning(expected, columns, batches)
    assert_same_weights(model.getModel().net, expected.net)


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_limited_epoch_ends_with_a_full_step(
    backend: Any, store: Any, is_scheduled: bool
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 130)
    batches = global_batches(130, 2, 10)[:5]
    params: dict[str, Any] = {"backward_passes_per_step": 3}
    if is_scheduled:
        params = {"callbacks": [GradientAccumulationScheduler({0: 3})]}
    params |= {"model": Regression("momentum"), "trainer_args": {"limit_train_batches": 5}}
    model = fit(backend, store, batch_size=10, epochs=2, **params)
    expected = train_alone(columns, batches, OPTIMIZERS["momentum"], epochs=2, passes=3)
    assert_same_weights(model.getModel().net, expected)


class Summed(Regression):
    """Regression whose loss sums over the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self(batch["features"]) - batch["label"]).square().sum()


@pytest.mark.parametrize(
    ("params", "passes", "message"),
    [
        ({"model": Manual()}, 2, "trainer_args: .*accumulate_grad_batches=2.*optimizes manually"),
        ({"model": Summed()}, 1, "model: expected .* a mean over the rows .* found a sum"),
    ],
    ids=["manual", "sum"],
)
def test_steps_that_would_train_otherwise_than_one_process_are_rejected(
    backend: Any, store: Any, params: Any, passes: int, message: str
) -> None:
    write_classes(Path(store.get_train_data_path()), 130)
    arguments = {"accumulate_grad_batches": passes}
    with pytest.raises(ParamError, match=message):
        fit(backend, store, batch_size=14, epochs=2, trainer_args=arguments, **params)
    if "sum" in message:  # one process trains on it
        fit(InProcessBackend(), store, batch_size=65, epochs=1, **params)


@pytest.mark.parametrize(
    ("rows", "batch_size", "message"),
    [
        ((9, 4), 1, "model: a LightningModule needs a row on every rank in every step, .* 9 rows"),
        ((8, 1), 1, "validation: expected a row for each of 2 ranks at least, found 1"),
    ],
)
def test_a_rank_without_rows_in_a_step_is_an_error(
    backend: Any, store: Any, rows: tuple[int, int], batch_size: int, message: str
) -> None:
    write_rows(Path(store.get_train_data_path()), rows[0])
    write_rows(Path(store.get_val_data_path()), rows[1], seed=1)
    with pytest.raises(DataError, match=message):
        fit(backend, store, batch_size=batch_size, validation=0.5)


class Normalized(LightningModule):
    """Module whose statistics of batch normalization depend on the features alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = functional.mse_loss(self.net(batch["features"]).reshape(-1), batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Reader(Callback):
    """Callback that notes the statistics at the end of each epoch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        path = Path(self.folder, f"{trainer.current_epoch}-{trainer.global_rank}")
        torch.save(pl_module.net[0].running_mean.clone(), path)


@pytest.mark.parametrize("averages", [False, True])
def test_whatever_saves_or_reads_statistics_gets_their_mean(
    backend: Any, store: Any, tmp_path: Path, averages: bool
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 128)
    columns["features"][64:] += 3.0  # the second rank's rows
    for part, rows in enumerate((slice(64), slice(64, None))):
        own = {name: values[rows] for name, values in columns.items()}
        write_columns(store.get_train_data_path(), own, name=f"part-{part:03d}.parquet")
    callbacks: list[Any] = [
        ModelCheckpoint(monitor="train_loss", filename="{epoch}", save_top_k=-1),
        ModelCheckpoint(every_n_train_steps=3, filename="{step}", save_top_k=-1),
        Reader(str(tmp_path)),
    ]
    callbacks += [WeightAveraging()] if averages else []
    params = {"batch_size": 16, "epochs": 2, "run_id": "r", "callbacks": callbacks}
    fit(backend, store, model=Normalized(), **params)

    # The mean over the ranks of the statistics of each rank's batches.
    at_step = [torch.zeros(WIDTH)]
    for step in 2 * [*range(4)]:
        rows_of_ranks = [columns["features"][at : at + 16] for at in (16 * step, 64 + 16 * step)]
        batch_mean = torch.from_numpy(np.stack(rows_of_ranks).mean(axis=(0, 1)))
        at_step.append(at_step[-1].lerp(batch_mean, 0.1))
    read = {name: torch.load(tmp_path / name) for name in ("0-0", "0-1", "1-0", "1-1")}
    expected = {name: at_step[4 if name[0] == "0" else 8] for name in read}
    torch.testing.assert_close(read, expected)
    saved = {
        name: torch.load(
            Path(store.get_run_path("r"), "checkpoints", f"{name}.ckpt"), weights_only=False
        )["state_dict"]["net.0.running_mean"]
        for name in ("step=3", "epoch=0", "step=6", "epoch=1")
    }
    if averages:
        means = [torch.stack(at_step[1 : end + 1]).mean(dim=0) for end in range(1, 9)]
        at_step[1:] = means
    expected = dict(zip(saved, (at_step[step] for step in (3, 4, 6, 8)), strict=True))
    torch.testing.assert_close(saved, expected)


class Averaged(Callback):
    """Exponential moving average of the weights, updated after each batch."""

    def __init__(self) -> None:
        self.average: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = copy.deepcopy(pl_module.net)
        pl_module.average = self.average
        pl_module.batches = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.batches.append(batch_idx)
        pairs = zip(self.average.parameters(), pl_module.net.parameters(), strict=True)
        with torch.no_grad():
            for mean, value in pairs:
                mean.lerp_(value, 0.2)


class Fullbatch(Regression):
    """Module whose optimizer calls its closure repeatedly."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.5, 2, line_search_fn="strong_wolfe")


class Warming(Regression):
    """Module with a schedule of batches that logs in steps and in hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self.log("after", float(self.trainer.global_step), on_step=False, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", float(batch_idx), on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["momentum"](self.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


@pytest.mark.parametrize(
    ("ranks", "kind", "rows", "arguments"),
    [
        (2, Regression, 138, {}),
        (3, Warming, 160, {"accumulate_grad_batches": 2}),
        (2, Fullbatch, 138, {"val_check_interval": 2}),
    ],
    ids=["average", "schedule", "closure"],
)
def test_fewer_ranks_run_the_hooks_of_each_batch_once(
    store: Any, ranks: int, kind: Any, rows: int, arguments: dict[str, Any]
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), rows)
    callbacks = [Averaged(), EMAWeightAveraging(decay=0.5)]
    params = {"batch_size": 10, "epochs": 2, "validation": 0.5, "trainer_args": arguments}
    write_rows(Path(store.get_val_data_path()), 10)
    backend = shared_ranks(ranks)
    model = fit(backend, store, FourShardsEstimator, model=kind(), callbacks=callbacks, **params)
    expected = kind()
    callbacks = [Averaged(), EMAWeightAveraging(decay=0.5)]
    batches = global_batches(rows, 4, 10)
    arguments.pop("val_check_interval", None)
    trainer = train_in_lightning(expected, columns, batches, callbacks=callbacks, **arguments)
    history = model.getHistory()[-1]["train"]
    for name in {"mean", "after", "end"} & trainer.callback_metrics.keys():
        assert history[name] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-4)
    found = model.getModel()
    assert found.batches == expected.batches
    assert_same_weights(found.net, expected.net)
    assert_same_weights(found.average, expected.average)


class Freeze(Callback):
    """Callback that freezes a layer which it holds, and notes what a metric has counted."""

    def __init__(self, layer: torch.nn.Module, metric: Any) -> None:
        self.layer, self.metric = layer, metric

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.layer.requires_grad_(False)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.counted = self.metric.update_count


def test_a_callback_that_holds_parts_of_the_module_works_on_the_trained_one(
    backend: Any, store: Any
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    write_rows(Path(store.get_val_data_path()), 20, seed=1)
    module = Regression("momentum")
    params = {"batch_size": 16, "epochs": 2, "validation": 0.5, "val_batch_size": 4}
    callback = Freeze(module.net[0], module.squared)
    found = fit(backend, store, model=module, callbacks=[callback], **params).getModel()
    net = make_net()
    optimizer = OPTIMIZERS["momentum"](net[2].parameters())
    for rows in 2 * global_batches(64, 2, 16):
        output = net(torch.from_numpy(columns["features"][rows])).reshape(-1)
        optimizer.zero_grad()
        functional.mse_loss(output, torch.from_numpy(columns["label"][rows])).backward()
        optimizer.step()
    assert_same_weights(found.net, net)
    assert found.counted == 3  # batches of ten rows


class ToTraining(Callback):
    """Callback that a program of one process needs with a schedule-free optimizer."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].train()


class ScheduleFree(Regression):
    """Module whose best step is the third."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("is_third", float(batch_idx == 2))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        import schedulefree

        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.05)


def test_the_best_step_of_a_schedule_free_optimizer_has_the_averaged_weights(
    backend: InProcessBackend, store: Any
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 138)
    best = ModelCheckpoint(monitor="is_third", mode="max", every_n_train_steps=1)
    found = fit(backend, store, model=ScheduleFree(), callbacks=[best], batch_size=10, epochs=1)
    expected = ScheduleFree()
    batches = global_batches(138, 2, 10)
    assert len(batches) > 3
    callbacks = [ToTraining()]
    trainer = train_in_lightning(expected, columns, batches[:3], epochs=1, callbacks=callbacks)
    training = copy.deepcopy(expected)
    trainer.optimizers[0].eval()
    with pytest.raises(AssertionError):
        assert_same_weights(training, expected)
    assert_same_weights(found.getModel().net, expected.net)
