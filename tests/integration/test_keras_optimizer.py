"""`DistributedOptimizer` and the callbacks in custom training functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_pool import shared_ranks

pytestmark = pytest.mark.integration


def on_ranks(function: Any) -> list[Any]:
    return shared_ranks(2, "tensorflow").run(function)


@pytest.mark.parametrize("collectives", ["horovod", "torch"])
def test_custom_loops_apply_the_mean_gradient(collectives: str) -> None:
    def run() -> dict[str, Any]:
        from hvd_estimators.keras.collectives import session

        with session(collectives):
            return train_in_loops()

    def train_in_loops() -> dict[str, Any]:
        import horovod.tensorflow as hvd
        import keras
        import numpy as np
        import tensorflow as tf

        from hvd_estimators.keras import DistributedOptimizer
        from hvd_estimators.keras.collectives import GradientAverager
        from hvd_estimators.keras.gradients import distribute

        rank = hvd.rank()
        found: dict[str, Any] = {}

        def train(optimizer: Any, gradients: Any, graph: bool = True, shape: Any = (2,)):
            variable = keras.Variable(np.array([1.0, -2.0], np.float32))

            def apply(gradient: Any) -> None:
                optimizer.apply([gradient], [variable])

            spec = [tf.TensorSpec(shape, tf.float32)]
            step = tf.function(apply, input_signature=spec) if graph else apply
            for gradient in gradients:
                step(tf.constant(gradient, tf.float32))
            return variable.numpy()

        own = [[1.0, 0.0], [0.0, 4.0]] if rank == 0 else [[3.0, 0.0], [0.0, -2.0]]
        sgd = keras.optimizers.SGD
        found["eager"] = train(DistributedOptimizer(sgd(0.1)), own, graph=False)
        found["graph"] = train(DistributedOptimizer(sgd(0.1)), own)
        found["alone"] = train(sgd(0.1), own)
        found["halves"] = train(
            DistributedOptimizer(sgd(0.1), compression=hvd.Compression.fp16), own
        )
        found["passes"] = train(DistributedOptimizer(sgd(0.1), backward_passes_per_step=2), own)
        for shape in ((None,), None):
            # TensorFlow knows such shapes for kernels that multiply more than two dimensions.
            found[f"partial {shape}"] = train(DistributedOptimizer(sgd(0.1)), own, shape=shape)
            found[f"partial passes {shape}"] = train(
                DistributedOptimizer(
                    sgd(0.1), compression=hvd.Compression.fp16, backward_passes_per_step=2
                ),
                own,
                shape=shape,
            )
        found["clipped"] = train(DistributedOptimizer(sgd(0.1, clipnorm=1.0)), own)
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.01])
        found["schedule"] = train(DistributedOptimizer(sgd(schedule)), own)
        scaled = keras.optimizers.LossScaleOptimizer(sgd(0.1), initial_scale=4.0)
        # The second gradient is NaN on rank 0, so all ranks skip it.
        bad = [[4.0, 0.0], [np.nan, 0.0]] if rank == 0 else [[12.0, 0.0], [4.0, 0.0]]
        found["loss scale"] = train(DistributedOptimizer(scaled), bad)
        found["scale after"] = float(scaled.dynamic_scale)
        # Rows 0 and 1 of an embedding on rank 0, rows 1 and 2 on rank 1.
        table = keras.Variable(np.zeros((4, 1), np.float32))
        slices = tf.IndexedSlices(
            tf.ones((2, 1)), tf.constant([rank, rank + 1]), tf.constant([4, 1])
        )
        DistributedOptimizer(sgd(1.0)).apply([slices], [table])
        found["sparse"] = table.numpy()[:, 0]
        # Eagerly, rank 0 has no gradient of the first variable, rank 1 none of the second.
        pair = [keras.Variable([1.0]), keras.Variable([1.0]), keras.Variable([1.0])]
        of_pair = [tf.constant([2.0]) if index == 1 - rank else None for index in range(3)]
        for passes in (1, 2):
            skipping = DistributedOptimizer(sgd(0.1), backward_passes_per_step=passes)
            for _ in range(passes):
                skipping.apply(of_pair, pair)
        found["skipped"] = np.concatenate([v.numpy() for v in pair])
        # Then a batch without rows, on rank 0, has a gradient that rank 1's batch lacks.
        one, momentum = keras.Variable([1.0]), sgd(0.1, momentum=0.9)
        averager = GradientAverager()
        distribute(momentum, averager)
        momentum.apply([tf.constant([2.0])], [one])
        for of_empty in (0, 1):
            averager.weight = tf.constant(0.0 if rank == 0 or of_empty else 1.0)
            momentum.apply([tf.constant([5.0]) if rank == 0 else None], [one])
        found["of no weight"] = one.numpy()
        half = keras.Variable(np.ones(1, np.float16), dtype="float16")
        DistributedOptimizer(sgd(1e-5)).apply([tf.constant([4e4], tf.float16)], [half])
        found["large halves"] = half.numpy()
        optimizer = DistributedOptimizer(keras.optimizers.Adam(0.1))
        found["class"] = type(optimizer).__name__
        try:
            optimizer.apply([tf.ones(2)])
        except ValueError as error:
            found["no variables"] = str(error)
        # Two optimizers with different rates, which are tripled.
        kernel, bias = keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")
        multi = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(sgd(schedule), {"bias": sgd(0.01)})
            ),
            initial_scale=4.0,
        )
        distribute(multi, GradientAverager(), learning_rate_scale=3.0)
        step = tf.function(lambda g: multi.apply([g, g], [kernel, bias]))
        for _ in range(2):
            step(tf.constant([2.0]) if rank == 0 else tf.constant([6.0]))
        found["multi"] = np.array([kernel.numpy()[0], bias.numpy()[0]])
        found["multi rates"] = [float(o.learning_rate) for o in multi.inner_optimizer.optimizers]
        found["config"] = keras.saving.serialize_keras_object(optimizer)
        return found

    first, second = on_ranks(run)
    for name in set(first) - {"alone", "class", "config", "no variables"}:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    # Steps of 0.1 by the means (2, 0) and (0, 1) from (1, -2).
    np.testing.assert_allclose(first["eager"], [0.8, -2.1], rtol=1e-6)
    np.testing.assert_allclose(first["graph"], [0.8, -2.1], rtol=1e-6)
    np.testing.assert_allclose(first["halves"], [0.8, -2.1], rtol=1e-3)
    # Without averaging, ranks differ.
    assert not np.allclose(first["alone"], second["alone"])
    assert not np.allclose(first["alone"], first["graph"])
    # One step by the mean of four gradients.
    np.testing.assert_allclose(first["passes"], [0.9, -2.05], rtol=1e-6)
    for shape in ((None,), None):
        np.testing.assert_allclose(first[f"partial {shape}"], first["graph"], rtol=1e-6)
        np.testing.assert_allclose(first[f"partial passes {shape}"], first["passes"], rtol=1e-3)
    # The means have the norms 2 and 1. If clipped first, they would be (1, 0) and (0, 0).
    np.testing.assert_allclose(first["clipped"], [0.9, -2.1], rtol=1e-6)
    np.testing.assert_allclose(first["schedule"], [0.8, -2.01], rtol=1e-6)
    # The mean of 4 and 12, divided by the scale of 4; then the scale is halved.
    np.testing.assert_allclose(first["loss scale"], [0.8, -2.0], rtol=1e-6)
    assert first["scale after"] == 2.0
    np.testing.assert_allclose(first["sparse"], [-0.5, -1.0, -0.5, 0.0])
    # Two steps by the mean of 2 and 0; the third variable has no gradient.
    np.testing.assert_allclose(first["skipped"], [0.8, 0.8, 1.0], rtol=1e-6)
    # Steps by 2, by nothing and by nothing, of which the sums are 2, 1.8 and 1.62.
    np.testing.assert_allclose(first["of no weight"], [1.0 - 0.542], rtol=1e-5)
    np.testing.assert_allclose(first["large halves"], [0.6], rtol=1e-2)
    assert first["class"] == "Adam"
    assert "must already be built" in first["no variables"]
    # The mean gradient is 4 / 4; the rates are 0.1 and then 0.01 times 3, and twice 0.01 times 3.
    np.testing.assert_allclose(first["multi"], [0.67, 0.94], rtol=1e-6)
    np.testing.assert_allclose(sorted(first["multi rates"]), [0.01, 0.01], rtol=1e-6)
    assert first["config"]["module"] == "keras.optimizers"


def test_callbacks_broadcast_average_and_warm_up() -> None:
    def run() -> dict[str, Any]:
        import contextlib
        import io

        import horovod.tensorflow as hvd
        import keras
        import numpy as np

        from hvd_estimators.compat.callbacks import (
            LearningRateScheduleCallback,
            LearningRateWarmupCallback,
        )
        from hvd_estimators.keras import (
            BroadcastCallback,
            DistributedOptimizer,
            MetricAverageCallback,
        )

        hvd.init()
        rank = hvd.rank()
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.2, momentum=0.5)
        optimizer.build(model.trainable_variables)
        for variable in optimizer.variables[2:]:
            # Slots also differ before the broadcast.
            variable.assign(np.full(variable.shape, rank, np.float32))
        model.compile(DistributedOptimizer(optimizer), "mse", metrics=["mae"], jit_compile=True)
        rows = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
        own = slice(0, 20) if rank == 0 else slice(20, 30)
        rates: list[float] = []

        class Rates(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                rates.append(round(float(self.model.optimizer.learning_rate), 6))

        frozen = keras.callbacks.LambdaCallback()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            history = model.fit(
                rows[own],
                rows[own].sum(axis=1, keepdims=True),
                batch_size=10 if rank == 0 else 5,
                epochs=3,
                shuffle=False,
                verbose=0,
                callbacks=[
                    BroadcastCallback(),
                    MetricAverageCallback(),
                    LearningRateWarmupCallback(0.2, warmup_epochs=1, verbose=1),
                    LearningRateScheduleCallback(0.2, 0.1, start_epoch=2, verbose=1),
                    Rates(),
                    frozen,
                ],
            ).history
        return {
            "state": [v.numpy() for v in [*model.variables, *optimizer.variables]],
            "history": history,
            "rates": rates,
            "jit": model.jit_compile,
            "printed": printed.getvalue().split("\n"),
        }

    first, second = on_ranks(run)
    for a, b in zip(first["state"], second["state"], strict=True):
        np.testing.assert_array_equal(a, b)
    assert first["history"] == second["history"]
    # Two batches an epoch: half the rate, then three quarters, then the full rate.
    assert first["rates"] == [0.1, 0.15, 0.2, 0.2, 0.02, 0.02]
    assert not first["jit"]
    assert [line for line in first["printed"] if line] == [
        "Epoch 1: learning rate set to 0.15.",
        "Epoch 2: learning rate set to 0.2.",
        "Epoch 3: learning rate set to 0.02.",
    ]
    assert second["printed"] == [""]


def test_a_model_that_the_first_batch_builds_is_broadcast_after_it() -> None:
    def run() -> Any:
        import horovod.tensorflow as hvd
        import keras
        import numpy as np

        from hvd_estimators.keras import BroadcastCallback, DistributedOptimizer

        hvd.init()
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        rows = np.random.default_rng(hvd.rank()).normal(size=(20, 2)).astype(np.float32)
        given = {"batch_size": 10, "verbose": 0, "callbacks": [BroadcastCallback()]}
        model.fit(rows, rows.sum(axis=1, keepdims=True), **given)
        return [weight.numpy() for weight in model.weights]

    first, second = on_ranks(run)
    assert len(first) == 4
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
