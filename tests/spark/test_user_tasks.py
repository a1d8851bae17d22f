"""Whole tasks of users, as programs that they would write after the quick start."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import pytest
import tensorflow as tf
import torch
from PIL import Image
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import functions as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_estimators.keras import KerasEstimator
from hvd_estimators.torch import TorchEstimator, load_predictor

pytestmark = [pytest.mark.spark, pytest.mark.once]


@pytest.mark.soak
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


def decode(columns: dict[str, Any]) -> dict[str, Any]:
    """Decode PNG files."""
    pixels = [np.asarray(Image.open(io.BytesIO(file)), "float32") for file in columns["image"]]
    return {**columns, "image": np.stack(pixels) / 255}


def test_images_in_a_folder_are_classified_and_served_as_bytes(spark: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    images = random.integers(0, 200, (96, 8, 8), "uint8")
    for number, pixels in enumerate(images):
        label = number % 2
        pixels[:, 4 * label : 4 * label + 4] += 55  # one half is brighter
        file = tmp_path / "images" / str(label) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)

    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
    train = files.load(str(tmp_path / "images")).select(
        F.col("content").alias("image"),
        F.element_at(F.split("path", "/"), -2).cast("int").alias("label"),
    )
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    model = TorchEstimator(
        num_proc=2,
        store=tmp_path / "experiments",
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        loss=torch.nn.functional.cross_entropy,
        feature_cols=["image"],
        label_cols=["label"],
        column_dtypes={"label": "int64"},  # a transformation could change the label
        transformation_batch_fn=decode,
        transformation_edit_fields=[("image", "float32", (8, 8))],
        apply_transformation=True,
        batch_size=8,
        epochs=20,
        random_seed=1,
        verbose=0,
    ).fit(train)

    rows = model.transform(train).orderBy("image").collect()
    decoded = decode({"image": [row["image"] for row in rows]})["image"]
    with torch.no_grad():
        scores = model.getModel()(torch.from_numpy(decoded)).numpy()
    found = [row["label__output"].toArray() for row in rows]
    np.testing.assert_allclose(found, scores, rtol=1e-5, atol=1e-6)
    assert [row["prediction"] for row in rows] == scores.argmax(1).tolist()
    assert np.mean([row["prediction"] == row["label"] for row in rows]) > 0.9

    model.save(str(tmp_path / "model"))
    predictor = load_predictor(str(tmp_path / "model"))
    # Rows of PySpark 3.5 hold bytearrays.
    files, expected = [row["image"] for row in rows], [row["prediction"] for row in rows]
    for file in (bytearray(files[0]), bytes(files[0])):
        assert predictor.predict({"image": file})["prediction"] == expected[0]
    assert [row["prediction"] for row in predictor.predict(rows)] == expected
    pandas = train.orderBy("image").toPandas()
    for columns in ({"image": files}, pandas):
        assert list(predictor.predict(columns)["prediction"]) == expected
