"""Dry runs check only shapes, leave all else to the ranks, and have no side effects."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from objectives import objective_of
from pytorch_lightning import LightningModule

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.fitting.trial import Trial, causes, leave_to_ranks, try_batches
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.keras.dry_run import DryRun
from hvd_estimators.lightning.dry_run import try_step
from hvd_estimators.torch.dry_run import check_fit
from hvd_estimators.torch.tensors import TensorSpec

COLUMNS = {"x": np.ones((3, 4), np.float32), "y": np.ones(3, np.float32)}
CALLS: list[str] = []


def ask_torch_horovod() -> Any:
    import horovod.torch as hvd

    return hvd.rank()


def ask_tf_horovod() -> Any:
    import horovod.tensorflow as hvd

    return hvd.size()


def wrapped() -> Any:
    try:
        return ask_torch_horovod()
    except ValueError as error:
        raise RuntimeError("no rank") from error


def ask_environment() -> Any:
    return os.environ["HOROVOD_RANK"]


def ask_group() -> Any:
    return torch.distributed.get_rank()


def need_gpu() -> Any:
    if torch.cuda.is_available():
        raise RuntimeError("CUDA out of memory")
    return torch.zeros(1).cuda()


def read_file() -> Any:
    return open("/nowhere/table.csv")


def no_kernel() -> Any:
    raise NotImplementedError("Could not run 'aten::add' with arguments from the 'CPU' backend.")


def not_set_up() -> Any:
    return None.table  # type: ignore[attr-defined]


ELSEWHERE = [
    ask_torch_horovod,
    ask_tf_horovod,
    wrapped,
    ask_environment,
    ask_group,
    need_gpu,
    read_file,
    no_kernel,
    not_set_up,
]


class Asking(torch.nn.Module):
    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.ask = ask
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ask()
        return self.linear(x)


def try_torch(module: torch.nn.Module, loss: Any = torch.nn.functional.mse_loss) -> Any:
    return check_fit(module, objective_of(TensorSpec(("x",), ("y",)), loss), COLUMNS)


@pytest.mark.parametrize("ask", ELSEWHERE)
def test_code_that_needs_a_rank_is_skipped_with_a_warning(
    ask: Callable[[], Any], caplog: Any
) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        ask()
    name = raised.type.__name__

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        ask()
        return torch.nn.functional.mse_loss(output, label)

    assert try_torch(Asking(ask)) == []
    assert try_torch(torch.nn.Linear(4, 1), loss) == [(1,)]
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all(f"({name}: " in r.message and "dry_run=False" in r.message for r in warned)


def test_shape_errors_end_the_fit_early(caplog: Any) -> None:
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (11x4 and 5x1)"),
        TypeError("GPUNet.forward() takes 2 positional arguments but 3 were given"),
        ValueError("Expected input batch_size (3) to match target batch_size (2)."),
        IndexError("Target 7 is out of bounds."),
        KeyError("x"),
        AssertionError("four features"),
        UserWarning("Using a target size"),
    ):
        assert not leave_to_ranks(error)
    with pytest.raises(ShapeError, match="cannot take the feature columns"):
        try_torch(torch.nn.Linear(5, 1))
    try:
        raise RuntimeError("no GPU, so the program fits here")
    except RuntimeError:
        with pytest.raises(ShapeError, match="cannot take the feature columns"):
            try_torch(torch.nn.Linear(5, 1))
    assert not caplog.records


class Counting(torch.nn.Module):
    """Module that counts its calls, prints, and draws random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        make_noise()
        self.calls += 1
        return self.linear(x) + torch.rand(1)


def make_noise() -> None:
    CALLS.append("called")
    print("a user's print")
    print("to the other stream", file=sys.stderr)
    random.random()
    np.random.rand()


def noisy_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    make_noise()
    return torch.nn.functional.mse_loss(output, label)


class NoisyLightning(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Counting()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        make_noise()
        return self.net(batch["x"]).mean()


def noisy_keras() -> Any:
    class Noisy(keras.layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            make_noise()
            self.calls.assign_add(1)
            return x

    inputs = keras.Input((4,))
    layer = Noisy()
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile("sgd", "mse")
    layer.calls.assign(0)
    return model, layer


def test_dry_runs_have_no_side_effects(capsys: Any) -> None:
    torch.manual_seed(3)  # not weights whose loss is almost 0, which is a sum as well as a mean
    module, light = Counting(), NoisyLightning()
    model, layer = noisy_keras()
    trial = DryRun(model, ["x"], ["y"], None, None)
    capsys.readouterr()
    random.seed(3)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    streams = sys.stdout, sys.stderr
    CALLS.clear()
    try_torch(module, noisy_loss)
    # The test's module is sent by value: its functions count in a copy.
    assert CALLS == []
    try_step(light, 3, lambda rows: {"x": torch.zeros(3, 4)[rows]})
    trial.run(COLUMNS)
    assert capsys.readouterr() == ("", "")
    assert (sys.stdout, sys.stderr) == streams
    assert random.getstate() == before[0]
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert module.calls == light.net.calls == 0
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert float(layer.calls) == 0
    assert trial.output_shapes == [(1,)]


def test_dry_runs_retry_a_few_failing_rows_as_a_batch() -> None:
    columns = {"x": np.arange(8.0).reshape(2, 4), "text": np.array(["a", "b"], object)}
    tried: list[int] = []

    def takes(*sizes: int) -> Any:
        def dry_run(given: Any) -> Trial:
            tried.append(len(given["x"]))
            assert given["x"][-1, 0] == 4.0 * ((len(given["x"]) - 1) % 2)
            if len(given["x"]) not in sizes:
                raise ShapeError(f"found {len(given['x'])} rows.") from KeyError("x")
            return Trial([(len(given["x"]),)])

        return dry_run

    for sizes, found in (([11, 6], [11]), ([6], [11, 6]), ([], [11, 6])):
        tried.clear()
        if sizes:
            assert try_batches(takes(*sizes), columns, 6).output_shapes == [(found[-1],)]
        else:
            with pytest.raises(
                ShapeError, match=r"found 6 rows\. dry_run=False leaves out"
            ) as error:
                try_batches(takes(), columns, 6)
            assert isinstance(error.value.__cause__, KeyError)
        assert tried == found
    # No batch is made if it needs more memory than a dry run may use.
    tried.clear()
    with pytest.raises(ShapeError, match="found 11 rows"):
        try_batches(takes(), columns, 2**26)
    assert tried == [11]


def test_keras_models_with_a_custom_step_are_checked_by_that_step(caplog: Any) -> None:
    class Recurrent(keras.Model):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, 5))
            self.rows = rows

        def call(self, x: Any, state: Any) -> Any:
            return self.dense(keras.ops.concatenate([x, state], axis=1))

        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": keras.ops.mean(self(data, keras.ops.zeros((self.rows, 1))))}

    def compiled(rows: int) -> keras.Model:
        model = Recurrent(rows)
        model.compile("sgd")
        return model

    def dry_run(rows: int) -> DryRun:
        def copy() -> keras.Model:
            return compiled(rows)

        return DryRun(compiled(rows), ["x"], [], None, None, copy=copy, compares=False)

    dry_run(3).run(COLUMNS)
    with pytest.raises(
        ShapeError, match=r"(?s)train_step failed on a batch of x \(3, 4\), .*Without label_cols"
    ):
        dry_run(2).run(COLUMNS)


def test_keras_models_need_a_test_step_or_a_loss_for_validation() -> None:
    class OfOutputs(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"error": keras.ops.mean(self(data))}

    class Regularized(keras.layers.Dense):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(x))
            return super().call(x)

    class Tested(OfOutputs):
        def test_step(self, data: Any) -> dict[str, Any]:
            return self.train_step(data)

    def dry_run(kind: type[keras.Model], dense: type[keras.layers.Dense], **params: Any) -> None:
        inputs = keras.Input((4,))
        model = kind(inputs, dense(1)(inputs))
        model.compile("sgd")
        Fit(
            KerasEstimator(model=model, feature_cols=["x"], label_cols=[], **params)
        ).framework.dry_run(COLUMNS)

    dry_run(OfOutputs, keras.layers.Dense)
    dry_run(OfOutputs, Regularized, validation=0.5)
    dry_run(Tested, keras.layers.Dense, validation=0.5)
    with pytest.raises(ParamError, match=r"^validation: .*Give the model a test_step\(\), or set"):
        dry_run(OfOutputs, keras.layers.Dense, validation=0.5)


def test_the_end_of_a_generator_is_no_cause() -> None:
    try:
        next(iter(()))
    except StopIteration:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            try:
                raise ValueError("the error") from cause
            except ValueError as error:
                found = [type(each) for each in causes(error)]
    assert found == [ValueError, KeyError]
