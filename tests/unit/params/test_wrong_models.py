"""Wrong models, losses and framework-specific params fail early with typed errors."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import keras
import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from wrong_calls import Calls, NoRanks, Wrong, cases, check_wrong, plain_module

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.keras import BestModelCheckpoint
from hvd_estimators.torch import EarlyStopping as TorchEarlyStopping

pytestmark = pytest.mark.usefixtures("imported")

lock = threading.Lock()


class Net(torch.nn.Module):
    """Module whose subclasses change the use of the layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Two(Net):
    def forward(self, x: Any) -> Any:
        return self.layer(x), self.layer(x)


class Number(Net):
    def forward(self, x: Any) -> Any:
        return self.layer(x).sum()


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = lock


class OfEpochs:
    """Scheduler as of timm."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class OneHook:
    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        lock.acquire()


def closed_over(*args: Any) -> Any:
    return lock and args[0]


def summed(outputs: Any, labels: Any) -> Any:
    return (outputs - labels).sum()


def wrong(framework: str, error: Any, name: str, remedy: str, **changes: Any) -> Wrong:
    return lambda calls: calls.train(framework, **changes), error, name, remedy


def torch_row(name: str, remedy: str, error: Any = ParamError, **changes: Any) -> Wrong:
    return wrong("torch", error, name, remedy, **changes)


def keras_row(name: str, remedy: str, error: Any = ParamError, **changes: Any) -> Wrong:
    return wrong("keras", error, name, remedy, **changes)


def lightning_row(name: str, remedy: str, error: Any = ParamError, **changes: Any) -> Wrong:
    return wrong("lightning", error, name, remedy, **changes)


def other_optimizer() -> Any:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)


TORCH = {
    "a number": torch_row("model", r"expected a torch\.nn\.Module", model=5),
    "a class": torch_row("model", r"Linear\(\) failed \(TypeError", model=torch.nn.Linear),
    "a function": torch_row(
        "model",
        r"torch Module, or a function that returns one\. dict\(\) returned {'a': 1}",
        model=dict,
        model_args={"a": 1},
    ),
    "a function's arguments": torch_row(
        "model", r"Two\(\) failed with depth=3 \(TypeError", model=Two, model_args={"depth": 3}
    ),
    "arguments of an object": torch_row(
        "model_args", "Set a function or class", model_args={"depth": 3}
    ),
    "two outputs": torch_row("label_cols", "Set one label", ShapeError, model=Two()),
    "no rows": torch_row("output", "must count the rows", ShapeError, model=Number()),
    "a lock": torch_row("model", "that cannot be sent", model=Locked()),
    "too wide": torch_row(
        "feature_cols", "Set feature_cols in the", ShapeError, model=torch.nn.Linear(3, 1)
    ),
    "optimizer: a function": torch_row(
        "optimizer", r"list\(\) returned \[Parameter", optimizer=list
    ),
    "optimizer: fails": torch_row(
        "optimizer", r"failed \(ValueError: Invalid", optimizer=partial(torch.optim.SGD, lr=-1)
    ),
    "optimizer: other's": torch_row(
        "optimizer", r"Create the optimizer from model\.parameters", optimizer=other_optimizer()
    ),
    "loss: none": torch_row("loss", "Set either loss", loss=None),
    "loss: class": torch_row("loss", r"Set an object of it", loss=torch.nn.MSELoss),
    "loss: by row": torch_row(
        *("loss", "expected one number per batch"), loss=lambda outputs, labels: outputs - labels
    ),
    "loss: two": torch_row(
        "loss", "expected 1 or one per label", loss=[torch.nn.functional.mse_loss] * 2
    ),
    "loss_weights": torch_row("loss_weights", "expected one per label", loss_weights=[1, 2]),
    "weights of rows": torch_row(
        "loss", "Expected a function that takes reduction", sample_weight_col="w", loss=summed
    ),
    "callbacks: a lock": torch_row("callbacks", "that cannot be sent", callbacks=[OneHook()]),
    "clip": torch_row("gradient_clip_norm", "0 or more", gradient_clip_norm=-1),
    "clip: own step": torch_row(
        "gradient_clip_value", "in the function", train_minibatch_fn=len, gradient_clip_value=1
    ),
    "lr_scheduler": torch_row(
        "lr_scheduler",
        "expected a function of the optimizer, such as",
        lr_scheduler=StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1),
    ),
    "lr_scheduler: nothing": torch_row("lr_scheduler", "it returned None", lr_scheduler=print),
    "lr_scheduler: fails": torch_row("lr_scheduler", "TypeError.*step_size", lr_scheduler=StepLR),
    "lr_scheduler: another": torch_row(
        "lr_scheduler",
        "Create the scheduler within the function",
        lr_scheduler=lambda _: StepLR(other_optimizer(), 1),
    ),
    "lr_scheduler: step(epoch)": torch_row(
        "lr_scheduler",
        "OfEpochs, whose step.. cannot be called without arguments .*'epoch'",
        lr_scheduler=lambda _: OfEpochs(),
    ),
    "lr_scheduler: plateau": torch_row(
        "lr_scheduler_interval",
        "ReduceLROnPlateau needs the value of an epoch. Set 'epoch'",
        lr_scheduler=ReduceLROnPlateau,
        lr_scheduler_interval="step",
    ),
    "lr_scheduler: own step": torch_row(
        "lr_scheduler",
        "Leave lr_scheduler out",
        train_minibatch_fn=len,
        lr_scheduler=lambda optimizer: StepLR(optimizer, 1),
        lr_scheduler_interval="step",
    ),
    "early stopping: mode": (
        lambda calls: TorchEarlyStopping("val_distance"),
        ParamError,
        "mode",
        "Set mode to 'min' or 'max'",
    ),
    "early stopping: patience": (
        lambda calls: TorchEarlyStopping(patience=0),
        ParamError,
        "patience",
        "1 or more epochs",
    ),
    "early stopping: metric": torch_row(
        "monitor of EarlyStopping", "Set one of 'loss'", callbacks=[TorchEarlyStopping("los_loss")]
    ),
    "early stopping: no validation": torch_row(
        "monitor of EarlyStopping", "Set validation", callbacks=[TorchEarlyStopping("val_loss")]
    ),
    "buffer_reduction": torch_row(
        "buffer_reduction", "the model has no buffer 'm'", buffer_reduction={"m": "max"}
    ),
    "input_shapes: two": torch_row("input_shapes", "one shape per column", input_shapes=[[1], [1]]),
    "input_shapes: 3": torch_row(
        "input_shapes", "cannot be reshaped", ShapeError, input_shapes=[[3]]
    ),
    "dtypes: column": torch_row(
        "column_dtypes", "Set one of 'x', 'y'", column_dtypes={"z": "int64"}
    ),
}


class Locking(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.lock = keras.layers.Dense(1), lock

    def call(self, x: Any) -> Any:
        return self.dense(x)


class Unbuilt(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class Writing(keras.callbacks.Callback):
    """Callback that opens its writers in its constructor, as keras.io's examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.writers = {"train": lock}


def dense(width: int) -> Any:
    return keras.Sequential([keras.Input((width,)), keras.layers.Dense(1)])


KERAS = {
    "a class": keras_row("model", r"Dense\(\) failed \(TypeError", model=keras.layers.Dense),
    "a function": keras_row("model", r"keras Model, or a function", model=list),
    "a lock": keras_row("model", "Set model to a function", model=Locking()),
    "not built": keras_row("model", "Call it on a few rows", model=Unbuilt(), dry_run=False),
    "a lambda": keras_row(
        "model",
        "Could not interpret activation.* name functions",
        model=keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, activation=lambda x: x, name="it")]
        ),
    ),
    "too wide": keras_row("feature_cols", "Set columns in the order", ShapeError, model=dense(3)),
    "two labels": keras_row("label_cols", "Set one label", ShapeError, label_cols=["y", "w"]),
    "optimizer": keras_row("optimizer", "expected a Keras optimizer", optimizer="sgdd"),
    "optimizer: none": keras_row("optimizer", "Set optimizer", optimizer=None),
    "loss: unknown": keras_row("loss", "msee.*Set one of keras.losses", loss="msee"),
    "loss: none": keras_row("loss", "Set loss", loss=None),
    "loss: no label": keras_row("loss", "The label columns are 'y'", loss={"z": "mse"}),
    "metrics: unknown": keras_row(
        *("metrics", "Set names that Keras knows", ShapeError), metrics=["accuracyy"]
    ),
    "class_weight: labels": keras_row(
        "class_weight", "Set sample_weight_col", class_weight={0: 1.0}, label_cols=["y", "w"]
    ),
    "buffer_reduction": keras_row(
        "buffer_reduction", "Leave it out", buffer_reduction={"m": "max"}
    ),
    "callbacks: a lock": keras_row(
        "callbacks",
        "that cannot be sent",
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=closed_over)],
    ),
    "callbacks: an attribute": keras_row(
        "callbacks",
        r"fails at callbacks\[1\]\.writers\['train'\], a lock: .*cannot be sent.*on_train_begin",
        callbacks=[keras.callbacks.EarlyStopping("loss"), Writing()],
    ),
    "checkpoint_callback: validation": keras_row(
        "checkpoint_callback",
        "monitor: found 'val_loss', but the data have no validation rows",
        checkpoint_callback=BestModelCheckpoint(),
    ),
}


class Ends(pl.LightningModule):
    def training_epoch_end(self, outputs: Any) -> None:
        pass


class NoStep(pl.LightningModule):
    def configure_optimizers(self) -> Any:
        return None


def locked() -> Any:
    module = plain_module()
    module.lock = lock
    return module


LIGHTNING = {
    "clip": lightning_row(
        "gradient_clip_norm", "Set trainer_args={'gradient_clip_val'", gradient_clip_norm=1.0
    ),
    "early stopping of torch": lightning_row(
        "callbacks", "expected instances", callbacks=[TorchEarlyStopping()]
    ),
    "plain module": lightning_row(
        "model", "train the module with TorchEstimator", model=torch.nn.Linear(1, 1)
    ),
    "hook of Lightning 1": lightning_row("model", r"as on_train_epoch_end\(self\)", model=Ends()),
    "no step": lightning_row("model", r"no training_step\(\)\. Define it", model=NoStep()),
    "a lock": lightning_row("model", "that cannot be sent", model=locked()),
    "loss": lightning_row("loss", "Leave loss out", loss=torch.nn.functional.mse_loss),
    "optimizer": lightning_row("optimizer", "Leave optimizer out", optimizer=other_optimizer()),
    "learning_rate": lightning_row(
        "learning_rate", r"the rate in the module's configure_optimizers\(\)", learning_rate=0.1
    ),
    "trainer_args: unknown": lightning_row(
        "trainer_args", "Did you mean 'max_epochs'", trainer_args={"max_epoch": 3}
    ),
    "trainer_args: none": lightning_row(
        "trainer_args", "Set max_epochs to 1", trainer_args={"max_epochs": 0}
    ),
    "trainer_args: devices": lightning_row(
        "trainer_args", "Set num_proc", trainer_args={"devices": 4}
    ),
    "trainer_args: of no kind": lightning_row(
        "trainer_args", "rejects them", trainer_args={"gradient_clip_val": "a"}
    ),
    "trainer_args: passes": lightning_row(
        "trainer_args", "expected 1 or more", trainer_args={"accumulate_grad_batches": 0}
    ),
    "trainer_args: passes of no number": lightning_row(
        "trainer_args", "expected 1 or more", trainer_args={"accumulate_grad_batches": None}
    ),
    "num_gpus": lightning_row("num_gpus", "Set num_proc", num_gpus=2),
    "input_shapes": lightning_row(
        "input_shapes", "Set shapes of as many", ShapeError, input_shapes=[[2]]
    ),
}

ROWS = {
    f"{framework}: {name}": row
    for framework, rows in (("torch", TORCH), ("keras", KERAS), ("lightning", LIGHTNING))
    for name, row in rows.items()
}


@cases(ROWS)
def test_fits_of_unsuitable_objects_fail_before_training(tmp_path: Path, wrong: Wrong) -> None:
    check_wrong(Calls(tmp_path), wrong)


@pytest.mark.parametrize(
    ("framework", "changes", "library"),
    [
        ("torch", {"collectives": "torch"}, "torch.distributed"),
        ("torch", {"collectives": "horovod"}, "Horovod"),
        ("keras", {}, "Horovod"),
        ("torch", {"verbose": 0}, None),
        ("torch", {"backend": NoRanks(1)}, None),
    ],
)
def test_what_averages_the_gradients_is_shown(
    tmp_path: Path, capfd: Any, framework: str, changes: Any, library: str | None
) -> None:
    with pytest.raises(AssertionError, match="ranks were to be started"):
        Calls(tmp_path).train(framework, **{"verbose": 1, **changes})
    shown = re.findall(r"^2 processes average gradients with (.*)\.$", capfd.readouterr().err, re.M)
    assert shown == ([] if library is None else [library])


@pytest.mark.parametrize(
    ("framework", "changes", "told"),
    [
        ("torch", {}, "Learning rate 0.1 x 2 processes = 0.2;"),
        ("torch", {"learning_rate": 0.03}, "Learning rate 0.03 x 2 processes = 0.06;"),
        ("keras", {}, "Learning rate 0.01 x 2 processes = 0.02;"),
        ("keras", {"learning_rate": 3.0}, "Learning rate 3 x 2 processes = 6;"),
        ("lightning", {}, "Learning rates times 2 processes;"),
        ("torch", {"scale_learning_rate": False}, "Learning rate 0.1."),
        ("torch", {"backend": NoRanks(1)}, "Learning rate 0.1."),
        ("torch", {"verbose": 0}, None),
    ],
)
def test_the_learning_rate_of_training_is_shown(
    tmp_path: Path, capfd: Any, framework: str, changes: Any, told: str | None
) -> None:
    with pytest.raises(AssertionError, match="ranks were to be started"):
        Calls(tmp_path).train(framework, **{"verbose": 1, **changes})
    lines = re.findall(r"^Learning rate.*", capfd.readouterr().err, re.MULTILINE)
    assert len(lines) == (told is not None)
    assert told is None or lines[0].startswith(told)
