"""Keras with early stopping, the best model, TensorBoard and MLflow, as a user would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.sql import functions as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from hvd_estimators.keras import KerasEstimator

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.integration]

COLUMNS = ["age", "my income", "visits.week"]


@pytest.mark.soak
def test_a_stopped_fit_returns_and_logs_its_best_model(
    spark: Any, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DFS_TMP", str(tmp_path / "files"))
    rng = np.random.default_rng(0)
    people = pd.DataFrame(rng.normal(size=(600, 3)), columns=COLUMNS)
    people["churn"] = (people.sum(axis=1) + rng.normal(size=600) > 0).astype(int)
    frame = spark.createDataFrame(people)
    train, test = frame.where(F.col("age") < 1), frame.where(F.col("age") >= 1)

    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(16, "relu")(keras.layers.BatchNormalization()(inputs))
    best = tmp_path / "best.keras"
    estimator = KerasEstimator(
        backend=backend,
        store=str(tmp_path / "store"),
        model=keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden)),
        optimizer=keras.optimizers.Adam(0.05),
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
        feature_cols=[COLUMNS],
        label_cols=["churn"],
        validation=0.3,
        batch_size=16,
        epochs=20,
        random_seed=1,
        verbose=0,
        callbacks=[
            keras.callbacks.EarlyStopping(
                "val_auc", patience=2, mode="max", restore_best_weights=True
            ),
            keras.callbacks.ModelCheckpoint(str(best), "val_auc", mode="max", save_best_only=True),
            keras.callbacks.TensorBoard(),
        ],
    )
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    try:
        with mlflow.start_run() as run:
            model = estimator.fit(train)
        found = mlflow.MlflowClient().get_run(run.info.run_id).data
        served = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/hvd_estimators_model")
    finally:
        mlflow.set_tracking_uri(before)

    values = model.summary.values("auc", "validation")
    assert model.summary.stopped
    assert len(values) < 20
    assert model.summary.best_epoch == int(np.argmax(values)) == len(values) - 3
    rows = test.toPandas()
    expected = keras.models.load_model(best).predict(rows[COLUMNS].to_numpy(), verbose=0)[:, 0]
    predicted = model.transform(test)
    np.testing.assert_allclose(predicted.toPandas()["churn__output"], expected, atol=1e-6)
    evaluator = BinaryClassificationEvaluator(labelCol="churn", rawPredictionCol="churn__output")
    exact = keras.metrics.AUC(num_thresholds=20_000)
    exact.update_state(rows["churn"], expected)
    assert evaluator.evaluate(predicted) == pytest.approx(float(exact.result()), abs=1e-3)

    assert found.metrics["val_auc"] == pytest.approx(values[-1])
    assert [column.name for column in served.metadata.signature.inputs.inputs] == COLUMNS
    made = served.predict(rows[COLUMNS])
    np.testing.assert_allclose(made["churn__output"], expected, atol=1e-6)
    logs = Path(estimator.getStore().get_logs_path(model.getRunId()), "validation")
    events = EventAccumulator(str(logs)).Reload()
    shown = [float(make_ndarray(event.tensor_proto)) for event in events.Tensors("epoch_auc")]
    np.testing.assert_allclose(shown, values, rtol=1e-5)
