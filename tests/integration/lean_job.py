"""Programs for an environment without Horovod and compilers; the first argument names one."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from pyspark.sql import DataFrame, SparkSession

from hvd_estimators import Store, run
from hvd_estimators.launch import LocalBackend

ROWS = [(n / 16.0, 2 * n / 16.0 + 1) for n in range(16)]


class Line(LightningModule):
    """A line, trained by one step of gradient descent per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float().reshape(-1, 1)).squeeze(1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self(batch["x"]), batch["y"].float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def expected(epochs: int) -> tuple[float, float]:
    """Compute the same training in NumPy, from a weight of 0.5 and a bias of 0."""
    x, y = np.array(ROWS).T
    weight, bias = 0.5, 0.0
    for _ in range(epochs):
        error = weight * x + bias - y
        weight, bias = weight - 0.2 * np.mean(error * x), bias - 0.2 * np.mean(error)
    return weight, bias


def first_weights(module: torch.nn.Module) -> torch.nn.Module:
    for parameter, value in zip(module.parameters(), (0.5, 0.0), strict=True):
        torch.nn.init.constant_(parameter, value)
    return module


def settings(store: Store, **further: Any) -> dict[str, Any]:
    return {
        "store": store,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 5,
        "shuffle": False,
        "scale_learning_rate": False,
        "verbose": 0,
        **further,
    }


def check_fit(estimator: Any, frame: Any) -> None:
    """Fit, compare with NumPy, and predict with `transform` and with `load_predictor`."""
    model = estimator.fit(frame)
    weight, bias = (float(value) for value in model.getModel().state_dict().values())
    np.testing.assert_allclose((weight, bias), expected(5), rtol=1e-5)
    predicted = model.transform(frame).toPandas()
    np.testing.assert_allclose(
        predicted["y__output"].astype(float), weight * predicted["x"] + bias, rtol=1e-5
    )


def torch_estimator(store: Store, **further: Any) -> Any:
    from hvd_estimators.torch import TorchEstimator

    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0))
    return TorchEstimator(
        model=first_weights(net),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        input_shapes=[[-1, 1]],
        **settings(store, **further),
    )


def sum_over_ranks() -> float:
    """Sum over ranks as a program for ``torchrun`` does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def frame_on_spark() -> DataFrame:
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    return spark.createDataFrame(ROWS, ["x", "y"]).repartition(1).sortWithinPartitions("x")


def on_spark(store: Store) -> None:
    """Fit and predict with torch and Lightning in Spark tasks, and run a function there."""
    from hvd_estimators.lightning import LightningEstimator

    frame = frame_on_spark()
    check_fit(LightningEstimator(model=first_weights(Line()), **settings(store, num_proc=2)), frame)
    torch_on_spark(store)


def torch_on_spark(store: Store) -> None:
    """Fit and predict with torch in Spark tasks, and run a function there."""
    frame = frame_on_spark()
    check_fit(torch_estimator(store, num_proc=2), frame)
    assert run(sum_over_ranks, num_proc=2, verbose=0) == [3.0, 3.0]
    frame.sparkSession.stop()


def on_this_machine(store: Store) -> None:
    """Fit and run with a `LocalBackend`."""
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
    frame = spark.createDataFrame(ROWS, ["x", "y"]).repartition(1).sortWithinPartitions("x")
    check_fit(torch_estimator(store, backend=LocalBackend(2, verbose=0)), frame)
    assert LocalBackend(2, verbose=0).run(sum_over_ranks) == [3.0, 3.0]
    spark.stop()


def keras(store: Store) -> None:
    """Train on two ranks, and predict with a saved model of two inputs."""
    import keras

    from hvd_estimators.keras import KerasEstimator, KerasModel, load_predictor

    line = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    line.set_weights([np.array([[0.5]]), np.array([0.0])])
    line.compile(keras.optimizers.SGD(0.1), "mse")
    estimator = KerasEstimator(model=line, backend=LocalBackend(2), **settings(store))
    frame = frame_on_spark()
    fitted = estimator.fit(frame)
    found = [float(np.squeeze(value)) for value in fitted.getModel().get_weights()]
    np.testing.assert_allclose(found, expected(5), rtol=1e-5)
    frame.sparkSession.stop()

    inputs = [keras.Input((1,), name=name) for name in ("a", "b")]
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    net = keras.Model(inputs, dense(keras.layers.Concatenate()(inputs)))
    model = KerasModel(
        model=net, feature_columns=["a.b", "é"], label_columns=["y"], output_shapes=[[1]]
    )
    path = store.get_full_path("model")
    model.save(path)
    columns = {"a.b": np.arange(24) / 4.0, "é": np.arange(24) % 7 / 6.0}
    (predicted,) = load_predictor(path).predict(columns).values()
    np.testing.assert_allclose(np.ravel(predicted), columns["a.b"] + columns["é"], rtol=1e-5)


if __name__ == "__main__":
    assert find_spec("horovod") is None
    assert not any(map(shutil.which, ("g++", "c++", "clang++", "make", "cmake")))
    jobs = {job.__name__: job for job in (on_spark, torch_on_spark, on_this_machine, keras)}
    jobs[sys.argv[1]](Store.create(sys.argv[2]))
    print("done")
