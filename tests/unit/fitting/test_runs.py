"""Fits that resume from a run's checkpoint, and fits rejected before a rank starts."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import pytorch_lightning
import torch
from parquet_files import write_columns

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.fitting.fingerprint import as_json, differences, with_options
from hvd_estimators.fitting.run import Run
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.store.checkpoints import CheckpointInfo, checkpoint_path, write_manifest
from hvd_estimators.store.paths import Position
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.spec import CheckpointOptions


class Started(Exception):
    """Raised instead of starting the ranks."""


class NoRanks:
    """Backend that raises `Started` when called."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        raise Started

    def num_processes(self) -> int:
        return 1


class Module(pytorch_lightning.LightningModule):
    def __init__(self, lr: float = 0.1, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.layer = torch.nn.Linear(1, width)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["x"][:, None]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def torch_params(lr: float = 0.1, drop: float = 0.5, kind: Any = torch.optim.SGD) -> dict[str, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(drop))
    return {"model": net, "optimizer": kind(net.parameters(), lr=lr)}


def keras_params(lr: float = 0.1, drop: float = 0.5, kind: Any = keras.optimizers.SGD) -> Any:
    layers = [keras.Input((1,)), keras.layers.Dense(1), keras.layers.Dropout(drop)]
    return {"model": keras.Sequential(layers), "optimizer": kind(lr)}


ESTIMATORS: dict[str, Any] = {
    "torch": (TorchEstimator, {**torch_params(), "loss": torch.nn.L1Loss(), "input_shapes": [[1]]}),
    "keras": (KerasEstimator, {**keras_params(), "loss": "mse"}),
    "lightning": (LightningEstimator, {"model": Module()}),
}


def write(store: Any, rows: int = 10) -> None:
    columns = {"x": np.arange(rows, dtype=np.float32), "y": np.ones(rows, np.float32)}
    write_columns(store.get_train_data_path(), columns)


def start(store: Any, framework: str, **params: Any) -> None:
    cls, given = ESTIMATORS[framework]
    common = {
        "backend": NoRanks(),
        "store": store,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "run_id": "mine",
        "random_seed": 1,
        "verbose": 0,
    }
    with pytest.raises(Started):
        cls(**{**common, **given, **params}).fit_on_parquet()


class OneEpoch(NoRanks):
    """Backend whose ranks fail after an epoch."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        leave_checkpoint(self.store)
        raise Started


def leave_checkpoint_of(store: Any, framework: str) -> None:
    start(store, framework, backend=OneEpoch(store))


def leave_checkpoint(store: Any, epoch: int = 1) -> None:
    state = RunState(epoch=epoch, rows=0, canonical_shards=1, history=())
    with CheckpointWriter(store, store.run_paths("mine"), CheckpointOptions("torch")) as writer:
        writer.save(state, lambda file: torch.save({}, file))


CHANGES: list[Any] = [
    ("torch", {"batch_size": 8}, r"settings: batch_size 32 \(now 8\)"),
    ("torch", {"random_seed": 2}, r"settings: random_seed 1 \(now 2\)"),
    (
        "torch",
        {"loss": torch.nn.MSELoss()},
        r"loss: no torch.*MSELoss \(now with\).*loss: torch.*L1Loss \(now without\)",
    ),
    ("torch", {"loss": torch.nn.L1Loss(reduction="sum")}, r"reduction mean \(now sum\)"),
    ("torch", torch_params(lr=0.2), r"model: options: group 0: lr 0\.1 \(now 0\.2\)"),
    ("torch", torch_params(drop=0.1), r"layers Seq.*p=0\.5.*\(now Sequ.*p=0\.1"),
    ("torch", torch_params(kind=torch.optim.Adam), r"optimizer torch.*SGD \(now torch.*Adam\)"),
    ("torch", {"learning_rate": 0.3}, r"settings: learning_rate null \(now 0\.3\)"),
    ("torch", {"feature_cols": ["y"], "label_cols": ["x"]}, r"data: columns.*feature_cols"),
    ("keras", {"batch_size": 8}, r"batch_size"),
    ("keras", keras_params(lr=0.2), r"optimizers: 0 .*SGD\): learning_rate 0\.1.* \(now 0\.2"),
    ("keras", keras_params(drop=0.1), r"Dropout\): rate 0\.5 \(now 0\.1\)"),
    (
        "keras",
        keras_params(kind=keras.optimizers.Adam),
        r"model: optimizers: 0 .*SGD\) \(now without\).*no 0 .*Adam\) \(now with\)",
    ),
    ("keras", {"loss": "mae"}, r"model: loss mse \(now mae\)"),
    ("lightning", {"model": Module(lr=0.2)}, r"model: hparams: lr 0\.1 \(now 0\.2\)"),
    ("lightning", {"model": Module(width=2)}, r"model: layers .*model: weights"),
    ("lightning", {"trainer_args": {"precision": 64}}, r"trainer_args: no precision \(now with\)"),
]


@pytest.mark.parametrize("framework", ESTIMATORS)
def test_fits_resume_only_from_checkpoints_of_the_same_settings(store: Any, framework: str) -> None:
    write(store)
    start(store, framework)
    assert [run.state for run in store.list_runs()] == ["failed"]
    # No checkpoint was kept, so the next fit starts from the beginning.
    start(store, framework, batch_size=7)
    leave_checkpoint_of(store, framework)
    # More epochs; NumPy numbers; more output; a model with other names in Keras.
    same = {"keras": keras_params(), "torch": torch_params(np.float64(0.1))}.get(framework, {})
    start(store, framework, epochs=np.int64(5), verbose=1, batch_size=np.int32(32), **same)
    for name, changes, message in CHANGES:
        if name == framework:
            with pytest.raises(
                ParamError, match=rf"run_id: .*'mine' .*{message}.* another run_id"
            ) as raised:
                start(store, framework, **changes)
            # Even without notes, a run of another network or optimizer cannot be resumed.
            other_state = ("model: weights", "optimizer torch", "no 0 .*Adam")
            has_other_state = any(part in message for part in other_state)
            assert ("metadata.json" in str(raised.value)) is not has_other_state
            assert ("load_checkpoint(store, run_id='mine')" in str(raised.value)) is has_other_state
    start(store, framework, batch_size=8, run_id="other")
    write(store, rows=11)
    with pytest.raises(ParamError, match=r"data: files.*data: training rows 10 \(now 11\)"):
        start(store, framework)


class Focal(torch.nn.Module):
    """Loss with a plain option, a loss with options, and a parameter that differs each time."""

    def __init__(self, gamma: float, weight: list[float]) -> None:
        super().__init__()
        self.gamma = gamma
        self.base = torch.nn.CrossEntropyLoss(weight=torch.tensor(weight, dtype=torch.float32))
        self.centers = torch.nn.Parameter(torch.randn(3))
        self.hook = lambda loss: loss


class FocalOfKeras(keras.losses.Loss):
    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


def smoothed(smoothing: float) -> Any:
    return functools.partial(torch.nn.functional.cross_entropy, label_smoothing=smoothing)


@pytest.mark.parametrize(
    ("make", "before", "after", "message"),
    [
        (Focal, (2.0, [1, 2]), (3.0, [1, 2]), r"gamma 2\.0 \(now 3\.0\)"),
        (Focal, (2.0, [1, 2]), (2.0, [1, 9]), r"weight \[1\.0, 2\.0\] \(now \[1\.0, 9\.0\]\)"),
        (smoothed, (0.1,), (0.2,), r"cross_entropy: label_smoothing 0\.1 \(now 0\.2\)"),
        (lambda s: {"y": smoothed(s)}, (0.1,), (0.2,), r"label_smoothing 0\.1 \(now 0\.2\)"),
        (lambda s: [smoothed(s)], (0.1,), (0.2,), r"label_smoothing"),
        (FocalOfKeras, (2,), (3,), r"gamma 2 \(now 3\)"),
        (keras.losses.BinaryCrossentropy, (True,), (False,), r"from_logits true \(now false\)"),
        (keras.losses.Huber, (1.0,), (2.0,), r"delta 1\.0 \(now 2\.0\)"),
    ],
)
def test_losses_of_a_class_differ_in_their_options(
    make: Any, before: Any, after: Any, message: str
) -> None:
    given, same, other = (
        as_json({"loss": with_options(make(*a))}) for a in (before, before, after)
    )
    assert differences(given, same) == []
    (difference,) = differences(given, other)
    assert re.search(message, difference)


def test_a_loss_in_a_circle_has_its_class_alone() -> None:
    loss = Focal(1.0, [1, 2])
    loss.parts = [loss]
    assert with_options(loss).endswith("Focal")


def test_settings_of_later_versions_count_only_if_set(store: Any) -> None:
    """A run of a version without a setting resumes in a version with the setting."""
    write(store)
    start(store, "torch")
    leave_checkpoint_of(store, "torch")
    noted = json.loads(Path(store.get_run_path("mine"), "metadata.json").read_text())
    assert not {"outputs", "loss_form"} & noted["fingerprint"]["settings"].keys()
    start(store, "torch", outputs=None, loss_form="per_label")
    with pytest.raises(ParamError, match=r"settings: no outputs \(now with\)"):
        start(store, "torch", outputs=[0])


def test_checkpoints_without_notes_resume_with_a_warning(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write(store)
    leave_checkpoint(store)
    with caplog.at_level(logging.WARNING):
        start(store, "torch")
    assert "resuming 'mine' without a check" in caplog.text
    # The resumed run has notes.
    with pytest.raises(ParamError, match=r"batch_size 32 \(now 8\).*delete '.*mine/metadata.json'"):
        start(store, "torch", batch_size=8)


def test_damaged_checkpoints_are_reported_before_anything_starts(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write(store)
    leave_checkpoint(store)
    leave_checkpoint(store, epoch=2)
    older, newer = store.get_checkpoints("mine")
    store.write_text(newer, "cut")
    with caplog.at_level(logging.WARNING):
        start(store, "torch")
    assert f"{newer!r} (it has 3 bytes" in caplog.text
    assert f"The one before, {older!r}, is taken" in caplog.text
    store.delete(older)
    with pytest.raises(
        StoreError, match=r"No checkpoint .*'mine' .*3 bytes.*no such file.*another run_id, or none"
    ):
        start(store, "torch")
    # The remedy in the message.
    store.delete(store.get_checkpoint_path("mine"))
    start(store, "torch")


def test_valid_checkpoints_of_other_versions_are_not_skipped(store: Any) -> None:
    write(store)
    leave_checkpoint(store)
    run = store.run_paths("mine")
    content = b"of a version to come"
    path = checkpoint_path(run, Position(2))
    store.write_text(path, content.decode())
    digest = hashlib.sha256(content).hexdigest()
    write_manifest(store, CheckpointInfo(path, len(content), digest, 2, 0, "torch"))
    with pytest.raises(StoreError, match=r"The checkpoint '.*000002.ckpt' cannot be resumed"):
        start(store, "torch")


def test_only_one_fit_at_a_time_trains_a_run(store: Any) -> None:
    write(store)
    with (
        Run(store, store.run_paths("mine")),
        pytest.raises(ParamError, match="'mine' is being trained by another fit"),
    ):
        start(store, "torch")
    start(store, "torch")


@pytest.mark.parametrize("save_runs", [True, False])
def test_runs_that_never_started_leave_no_folder(tmp_path: Path, save_runs: bool) -> None:
    store = Store.create(str(tmp_path), save_runs=save_runs)
    run = store.run_paths("mine")
    only_copy = f"{run.run_path}/handover/state"

    def fail(path: str | None) -> None:
        with Run(store, run):
            if path is not None:
                store.write_text(path, "state")
            raise Started

    with pytest.raises(Started):
        fail(only_copy)
    assert store.exists(only_copy)
    store.delete(f"{run.run_path}/handover")
    with pytest.raises(Started):
        fail(None)
    assert not store.exists(run.run_path)


def test_runs_that_fail_before_the_first_checkpoint_are_listed(store: Any) -> None:
    write(store)
    start(store, "torch")
    (run,) = store.list_runs()
    assert (run.run_id, run.state, run.epochs, run.error) == ("mine", "failed", 0, "Started: ")
    # The run starts over, even with other settings.
    start(store, "torch", batch_size=8)
    (run,) = store.list_runs()
    assert run.state == "failed"


def test_stores_without_runs_cannot_resume(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path), save_runs=False)
    write(store)
    start(store, "torch")
    start(store, "torch", batch_size=8)
    assert not list(tmp_path.rglob("metadata.json"))
