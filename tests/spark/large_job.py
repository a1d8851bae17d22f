"""Run fits and predictions that are large for a default driver; test_large.py runs this program.

Only two settings differ from Spark's defaults, for machines without a network. A driver has 1 GB.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from hvd_estimators import Store
from hvd_estimators.exceptions import ResultsError

ROWS = 8


def make_estimator(framework: str, parameters: int, store: Store, frozen: bool = False) -> Any:
    """Return an estimator of an embedding with the given number of parameters, under Adam.

    With ``frozen``, for torch and Lightning only, the embedding is not trained.
    """
    common: dict[str, Any] = {
        "num_proc": 2,
        "store": store,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 4,
        "scale_learning_rate": False,
        "verbose": 0,
    }
    if framework == "keras":
        import keras

        from hvd_estimators.keras import KerasEstimator

        inputs = keras.Input((1,), name="x")
        embedded = keras.layers.Embedding(parameters // 100, 100)(inputs)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embedded))
        model = keras.Model(inputs, outputs)
        return KerasEstimator(
            **common, model=model, optimizer=keras.optimizers.Adam(0.01), loss="mse"
        )
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(parameters // 100, 100)
            self.out = torch.nn.Linear(100, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(x.long().reshape(len(x))))

    net = Net()
    net.table.requires_grad_(not frozen)
    common |= {
        "model": net,
        "optimizer": torch.optim.Adam((net.out if frozen else net).parameters(), lr=0.01),
        "loss": torch.nn.functional.mse_loss,
        "input_shapes": [[-1, 1]],
    }
    if framework == "torch":
        from hvd_estimators.torch import TorchEstimator

        return TorchEstimator(**common)
    from hvd_estimators.lightning import LightningEstimator

    return LightningEstimator(**common, logger=False)


def fine_tune(spark: SparkSession, folder: Path, framework: str, parameters: int) -> None:
    """Train the last layer of a model with the given number of parameters."""
    import torch

    frame = spark.range(ROWS).select(F.col("id").cast("double").alias("x"), F.lit(1.0).alias("y"))
    store = Store.create(str(folder / "store"), save_runs=False)
    estimator = make_estimator(framework, parameters, store, frozen=True)
    given = estimator.getModel()
    trained = estimator.fit(frame).getModel()
    assert torch.equal(trained.table.weight, given.table.weight)
    # Two ranks of four rows each: one step of Adam moves every weight by the learning rate.
    rows = given.table.weight[:ROWS]
    outputs = given.out(rows)
    gradient = torch.autograd.grad(torch.mean((outputs - 1) ** 2), given.out.weight)[0]
    expected = given.out.weight - 0.01 * gradient.sign()
    torch.testing.assert_close(trained.out.weight, expected, atol=1e-5, rtol=0)


def fit(spark: SparkSession, folder: Path, framework: str, parameters: int) -> None:
    """Train a model with the given number of parameters, and predict with it."""
    frame = spark.range(ROWS).select(F.col("id").cast("double").alias("x"), F.lit(1.0).alias("y"))
    store = Store.create(str(folder / "store"), save_runs=False)
    model = make_estimator(framework, parameters, store).fit(frame)
    assert_predicts(model, frame, framework)


def predict(spark: SparkSession, folder: Path, framework: str, parameters: int) -> None:
    """Predict in two workers with a model of the given number of parameters."""
    frame = spark.range(0, ROWS, 1, 2).select(F.col("id").cast("double").alias("x"))
    store = Store.create(str(folder / "store"))
    estimator = make_estimator(framework, parameters, store, frozen=framework != "keras")
    model = estimator.get_model_class()(
        model=estimator.getModel(),
        feature_columns=["x"],
        label_columns=["y"],
        output_shapes=[[]],
        **({} if framework == "keras" else {"input_shapes": [[-1, 1]]}),
    )
    assert_predicts(model, frame, framework)


def assert_predicts(model: Any, frame: DataFrame, framework: str) -> None:
    """Assert that predictions equal the outputs of the wrapped model."""
    found = [row["y__output"] for row in model.transform(frame).orderBy("x").collect()]
    inner = model.getModel()
    given = np.arange(ROWS, dtype=np.float32)[:, None]
    if framework == "keras":
        expected = inner(given).numpy()
    else:
        import torch

        expected = inner(torch.from_numpy(given)).detach().numpy()
    np.testing.assert_allclose(found, expected[:, 0], rtol=1e-5, atol=1e-6)


def shared_pages(spark: SparkSession, folder: Path, framework: str, workers: int) -> None:
    """Predict with a 1 GB model in several concurrent workers, which share its pages."""
    frame = spark.range(0, workers, 1, workers).select(F.col("id").cast("double").alias("x"))
    model = model_that_reads(framework)
    found = np.array([row["y__output"].toArray() for row in model.transform(frame).collect()])
    print(found)
    np.testing.assert_allclose(found[:, 0], 1, rtol=1e-3)
    assert (found[:, 1] > 1).all()
    # Each worker needs memory for torch besides the table.
    assert found[:, 2].sum() < 1 + workers * 0.4, found


def model_that_reads(framework: str) -> Any:
    """Return a 1 GB model that outputs its weights' mean, and its worker's RSS and PSS."""

    def sizes() -> list[float]:
        # By then the other workers have the table, too.
        time.sleep(20)
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        found = {line.split()[0]: float(line.split()[1]) / 2**20 for line in lines[1:]}
        return [found["Rss:"], found["Pss:"]]

    columns: dict[str, Any] = {"feature_columns": ["x"], "label_columns": ["y"]}
    import torch

    if framework == "torch":
        from hvd_estimators.torch import TorchModel as KindOfModel

        base: Any = torch.nn.Module
    else:
        from pytorch_lightning import LightningModule as base

        from hvd_estimators.lightning import LightningModel as KindOfModel

    class Reads(base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2**28))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[self.table.sum().item() / 2**28, *sizes()]]).repeat(len(x), 1)

    return KindOfModel(model=Reads(), output_shapes=[[3]], **columns)


def images(spark: SparkSession, folder: Path, rows: int) -> None:
    """Predict on many images."""
    import torch

    from hvd_estimators.torch import TorchModel

    pixels = 224 * 224 * 3
    frame = spark.range(0, rows, 1, 1).select(
        F.array_repeat(F.col("id").cast("float"), pixels).alias("image")
    )
    model = TorchModel(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.AvgPool1d(pixels)),
        feature_columns=["image"],
        label_columns=["mean"],
        output_shapes=[[1]],
        inference_batch_size=16,
    )
    found = model.transform(frame).select("mean__output").toPandas()["mean__output"]
    np.testing.assert_allclose(found, np.arange(rows), rtol=1e-2)


def results(spark: SparkSession, folder: Path, ranks: int) -> None:
    """Return the largest results that the JVM can collect; larger ones fail and leave it alive."""
    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.spark_backend import SparkBackend

    backend = SparkBackend(ranks)
    most = Cluster(spark.sparkContext).collectable_bytes() // ranks
    for size in (most // 4, most - 2**10):
        assert list(map(len, backend.run(bytes, [size]))) == [size] * ranks
    with pytest.raises(ResultsError, match="Return less"):
        backend.run(bytes, [most + 2**10])
    assert spark.range(3).count() == 3


def flat_disk(spark: SparkSession, folder: Path, repeats: int) -> None:
    """Run and predict many times with 20 MB, and check the disk usage."""
    import torch

    from hvd_estimators.launch.spark_backend import SparkBackend
    from hvd_estimators.torch import TorchModel

    given, backend = bytes(20 * 2**20), SparkBackend(2)
    sizes = []
    for _ in range(repeats):
        assert backend.run(len, [given]) == [len(given)] * 2
        sizes.append(on_disk(spark))
    assert max(sizes) < 2**20, sizes

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5 * 2**20, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x.long().reshape(len(x)))

    same = TorchModel(model=Net(), feature_columns=["id"], label_columns=["y"], output_shapes=[[1]])
    sizes = []
    for _ in range(repeats):
        assert same.transform(spark.range(4)).count() == 4
        assert len(same.transform(spark.range(4)).collect()) == 4
        sizes.append(on_disk(spark))
    assert max(sizes) < 22 * 2**20, sizes
    sizes = []
    for _ in range(repeats):
        other = TorchModel(
            model=Net(), feature_columns=["id"], label_columns=["y"], output_shapes=[[1]]
        )
        assert len(other.transform(spark.range(4)).collect()) == 4
        collect(spark)
        sizes.append(on_disk(spark))
    # On a busy machine, some files wait for the thread that deletes them. All models would be
    # 420 MB.
    assert max(sizes) < 300 * 2**20, sizes
    sizes = []
    for _ in range(repeats):
        same.as_udf("same")
        TorchModel(
            model=Net(), feature_columns=["id"], label_columns=["y"], output_shapes=[[1]]
        ).as_udf("other")
        assert len(spark.sql("select same(id), other(id) from range(4)").collect()) == 4
        collect(spark)
        sizes.append(on_disk(spark))
    assert max(sizes) < 320 * 2**20, sizes


def collect(spark: SparkSession) -> None:
    """Collect garbage in the JVM, as Spark does twice an hour."""
    assert spark.sparkContext._jvm is not None
    spark.sparkContext._jvm.System.gc()


def on_disk(spark: SparkSession) -> int:
    """Return the bytes of the driver's broadcast files."""
    folder = Path(spark.sparkContext._temp_dir)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(folder: Path, job: str, *arguments: str) -> None:
    """Run a job in a session with Spark's defaults."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[4]" if job == "shared_pages" else "local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    assert spark.sparkContext._jvm is not None
    assert spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory() <= 2**30
    started = time.monotonic()
    values = [int(a) if a.isdigit() else a for a in arguments]
    jobs: dict[str, Any] = {
        "fit": fit,
        "predict": predict,
        "fine_tune": fine_tune,
        "shared_pages": shared_pages,
        "images": images,
        "results": results,
        "flat_disk": flat_disk,
    }
    jobs[job](spark, folder, *values)
    print(f"all well in {time.monotonic() - started:.0f} s")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
