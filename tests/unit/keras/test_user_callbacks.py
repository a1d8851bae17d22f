"""Callbacks in one process: their calls, reports and learning rates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators.compat.callbacks import LearningRateScheduleCallback, LogCallback
from hvd_estimators.keras import loop
from hvd_estimators.keras.loop import RankCallbacks
from hvd_estimators.keras.shard_state import MicroBatches, RandomStreams
from hvd_estimators.keras.user_callbacks import callback_state, for_rank, restore_callback
from hvd_estimators.launch.service import events

ROWS = np.arange(1.0, 9.0, dtype=np.float32)[:, None]


def linear(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """Return a model with the same gradient in every step."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, name="d")])
    model.compile(optimizer, lambda y, output: output, metrics=["mae"], jit_compile=False)
    return model


class Steps:
    checks_nan = False

    def end(self, epoch: int, before: int, batches: int, save_within: Any) -> None:
        """Save nothing and continue."""

    def finish_epoch(self, epoch: int) -> None:
        """Continue."""


class Nowhere:
    """Reports, and states that are saved, of a run that is alone."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Saver(Nowhere):
    def __init__(self, model: Any, num_shards: int) -> None:
        self.streams = RandomStreams(model, 9, 0)
        self.micro_batches = MicroBatches(model, num_shards, 0, 1, self.streams)
        self.states = Nowhere()


def test_callbacks_see_steps_if_a_rank_runs_several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    given = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: called.append(batch),
        on_train_batch_end=lambda batch, logs: called.append((batch, round(logs["loss"], 3))),
    )
    model = linear(keras.optimizers.SGD(0.0))
    model.layers[0].set_weights([np.ones((1, 1))])
    # Labels are rows times two: the (absolute) error of a row is its value.
    rows = np.array([1.0, 2.0, 3.0, 0.0, 1.0, 0.0, 2.0, 0.0])[:, None]
    monkeypatch.setattr(loop, "sum_arrays", lambda arrays, name: arrays)
    history: list[Any] = []
    given_to_it: Any = {"history": history, "progress": Nowhere(), "step_end": Steps()}
    callbacks = RankCallbacks(*([given], model, 1, 4, Saver(model, 2)), **given_to_it, resumed=None)
    model.fit(rows, 2 * rows, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
    means = [3 / 2, 6 / 4, 7 / 6, 9 / 8]
    assert called == [entry for step in range(4) for entry in (step, (step, round(means[step], 3)))]
    assert [round(record.train["loss"], 3) for record in history] == [round(means[-1], 3)]


@pytest.mark.parametrize("correction", [True, False])
def test_velocity_scales_with_the_rate(correction: bool) -> None:
    model = linear(keras.optimizers.SGD(0.1, momentum=0.5))
    model.layers[0].set_weights([np.zeros((1, 1))])
    callback = LearningRateScheduleCallback(
        None, lambda epoch: 10.0**-epoch, momentum_correction=correction
    )
    logs = model.fit(
        np.ones((2, 1)), ROWS[:2], batch_size=1, epochs=2, verbose=0, callbacks=[callback]
    ).history
    # Computed by hand: the gradient is 1.
    weight = velocity = 0.0
    for rate, factor in [(0.1, 1.0), (0.1, 1.0), (0.01, 0.1), (0.01, 1.0)]:
        velocity = velocity * (factor if correction else 1.0) * 0.5 - rate
        weight += velocity
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-5)
    np.testing.assert_allclose(logs["learning_rate"], [0.1, 0.01], rtol=1e-6)


def multi_optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(0.2), {"net/d/.*": keras.optimizers.SGD(0.1)}
        )
    )


def test_each_inner_optimizer_has_a_scaled_rate() -> None:
    model = linear(keras.optimizers.LossScaleOptimizer(multi_optimizer()))
    logs = model.fit(
        ROWS, ROWS, epochs=2, verbose=0, callbacks=[LearningRateScheduleCallback(None, 0.5)]
    ).history
    rates = {name: values for name, values in logs.items() if name.startswith("learning_rate")}
    assert sorted(rates) == ["learning_rate_0", "learning_rate_1"]
    np.testing.assert_allclose(sorted(values[1] for values in rates.values()), [0.05, 0.1])


def test_relative_paths_are_below_the_runs_logs(tmp_path: Path) -> None:
    given: list[Any] = [
        *(keras.callbacks.CSVLogger(path) for path in ("own/log.csv", "/tmp/log.csv", "gs://b/c")),
        *(keras.callbacks.ModelCheckpoint(path) for path in ("of {epoch}/m.keras", "/a/m.keras")),
    ]
    found = [
        str(getattr(callback, "filename", None) or callback.filepath)
        for callback in for_rank(given, 0, str(tmp_path))
    ]
    own, best = f"{tmp_path}/own/log.csv", f"{tmp_path}/of {{epoch}}/m.keras"
    assert found == [own, "/tmp/log.csv", "gs://b/c", best, "/a/m.keras"]
    assert for_rank(given, 1, None) == []


def test_a_csv_log_of_a_resumed_run_has_one_header(tmp_path: Path) -> None:
    state: Any = None
    for epoch in range(2):
        log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"), append=True)
        restore = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs, log=log, state=state: state and restore_callback(log, state)
        )
        model = linear(keras.optimizers.SGD(0.1))
        given = {"initial_epoch": epoch, "epochs": epoch + 1, "callbacks": [log, restore]}
        model.fit(ROWS, ROWS, verbose=0, **given)
        state = callback_state(log, {})
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", "0", "1"]


@pytest.mark.parametrize("per_batch", [False, True])
def test_only_rank_0_reports_metrics(
    per_batch: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loss is weight * mean of the rows, so each step subtracts a tenth of that mean.
    model = linear(keras.optimizers.SGD(0.1))
    fit = {"epochs": 2, "batch_size": 4, "shuffle": False, "verbose": 0}
    events._forget()
    monkeypatch.setenv("HOROVOD_RANK", "1")
    model.fit(ROWS, ROWS, **fit, callbacks=[LogCallback(per_batch)])
    assert capsys.readouterr().out == ""

    monkeypatch.setenv("HOROVOD_RANK", "0")
    model.set_weights([np.array([[1.0]])])
    model.fit(ROWS, ROWS, **fit, callbacks=[LogCallback(per_batch)])
    events._forget()

    # Without a driver, messages are printed. Each starts with the date and the time.
    told = [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]
    losses = [re.sub(r", mae=.*", "", line) for line in told]
    batches = [
        ["epoch 0, batch 0: loss=2.5", "epoch 0, batch 1: loss=3.6875"],
        ["epoch 1, batch 0: loss=0.25", "epoch 1, batch 1: loss=-0.3625"],
    ]
    assert losses == [
        "epoch 0 begins",
        *(batches[0] if per_batch else []),
        "epoch 0 ends: loss=3.6875",
        "epoch 1 begins",
        *(batches[1] if per_batch else []),
        "epoch 1 ends: loss=-0.3625",
    ]
    assert sum("mae=" in line for line in told) == (6 if per_batch else 2)


def test_a_csv_log_keeps_the_epochs_before_a_resume(tmp_path: Path) -> None:
    for epoch in range(2):
        given = [keras.callbacks.CSVLogger("log.csv")]
        logs = for_rank(given, 0, str(tmp_path), is_resumed=epoch > 0)
        more = {"initial_epoch": epoch, "epochs": epoch + 1, "callbacks": logs}
        linear(keras.optimizers.SGD(0.1)).fit(ROWS, ROWS, verbose=0, **more)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", "0", "1"]


class Telling(keras.callbacks.ReduceLROnPlateau):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)


def test_a_resumed_callback_compares_with_its_own_margin() -> None:
    first, second = (Telling(monitor="loss", min_delta=0.5, patience=9) for _ in range(2))
    found = []
    for callback, losses in ((first, [1.0, 0.9]), (second, [0.8, 0.4])):
        callback.set_model(linear(keras.optimizers.SGD(0.1)))
        callback.on_train_begin()
        if callback is second:
            restore_callback(second, callback_state(first, {}))
        for epoch, loss in enumerate(losses):
            callback.on_epoch_end(epoch, {"loss": loss})
            found.append((callback.best, callback.wait))
    # Only the last loss is better by half.
    assert found == [(1.0, 0), (1.0, 1), (1.0, 2), (0.4, 0)]


@pytest.mark.parametrize("module", ["keras_hub.src.utils", "mine"])
def test_validation_does_not_prepare_rows_once_more(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    class Task(keras.Sequential):
        """Model as those of older keras-hub, which prepare the rows of a validation, too."""

        def evaluate(self, x: Any, y: Any, **kwargs: Any) -> Any:
            kwargs.pop("_use_cached_eval_dataset", None)
            return super().evaluate(100 * x, y, **kwargs)

    Task.evaluate.__module__ = module
    model = Task([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    (kernel,) = (variable.numpy() for variable in model.variables)
    loop.separate_evaluation(model, model.test_step)
    monkeypatch.setattr(loop, "sum_arrays", lambda arrays, name: arrays)
    others: list[Any] = [Saver(model, 1), [], Nowhere(), Steps(), None]
    callbacks = RankCallbacks([], model, 1, 1, *others)

    history = keras.Model.fit(
        model, ROWS, ROWS, validation_data=(ROWS, ROWS), callbacks=callbacks, verbose=0
    )

    # A method of the user's is called, as Keras does.
    prepared = ROWS if module.startswith("keras_hub") else 100 * ROWS
    expected = np.mean((prepared * kernel - ROWS) ** 2)
    assert history.history["val_loss"] == [pytest.approx(expected, rel=1e-5)]
    assert model.evaluate(ROWS, ROWS, verbose=0) == pytest.approx(
        np.mean((100 * ROWS * kernel - ROWS) ** 2), rel=1e-5
    )
