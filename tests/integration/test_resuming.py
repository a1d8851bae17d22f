"""Runs resumed after or within an epoch are bit-for-bit identical to uninterrupted ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resuming
import torch
from reference import fit, write_rows
from resuming import AskedToEnd, DataDependent, kept_checkpoints
from saved_checkpoints import read_state
from torchmetrics import SpearmanCorrCoef

pytestmark = pytest.mark.integration


class Plateaus:
    """Callback with schedulers that it creates when training starts, and with a state."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0),
        ]
        self.best = np.inf

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.schedulers[0].step()
        self.schedulers[1].step(1.0)
        self.best = min(self.best, logs["train"]["loss"])
        logs["train"]["best"] = self.best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "of": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        for scheduler, of_scheduler in zip(self.schedulers, state["of"], strict=True):
            scheduler.load_state_dict(of_scheduler)


class Stepping:
    """Callback with objects that change in each step, and without a state."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        self.module = module
        self.rates = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)]
        self.average = torch.optim.swa_utils.AveragedModel(module)
        # A resumed run keeps its own weights instead of these.
        torch.nn.init.zeros_(module.last.weight)
        optimizer.register_step_post_hook(self.after_step)

    def on_epoch_begin(self, epoch: int) -> None:
        # Like a callback that thaws layers, this leaves no trace in any state.
        self.module.nudge = 0.01 * epoch

    def after_step(self, *_: Any) -> None:
        self.rates[0].step()
        self.average.update_parameters(self.module)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        logs["train"]["average"] = float(self.average.module.last.weight.sum())


class Fleeting(DataDependent):
    """Net with a buffer that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.nudge = 0.0
        self.register_buffer("recent", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.training:
            self.recent = 0.5 * self.recent + output.detach().mean()
            output = output + 0.1 * self.recent + self.nudge
        return output


def torch_run(store: Any, backend: Any, run_id: str, epochs: int = 3, **params: Any) -> Any:
    net = Fleeting()
    settings = {
        "model": net,
        "optimizer": torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True),
        "backend": backend,
        "callbacks": [Plateaus(), Stepping()],
        "metrics": [torch.nn.functional.l1_loss, SpearmanCorrCoef()],
        "shuffle": True,
        "scale_learning_rate": True,
        # Seven steps; the ranks' last batches have different sizes.
        "batch_size": 8,
        "validation": 0.1,
        **params,
    }
    model, _ = fit(store, 2, "adam", run_id=run_id, epochs=epochs, **settings)
    return model


def end_of(store: Any, model: Any, run_id: str) -> list[Any]:
    """Return the complete final state of a run."""
    newest = store.get_checkpoints(run_id)[-1]
    state = read_state(store, newest)
    saved = torch.load(newest, weights_only=True)
    return [
        model.getHistory(),
        model.getModel().state_dict(),
        model.getOptimizer().state_dict(),
        saved,
        [vars(record) for record in state.history],
        state.random,
    ]


def assert_equal_bits(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_equal_bits(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal_bits(a, b)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), (found, expected)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def test_a_torch_run_resumes_after_and_within_each_epoch(backend: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    whole = end_of(store, torch_run(store, backend, "whole"), "whole")
    rates = [group["lr"] for group in whole[2]["param_groups"]]
    assert rates != [0.01]
    # Each rank's buffers depend only on its own rows.
    first, second = whole[3]["buffers"]
    assert not torch.equal(first["drawn"], second["drawn"])

    within = {"checkpoint_every_n_steps": 3, "terminate_on_nan": True}
    model = torch_run(store, backend, "kept", keep_checkpoints=99, **within)
    assert_equal_bits(end_of(store, model, "kept"), whole)
    positions = []
    for run_id, position in kept_checkpoints(store, "kept"):
        positions.append(position)
        model = torch_run(store, backend, run_id, **within)
        assert_equal_bits(end_of(store, model, run_id), whole)
    for newest in store.get_checkpoints("kept")[-2:]:
        Path(newest).write_bytes(Path(newest).read_bytes()[:-1])
    assert_equal_bits(end_of(store, torch_run(store, backend, "kept"), "kept"), whole)
    # After every third step of the run, with seven steps an epoch, and after each epoch.
    within_epochs = [(0, 48), (0, 96), (1, 32), (1, 80), (2, 16), (2, 64)]
    assert positions == sorted([*within_epochs, (1, 0), (2, 0), (3, 0)])

    # SIGTERM comes in the first step, and again after each resume. Ranks check after their steps 1,
    # 3, 7 and so on, or more often if steps are slow.
    stopped = [(0, 0)]
    for after in (1, 3, 5, 2):
        with pytest.raises(AssertionError, match="TrainingInterruptedError: The ranks were asked"):
            torch_run(store, AskedToEnd(backend, after), "asked")
        state = read_state(store, store.get_checkpoints("asked")[-1])
        stopped.append((state.epoch, state.rows))
    assert stopped[1] == (0, 16)
    assert stopped == sorted(set(stopped))
    assert_equal_bits(end_of(store, torch_run(store, backend, "asked"), "asked"), whole)


def acting(step: int, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a constructor of a loss that changes its value in one step of rank 1."""

    def make(rank: int) -> Any:
        left = itertools.count(step, -1)

        def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            value = torch.nn.functional.mse_loss(output, label)
            is_training = rank == 1 and value.requires_grad
            return act(value) if is_training and next(left) == 1 else value

        return loss

    return [make]


def test_a_nan_loss_ends_all_ranks_and_keeps_the_last_good_checkpoint(
    backend: Any, store: Any
) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)

    def run(run_id: str, **params: Any) -> Any:
        return torch_run(store, backend, run_id, loss=None, **params)

    def newest(run_id: str) -> tuple[int, int]:
        state = read_state(store, store.get_checkpoints(run_id)[-1])
        return state.epoch, state.rows

    never = acting(0, lambda value: value)
    whole = end_of(store, run("whole", loss_constructors=never), "whole")

    # Step nine, with seven steps an epoch.
    nan = acting(9, lambda value: value * np.nan)
    with pytest.raises(AssertionError) as failed:
        run("nan", loss_constructors=nan, checkpoint_every_n_steps=4, terminate_on_nan=True)
    assert "NotFiniteError" in str(failed.value)
    assert "at step 9 of the run (in epoch 1" in str(failed.value)
    assert "the loss of rank 1 is nan; NaN or infinite after it: 'first.weight'" in str(
        failed.value
    )
    assert newest("nan") == (1, 16)
    resumed = run("nan", loss_constructors=never)
    assert_equal_bits(end_of(store, resumed, "nan"), whole)


def setup_module() -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(resuming)
