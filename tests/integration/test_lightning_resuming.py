"""Lightning runs resumed within an epoch are bit-for-bit identical to uninterrupted ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import resuming
import torch
from lightning_reference import Regression, fit
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.plugins import MixedPrecision
from reference import write_rows
from resuming import AskedToEnd, DataDependent, kept_checkpoints
from saved_checkpoints import read_state
from test_resuming import assert_equal_bits
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from hvd_estimators.store import LocalStore

pytestmark = pytest.mark.integration


def setup_module() -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(resuming)


class Logging(LightningModule):
    """Module whose draws depend on the batch, and which logs in all possible ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DataDependent()
        self.squared = MeanSquaredError()
        # Trained from the second epoch on.
        self.late = torch.nn.Parameter(torch.zeros(()))
        # Missing from state_dict().
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        # These metrics share their states until the collection is read.
        self.errors = MetricCollection([MeanAbsoluteError(), MeanSquaredError()])

    def on_train_epoch_start(self) -> None:
        self.losses: list[torch.Tensor] = []
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": [self.late]})
        # Lightning allows this, and undoes it after a validation.
        self.net.norm.eval()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self.net(batch["features"])[:, 0] + self.late
        loss = torch.nn.functional.mse_loss(output, batch["label"])
        self.squared(output.detach(), batch["label"])
        self.errors.update(output.detach(), batch["label"])
        self.log("squared", self.squared, on_step=True, on_epoch=True)
        self.log("train_loss", loss.detach(), on_step=True, on_epoch=True)
        self.log("most", loss.detach(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("total", loss.detach(), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        self.log("of_step", float(batch_idx))
        # The batches before a restart do not count.
        self.log("first", float(batch_idx), reduce_fx="min", on_step=False, on_epoch=True)
        self.losses.append(loss.detach())
        self.mean.lerp_(loss.detach(), 0.1)
        self.log("running", self.mean.clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch["features"]).mean().abs())

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.errors.compute())
        self.log("plain_mean", torch.stack(self.losses).mean())
        self.errors.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9)
        return [optimizer], [{"scheduler": warmup, "interval": "step", "frequency": 2}]


class Scheduled(Logging):
    """Module with a scheduler by validation loss, trained with a loss scaler for half floats."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


class Counting(Callback):
    """Callback with state that changes in each batch."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.of_epoch = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        self.of_epoch += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("batches", float(self.batches))

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def end_of(store: Any, model: Any, run_id: str) -> list[Any]:
    """Return the complete final state of a run."""
    path = store.get_checkpoints(run_id)[-1]
    state = read_state(store, path)
    saved = torch.load(path, weights_only=False)
    saved["loops"] = saved["loops"]["fit_loop"]
    history = [vars(record) for record in state.history]
    return [model.getHistory(), model.getModel().state_dict(), saved, history, state.random]


# Values over an epoch's batches that restart with the run; torchmetrics metrics continue.
OF_SECOND_PART = {
    *("first", "loss", "most", "plain_mean", "total", "train_loss", "train_loss_epoch")
}


def same_parts(found: list[Any], whole: list[Any], position: tuple[int, int]) -> list[list[Any]]:
    """Return the parts of the results that must be equal after resuming at the position."""
    ends = [copy.deepcopy(found), copy.deepcopy(whole)]
    epoch, rows = position
    for end in ends:
        # A run that ends within an epoch also has values of the previous one.
        for partial in end[2].get("hvd_estimators.partial", ()):
            del partial["callback_metrics"]
    if not rows:
        return ends
    for index in (0, 3):
        assert ends[0][index][epoch]["train"]["first"] == rows // 16
        # An earlier part of the run may also have resumed within an epoch.
        for record, expected in zip(*(end[index][: epoch + 1] for end in ends), strict=True):
            for name in OF_SECOND_PART & expected["train"].keys():
                assert record["train"].pop(name) is not None
                del expected["train"][name]
            if record.get("validation") is None:  # The validation preceded the restart.
                expected.pop("validation", None)
                record.pop("validation", None)
    return ends


def plain() -> dict[str, Any]:
    return {"model": Logging(), "trainer_args": {"val_check_interval": 3}}


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    return {
        "model": Scheduled(),
        "callbacks": [Counting()],
        "backward_passes_per_step": 2,
        "trainer_args": {"plugins": plugins, "gradient_clip_val": 0.5},
    }


@pytest.mark.parametrize(
    ("params", "every", "positions"),
    [
        (plain, 3, [(0, 48), (0, 96), (1, 0), (1, 32), (1, 80), (2, 0)]),
        # Four steps in an epoch of seven batches.
        pytest.param(scaled, 3, [(0, 96), (1, 0), (1, 64), (2, 0)], marks=pytest.mark.soak),
    ],
)
def test_a_run_resumes_from_each_checkpoint(
    backend: Any, store: Any, params: Any, every: int, positions: Any
) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    settings = {
        "epochs": 2,
        "shuffle": True,
        "scale_learning_rate": True,
        "batch_size": 8,
        "validation": 0.1,
    }

    def run(run_id: str, **further: Any) -> list[Any]:
        model = fit(backend, store, run_id=run_id, **settings, **params(), **further)
        return end_of(store, model, run_id)

    whole = run("whole")
    assert_equal_bits(run("kept", checkpoint_every_n_steps=every, keep_checkpoints=99), whole)
    found = []
    for run_id, position in kept_checkpoints(store, "kept"):
        found.append(position)
        assert_equal_bits(*same_parts(run(run_id), whole, position))
    assert found == positions

    # SIGTERM comes in the first step, and again after each resume. If steps are slow, ranks end
    # later, but they must end before the last step, which is the eighth.
    stopped = [(0, 0)]
    for after in (1, 3, 1):
        with pytest.raises(AssertionError, match="TrainingInterruptedError: The ranks were asked"):
            fit(AskedToEnd(backend, after), store, run_id="asked", **settings, **params())
        state = read_state(store, store.get_checkpoints("asked")[-1])
        stopped.append((state.epoch, state.rows))
    assert stopped == sorted(set(stopped))
    assert_equal_bits(*same_parts(run("asked"), whole, stopped[-1]))


class Manual(Logging):
    """Manual optimization: one optimizer steps each batch, the other accumulates three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, seldom = self.optimizers()
        often.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        often.step()
        if batch_idx % 3 == 2:
            seldom.step()
            seldom.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.net.parameters())
        return [torch.optim.Adam(parameters[:2], lr=0.01), torch.optim.Adam(parameters[2:], 0.01)]


def test_accumulated_gradients_are_checkpointed(backend: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 107)

    def run(run_id: str, **further: Any) -> list[Any]:
        # Only max_steps ends this run, in its second epoch of seven batches.
        further |= {"trainer_args": {"max_steps": 15, "max_epochs": -1}, "batch_size": 8}
        model = fit(backend, store, run_id=run_id, model=Manual(), shuffle=True, **further)
        return end_of(store, model, run_id)

    whole = run("whole")
    assert_equal_bits(run("kept", checkpoint_every_n_steps=1, keep_checkpoints=99), whole)
    found = []
    for run_id, position in kept_checkpoints(store, "kept"):
        found.append(position)
        # With gradients of one batch, after a step of both, and after an epoch.
        if position in ((0, 64), (0, 96), (1, 0)):
            assert_equal_bits(*same_parts(run(run_id), whole, position))
    assert {(0, 64), (0, 96), (1, 0)} < set(found)


class StopWithin(Callback):
    """Stop training in the second epoch, after the batch of the number."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            trainer.should_stop = True


class StopAfterTwo(Callback):
    """Stop training after the second epoch, and train on if there is a third one."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1


ENDS: dict[str, tuple[Any, ...]] = {
    "max_steps": (11,),
    "should_stop": (17, StopWithin()),
    "max_steps, and a stop": (11, StopAfterTwo()),
}


@pytest.mark.parametrize("ends_by", ENDS)
def test_a_run_that_ends_within_an_epoch_resumes_there(
    backend: Any, store: Any, ends_by: str
) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)

    def run(run_id: str, steps: int, *callbacks: Any, **further: Any) -> list[Any]:
        arguments = {"max_steps": steps, "max_epochs": -1, "log_every_n_steps": 1}
        # The last step of an epoch that ends early has the smallest number.
        best = ModelCheckpoint(monitor="of_step", filename="best-{step}")
        further |= {"batch_size": 8, "shuffle": True, "validation": 0.1, "run_id": run_id}
        callbacks = (Counting(), best, *callbacks)
        model = fit(
            backend,
            store,
            model=Logging(),
            callbacks=list(callbacks),
            trainer_args=arguments,
            **further,
        )
        return end_of(store, model, run_id)

    whole = run("whole", 17)
    short = ENDS[ends_by]
    first = run("one", *short)
    state = read_state(store, store.get_checkpoints("one")[-1])
    assert (state.epoch, state.rows, len(first[0])) == (1, 4 * 16, 2)
    assert state.stopped == (ends_by != "max_steps")
    assert_equal_bits(run("one", *short), first)
    found = run("one", 17, resume_stopped=True)
    for end in (found, whole):
        end[2]["callbacks"] = {k: v for k, v in end[2]["callbacks"].items() if "Count" in k}
        end[2]["hvd_estimators.unfinished"] = end[2]["hvd_estimators.unfinished"][0]
    assert_equal_bits(*same_parts(found, whole, (1, 64)))


def test_a_stopped_run_stays_stopped_whatever_ends_it(backend: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 107)

    def run() -> list[Any]:
        settings = {"trainer_args": {"max_epochs": -1, "max_steps": 1000}, "batch_size": 8}
        callbacks = [StopAfterTwo()]
        return end_of(
            store, fit(backend, store, run_id="one", callbacks=callbacks, **settings), "one"
        )

    first = run()
    assert len(first[0]) == 2
    assert_equal_bits(run(), first)


class Halving(Regression):
    """Module that returns halved weights, and trains the others."""

    def on_train_end(self) -> None:
        for weight in self.parameters():
            weight.data.mul_(0.5)


def averaging() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(
        0.05, swa_epoch_start=1, annealing_epochs=1, annealing_strategy="linear"
    )


@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        (Regression, lambda: [EMAWeightAveraging(decay=0.5)]),
        (Regression, lambda: [averaging()]),
        (Halving, list),
    ],
    ids=["ema", "swa", "own hook"],
)
def test_a_longer_run_resumes_from_the_weights_that_trained_not_from_their_averages(
    backend: Any, store: Any, kind: Any, callbacks: Any
) -> None:
    write_rows(Path(store.get_train_data_path()), 107)

    def run(run_id: str, epochs: int, model: Any = kind, averages: Any = callbacks) -> Any:
        further = {"epochs": epochs, "callbacks": averages(), "shuffle": True, "batch_size": 8}
        return fit(backend, store, run_id=run_id, model=model(), **further).getModel().state_dict()

    short = run("one", 2)
    trained = run("plain", 2, Regression, list)
    assert any(not torch.equal(value, trained[name]) for name, value in short.items())
    assert_equal_bits(run("one", 2), short)
    assert_equal_bits(run("one", 4), run("whole", 4))


def test_hooks_at_the_end_run_without_saved_runs(backend: Any, tmp_path: Path) -> None:
    found = []
    for name, saves in (("saved", True), ("not", False)):
        store = LocalStore(str(tmp_path / name), save_runs=saves)
        write_rows(Path(store.get_train_data_path()), 107)
        model = fit(backend, store, model=Halving(), callbacks=[EMAWeightAveraging()], epochs=1)
        found.append(model.getModel().state_dict())
    assert_equal_bits(*found)


class Spoilt(Logging):
    """Module with a NaN loss on one rank in one step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        spoils = (self.trainer.global_rank, batch_idx) == (1, 4)
        return loss * float("nan") if spoils else loss


def test_a_nan_on_one_rank_ends_all_and_keeps_the_last_good_step(backend: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    settings = {"batch_size": 8, "checkpoint_every_n_steps": 1, "run_id": "spoilt"}
    # The message comes from the first rank.
    message = r"NotFiniteError: .*at step 5 of the run .*: the loss of rank 1 is nan; NaN or inf"
    with pytest.raises(AssertionError, match=message):
        fit(backend, store, model=Spoilt(), terminate_on_nan=True, **settings)
    newest = store.get_checkpoints("spoilt")[-1]
    assert read_state(store, newest).rows == 4 * 16
    weights = torch.load(newest, weights_only=False)["state_dict"].values()
    assert all(bool(torch.isfinite(value).all()) for value in weights)
