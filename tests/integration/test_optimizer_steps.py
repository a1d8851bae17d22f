"""Clipping, schedulers, precision and early stopping: as in one process, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from reference import OPTIMIZERS, assert_same_weights, global_batches, make_net, write_rows
from resuming import kept_checkpoints
from test_resuming import assert_equal_bits, end_of, torch_run
from torch.optim import lr_scheduler as schedulers

from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.torch import EarlyStopping

pytestmark = pytest.mark.integration

ROWS, EPOCHS, BATCH = 64, 3, 8


def train_alone(columns: dict[str, np.ndarray], clip: Any, make: Any, per_step: bool) -> Any:
    """Train in one process; ``clip`` changes the gradients of the parameters."""
    net = make_net()
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    scheduler = make(optimizer)
    rates = []
    for _ in range(EPOCHS):
        for rows in global_batches(ROWS, 2, BATCH):
            outputs = net(torch.from_numpy(columns["features"][rows])).reshape(-1)
            loss = torch.nn.functional.mse_loss(outputs, torch.from_numpy(columns["label"][rows]))
            optimizer.zero_grad()
            loss.backward()
            clip(list(net.parameters()))
            optimizer.step()
            if per_step:
                scheduler.step()
        if not per_step:
            is_plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
            scheduler.step(*([0.0] if is_plateau else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return net, rates


@pytest.mark.parametrize(
    ("params", "clip", "make", "per_step"),
    [
        (
            {"gradient_clip_norm": 0.5, "lr_scheduler_interval": "step"},
            lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.5),
            lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=12),
            True,
        ),
        (
            {"gradient_clip_value": 0.1},
            lambda ps: [p.grad.clamp_(-0.1, 0.1) for p in ps],
            lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5),
            False,
        ),
    ],
    ids=["norm", "value"],
)
def test_clipping_and_schedulers_match_one_process(
    backend: Any, store: Any, params: Any, clip: Any, make: Any, per_step: bool
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "lr_scheduler": make, **params}
    model, _ = reference.fit(store, 2, "momentum", backend=backend, **settings)

    expected, rates = train_alone(columns, clip, make, per_step)
    assert_same_weights(model.getModel(), expected)
    assert model.getOptimizer().param_groups[0]["lr"] == pytest.approx(rates[-1])
    unclipped, _ = train_alone(columns, lambda ps: None, make, per_step)
    with pytest.raises(AssertionError):
        assert_same_weights(model.getModel(), unclipped)


# 64 rows on two ranks in batches of 8: four steps an epoch, or two of up to three batches.
@pytest.mark.parametrize(
    ("params", "steps"),
    [
        ({"lr_scheduler_interval": "step"}, 12),
        ({"lr_scheduler_interval": "step", "backward_passes_per_step": 3}, 6),
        ({"lr_scheduler_interval": "epoch"}, 3),
    ],
)
def test_a_schedule_that_ends_before_training_is_rejected(
    backend: Any, store: Any, params: Any, steps: int
) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)

    def fit(total: int, epochs: int = EPOCHS) -> Any:
        def make(optimizer: Any) -> Any:
            return schedulers.OneCycleLR(optimizer, 0.1, total_steps=total)

        settings = {"batch_size": BATCH, "epochs": epochs, "run_id": "one", **params}
        return reference.fit(store, 2, "adam", backend=backend, lr_scheduler=make, **settings)

    calls = backend.results = []
    found = rf"^lr_scheduler: expected .* total_steps={steps} or more.*found {steps - 1}\. Set"
    with pytest.raises(ParamError, match=found):
        fit(steps - 1)
    assert backend.results is calls
    model, _ = fit(steps)
    assert len(model.getHistory()) == EPOCHS
    # The state of the run has the steps with which it began.
    with pytest.raises(AssertionError, match=rf"found {steps}\. A run that resumes keeps"):
        fit(2 * steps, 2 * EPOCHS)


def test_the_set_rate_replaces_the_one_of_an_earlier_schedule(backend: Any, store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)

    def make(optimizer: Any) -> Any:
        return schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    net = make_net()
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    make(optimizer)  # as of a fit before, which leaves its first rate in the optimizer
    assert optimizer.param_groups[0]["initial_lr"] != 0.003
    model, _ = reference.fit(
        store,
        2,
        "momentum",
        backend=backend,
        model=net,
        optimizer=optimizer,
        learning_rate=0.003,
        lr_scheduler=make,
        batch_size=BATCH,
        epochs=EPOCHS,
    )
    assert model.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.003 * 0.5**EPOCHS)
    assert columns["label"].size == ROWS


def test_class_weights_need_classes(backend: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)

    def fails(error: Any, match: str, **params: Any) -> None:
        with pytest.raises(error, match=match):
            reference.fit(store, 2, "sgd", backend=backend, class_weight={0: 2.0}, **params)

    fails(DataError, r"class_weight: expected class numbers .* in column 'label'")
    fails(ParamError, "class_weight: expected a single label", label_cols=["label", "weight"])
    fails(ParamError, "class_weight: .* and a train_minibatch_fn", train_minibatch_fn=print)
    fails(ParamError, "loss: .* cannot be weighted", loss=lambda output, label: output.mean())


def small(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients 16-bit floats do not hold unless they are scaled up."""
    return torch.nn.functional.mse_loss(outputs.float(), labels) * 2.0**-20


def train_with_autocast(columns: dict[str, np.ndarray], dtype: torch.dtype) -> Any:
    """Train in one process as torch's documentation says."""
    net = make_net()
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for rows in [rows for _ in range(EPOCHS) for rows in global_batches(ROWS, 2, BATCH)]:
        with torch.autocast("cpu", dtype):
            outputs = net(torch.from_numpy(columns["features"][rows])).reshape(-1)
            loss = small(outputs, torch.from_numpy(columns["label"][rows]))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not scaler.is_enabled() or scaler.get_scale() == 2.0**16  # no step was skipped
    return net


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_as_in_one_process(backend: Any, store: Any, precision: str) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "precision": precision}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        assert output.dtype == dtype  # on the driver, too
        return small(output, label)

    model, _ = reference.fit(store, 2, "momentum", backend=backend, loss=loss, **settings)

    expected = train_with_autocast(columns, dtype)
    for found, wanted, initial in zip(
        model.getModel().parameters(), expected.parameters(), make_net().parameters(), strict=True
    ):
        assert found.dtype == torch.float32
        moved, wanted = found - initial, wanted - initial
        assert (moved - wanted).norm() < 0.02 * wanted.norm()


class Opposite(torch.nn.Module):
    """Loss that wants the opposite of the labels in validation."""

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        sign = 1 if torch.is_grad_enabled() else -1
        return torch.nn.functional.mse_loss(output, sign * label)


def test_early_stopping_ends_all_ranks_and_restores_the_best_weights(
    backend: Any, store: Any
) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)

    def run(run_id: str, epochs: int, *callbacks: Any) -> Any:
        settings = {"loss": Opposite(), "validation": 0.1, "batch_size": BATCH}
        return reference.fit(
            store,
            2,
            "sgd",
            backend=backend,
            run_id=run_id,
            epochs=epochs,
            callbacks=list(callbacks),
            **settings,
        )[0]

    one = run("one", 1)
    stopping = EarlyStopping(patience=2, restore_best=True)
    stopped = run("stopped", 9, stopping)
    losses = [record["validation"]["loss"] for record in stopped.getHistory()]
    assert losses == sorted(losses)
    assert len(losses) == 3
    assert_equal_bits(stopped.getModel().state_dict(), one.getModel().state_dict())
    assert stopping.best is None  # the ranks have copies
    summary = stopped.summary
    assert (summary.run_id, summary.best_epoch, summary.stopped) == ("stopped", 0, True)
    assert (summary.rows, summary.validation_rows, summary.num_ranks) == (ROWS, 30, 2)
    assert summary.totalIterations == 3
    assert summary.values("loss", "validation") == losses
    assert summary.objectiveHistory == [epoch["train"]["loss"] for epoch in stopped.getHistory()]
    assert 0 < summary.seconds < 300
    assert summary.restarts == 0

    # A large min_delta counts no epoch after the first; the last weights stay.
    kept = run("kept", 9, EarlyStopping("loss", patience=3, min_delta=1e6, mode="min"))
    assert len(kept.getHistory()) == 4
    assert_equal_bits(kept.getModel().state_dict(), run("four", 4).getModel().state_dict())

    # The run is over, also for a fit that could train longer.
    again = run("stopped", 12, EarlyStopping(patience=2, restore_best=True))
    assert again.getHistory() == stopped.getHistory()
    assert_equal_bits(again.getModel().state_dict(), one.getModel().state_dict())


def test_a_run_with_all_of_them_resumes_bit_for_bit(backend: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)

    def run(run_id: str, **more: Any) -> list[Any]:
        params = {
            "gradient_clip_norm": 0.3,
            "lr_scheduler": lambda optimizer: schedulers.CyclicLR(
                optimizer, 0.001, 0.02, step_size_up=5, cycle_momentum=False
            ),
            "lr_scheduler_interval": "step",
            "precision": "fp16",
            "callbacks": [EarlyStopping("loss", patience=1, min_delta=1e6, restore_best=True)],
            **more,
        }
        return end_of(store, torch_run(store, backend, run_id, epochs=5, **params), run_id)

    whole = run("whole", checkpoint_every_n_steps=3, keep_checkpoints=99)
    assert len(whole[0]) == 2
    held = whole[3]["held"]
    assert held["lr_scheduler"]["last_epoch"] == 14
    assert held["scaler"]["scale"] > 1
    assert held["callbacks.EarlyStopping[0]"]["best_epoch"] == 0
    positions = []
    for run_id, position in kept_checkpoints(store, "whole"):
        positions.append(position)
        assert_equal_bits(run(run_id), whole)
    assert {epoch for epoch, _ in positions} == {0, 1, 2}
    assert len(positions) == 6
