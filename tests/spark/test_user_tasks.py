"""Whole tasks of users, as programs that they would write after the quick start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import pytest
import tensorflow as tf
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_estimators.keras import KerasEstimator

pytestmark = [pytest.mark.spark, pytest.mark.once]


def test_keras_with_early_stopping_best_model_tensorboard_and_mlflow(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    random = np.random.default_rng(1)
    labels = random.integers(0, 3, 400)
    features = random.normal(size=(400, 4)) + np.eye(3, 4)[labels] * 1.5
    rows = [(x.tolist(), int(y)) for x, y in zip(features, labels, strict=True)]
    train = spark.createDataFrame(rows[:300], ["features", "label"])
    held_out = spark.createDataFrame(rows[300:], ["features", "label"])

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(3, "softmax")]
    estimator = KerasEstimator(
        num_proc=2,
        store=tmp_path / "experiments",
        model=keras.Sequential([keras.Input((4,)), *layers]),
        optimizer=keras.optimizers.Adam(0.02),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        callbacks=[
            keras.callbacks.EarlyStopping(
                monitor="val_accuracy", patience=2, restore_best_weights=True
            ),
            keras.callbacks.ModelCheckpoint(
                "best.keras", monitor="val_accuracy", save_best_only=True
            ),
            keras.callbacks.TensorBoard("tensorboard"),
        ],
        validation=held_out,
        epochs=30,
        random_seed=1,
        verbose=0,
    )
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    try:
        with mlflow.start_run() as run:
            model = estimator.fit(train)
        client = mlflow.MlflowClient()
        tracked = client.get_metric_history(run.info.run_id, "val_accuracy")
        loaded = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/hvd_estimators_model")
    finally:
        mlflow.set_tracking_uri(before)

    accuracies = model.getHistory()["val_accuracy"]
    best = int(np.argmax(accuracies))
    assert len(accuracies) == best + 1 + 2 < 30
    assert {metric.step: metric.value for metric in tracked} == dict(enumerate(accuracies))
    logs = tmp_path / "experiments" / "runs" / model.getRunId() / "logs"
    board = EventAccumulator(str(logs / "validation")).Reload().Tensors("epoch_accuracy")
    shown = [float(tf.make_ndarray(event.tensor_proto)) for event in board]
    np.testing.assert_array_equal(np.float32(shown), np.float32(accuracies))

    # The best epoch's weights predict with Spark, plain Keras and MLflow.
    predictions = model.transform(held_out)
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    plain = keras.saving.load_model(logs / "best.keras")
    outputs = plain.predict(features[300:], verbose=0)
    frame = held_out.select("features").toPandas()
    for found in (
        evaluator.evaluate(predictions),
        model.evaluate(held_out)["accuracy"],
        np.mean(outputs.argmax(1) == labels[300:]),
        np.mean(loaded.predict(frame)["prediction"] == labels[300:]),
    ):
        assert found == pytest.approx(accuracies[best])
