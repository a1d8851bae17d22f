"""Models for the tests of saved models. As a program, this file saves them again.

    python tests/spark/saved_models.py tests/spark/saved

Run it only after a deliberate change of the format: the files stand for models that users saved.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule

KINDS = ("torch", "keras", "lightning", "pipeline", "estimator")
COLOURS = ("red", "blue", "green")
ROWS = [(COLOURS[n % 3], n % 5 / 4.0, float(n % 7) / 6.0, float(n % 3)) for n in range(24)]
COLUMNS = ["colour", "a.b", "é", "label"]


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.stack([x, y], 1).float()).squeeze(1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        output = self(batch["a.b"], batch["é"])
        return torch.nn.functional.mse_loss(output, batch["label"].float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def frame(spark: Any) -> Any:
    """Return the rows for fitting and predicting."""
    return spark.createDataFrame(ROWS, COLUMNS).repartition(1)


def estimators(store: Any) -> dict[str, Any]:
    """Return an estimator of each framework."""
    import keras

    from hvd_estimators.keras import KerasEstimator
    from hvd_estimators.launch import LocalBackend
    from hvd_estimators.lightning import LightningEstimator
    from hvd_estimators.torch import TorchEstimator

    settings: dict[str, Any] = {
        "backend": LocalBackend(1),
        "store": store,
        "label_cols": ["label"],
        "batch_size": 8,
        "epochs": 2,
        "random_seed": 3,
        "verbose": 0,
    }
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    inputs = [keras.Input((1,), name="x"), keras.Input((1,), name="y")]
    hidden = keras.layers.Dense(4, "tanh")(keras.layers.Concatenate()(inputs))
    return {
        "torch": TorchEstimator(
            model=net,
            optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["features"],
            **settings,
        ),
        "keras": KerasEstimator(
            model=keras.Model(inputs, keras.layers.Dense(1)(hidden)),
            optimizer=keras.optimizers.Adam(0.01),
            loss="mse",
            feature_cols=["a.b", "é"],
            **settings,
        ),
        "lightning": LightningEstimator(model=Line(), feature_cols=["a.b", "é"], **settings),
    }


def fitted(spark: Any, store: Any) -> dict[str, Any]:
    """Return models and an estimator to save, by kind."""
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StringIndexer, VectorAssembler

    made = estimators(store)
    df = frame(spark)
    # Spark's own transformers do not accept dots in a name.
    plain = df.toDF("colour", "a", "b", "label")
    with_vectors = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    stages = [
        StringIndexer(inputCol="colour", outputCol="index"),
        VectorAssembler(inputCols=["index", "b"], outputCol="features"),
        made["torch"],
    ]
    return {
        "torch": made["torch"].fit(with_vectors.transform(plain)),
        "keras": made["keras"].fit(df),
        "lightning": made["lightning"].fit(df),
        "pipeline": Pipeline(stages=stages).fit(plain),
        "estimator": made["torch"],
    }


def predictions(spark: Any, kind: str, model: Any) -> list[float]:
    """Return a model's predictions in row order."""
    from pyspark.ml.feature import VectorAssembler

    df = frame(spark)
    if kind in ("torch", "pipeline"):
        df = df.toDF("colour", "a", "b", "label")
    if kind == "torch":
        df = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(df)
    return [float(row["label__output"]) for row in model.transform(df).collect()]


def main() -> None:
    import saved_models
    from pyspark.sql import SparkSession

    from hvd_estimators import Store

    folder = Path(sys.argv[1])
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    expected = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, stage in saved_models.fitted(spark, Store.create(scratch)).items():
            shutil.rmtree(folder / kind, ignore_errors=True)
            if kind == "estimator":
                stage = stage.copy()
                stage.clear(stage.store)
            stage.save(f"{(folder / kind).absolute()}")
            if kind != "estimator":
                expected[kind] = predictions(spark, kind, stage)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    for path in folder.rglob(".*.crc"):
        path.unlink()


if __name__ == "__main__":
    main()
