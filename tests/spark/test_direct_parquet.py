"""Programs like Horovod's own tests of `fit_on_parquet`.

Lambdas on the store report its paths, `prepare_data` wrote the rows, and threads read them, also
where the programs ask for processes.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F
from variants import others_in_soak

pytestmark = [
    pytest.mark.spark,
    pytest.mark.once,
    pytest.mark.usefixtures("compat"),
    pytest.mark.timeout(600),
]

SOME_WAYS = [(None, True, "process"), ("val", False, "process")]


class CallbackBackend:
    """Run the ranks' function in this process, like the backend of Horovod's tests."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self) -> int:
        return 1


def xor(spark: Any) -> Any:
    rows = [(a, b, float(a != b), a) for a in (0, 1) for b in (0, 1)] * 2
    frame = spark.createDataFrame(rows, "x1 int, x2 int, y float, val int")
    return VectorAssembler(inputCols=["x1", "x2"], outputCol="features").transform(frame)


def torch_estimator() -> tuple[type[Any], dict[str, Any]]:
    import horovod.spark.torch as hvd_spark
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())

        def forward(self, features: Any) -> Any:
            return self.layers(features.float())[:, 0]

    model = Net()
    return hvd_spark.TorchEstimator, {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.BCELoss(),
        "input_shapes": [[2]],
        "backward_passes_per_step": 3,
    }


def lightning_estimator() -> tuple[type[Any], dict[str, Any]]:
    import horovod.spark.lightning as hvd_spark
    import torch
    from pytorch_lightning import LightningModule
    from torch import nn

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, features: Any) -> Any:
            return torch.sigmoid(self.layer(features.float()))[:, 0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def _loss(self, batch: Any) -> Any:
            return nn.functional.binary_cross_entropy(self(batch["features"]), batch["y"].float())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self._loss(batch))

    return hvd_spark.TorchEstimator, {
        "model": Net(),
        "input_shapes": [[-1, 2]],
        "trainer_args": {"num_sanity_val_steps": 0},
    }


def keras_estimator() -> tuple[type[Any], dict[str, Any]]:
    import horovod.spark.keras as hvd_spark
    import keras

    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, "sigmoid")]
    )
    return hvd_spark.KerasEstimator, {
        "model": model,
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": "binary_crossentropy",
    }


@pytest.fixture
def store(tmp_path: Path) -> Any:
    from horovod.spark.common.store import LocalStore

    store = LocalStore(str(tmp_path))
    # The lambdas refer to the store that holds them.
    store.get_train_data_path = lambda v=None: store._train_path
    store.get_val_data_path = lambda v=None: store._val_path
    return store


def check(spark: Any, store: Any, make: Any, ways: Any) -> None:
    from horovod.spark.common import util

    df = xor(spark)
    estimator, given = make()
    for validation, of_way in itertools.groupby(ways, key=lambda way: way[0]):
        with util.prepare_data(
            *(1, store, df),
            feature_columns=["features"],
            label_columns=["y"],
            validation=validation,
        ):
            for _, inmemory_cache_all, reader_pool_type in of_way:
                model = estimator(
                    backend=CallbackBackend(),
                    store=store,
                    feature_cols=["features"],
                    label_cols=["y"],
                    batch_size=1,
                    epochs=2,
                    reader_pool_type=reader_pool_type,
                    validation=validation,
                    inmemory_cache_all=inmemory_cache_all,
                    verbose=0,
                    **given,
                ).fit_on_parquet()
                assert model.transform(df).count() == df.count()
                assert ("val" in str(model.getHistory())) == (validation is not None)


MAKERS = [torch_estimator, keras_estimator, lightning_estimator]


@pytest.mark.parametrize("make", others_in_soak(*MAKERS))
def test_direct_parquet(spark: Any, store: Any, make: Any) -> None:
    check(spark, store, make, SOME_WAYS)


def test_validation_set_to_text_reads_val_path(spark: Any, store: Any) -> None:
    """Set validation to any text, and let Spark write the vectors as arrays."""
    from pyspark.ml.functions import vector_to_array

    df = xor(spark)
    arrays = df.select(vector_to_array("features").alias("features"), "y")
    for path in (store.get_train_data_path(), store.get_val_data_path()):
        arrays.write.mode("overwrite").parquet(path)
    estimator, given = lightning_estimator()
    est = estimator(
        backend=CallbackBackend(),
        store=store,
        feature_cols=["features"],
        label_cols=["y"],
        batch_size=64,
        epochs=2,
        verbose=0,
        inmemory_cache_all=True,
        reader_pool_type="process",
        **given,
    )
    est.setValidation("True")
    model = est.fit_on_parquet()
    assert "val" in str(model.getHistory())


def test_ranks_of_run_read_the_stores_paths(spark: Any, tmp_path: Path) -> None:
    import horovod.spark
    from horovod.spark.common import util
    from horovod.spark.common.store import Store

    store = Store.create(str(tmp_path))
    df = xor(spark).select("x1", "x2", "y", (F.col("val") == 1).alias("val"))

    def train(train_path: str, val_path: str) -> tuple[list[Any], list[Any]]:
        import horovod.torch as hvd
        import pyarrow.parquet as pq

        hvd.init()
        return tuple(pq.read_table(path).to_pylist() for path in (train_path, val_path))

    with util.prepare_data(1, store, df, label_columns=["y"], validation="val") as idx:
        paths = store.get_train_data_path(idx), store.get_val_data_path(idx)
        ((train_rows, val_rows),) = horovod.spark.run(train, args=paths, num_proc=1, verbose=0)
    assert {row["x1"] for row in train_rows} == {0}
    assert {row["x1"] for row in val_rows} == {1}
    assert len(train_rows) == len(val_rows) == 4
