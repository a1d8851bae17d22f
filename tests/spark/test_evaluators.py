"""Spark's evaluators on the columns that transform() adds, compared with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    MultilabelClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.sql import functions as F
from sklearn import metrics

from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.once]

ROWS = 300
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 4)).astype(np.float32)
NOISE = rng.normal(size=(ROWS, 3))


def linear(outputs: int) -> torch.nn.Linear:
    torch.manual_seed(outputs)
    return torch.nn.Linear(4, outputs)


def model(net: torch.nn.Module, **params: Any) -> TorchModel:
    return TorchModel(model=net, feature_columns=["x"], input_shapes=[[4]], **params)


def scores(net: torch.nn.Module) -> Any:
    """Return a model's outputs in this process."""
    with torch.no_grad():
        return net(torch.from_numpy(X)).double().numpy()


def softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_evaluators_match_scikit_learn(spark: Any) -> None:
    one, three, tags = linear(1), linear(3), linear(5)
    value, logits, of_tags = scores(one)[:, 0], scores(three), scores(tags)
    # Labels that the models predict correctly in most rows, but not in all.
    classes = (logits + NOISE).argmax(1)
    binary = (value + NOISE[:, 0] > 0).astype(int)
    target = value + NOISE[:, 1]
    has_tag = of_tags + rng.normal(size=of_tags.shape) > 0
    rows = zip(X.tolist(), classes.tolist(), binary.tolist(), target.tolist(), has_tag, strict=True)
    frame = spark.createDataFrame(
        [(*row[:4], [float(i) for i in np.flatnonzero(row[4])]) for row in rows],
        "x array<float>, k int, b int, t double, tags array<double>",
    )
    columns = {
        "predictionCol": "prediction",
        "probabilityCol": "probability",
        "rawPredictionCol": "rawPrediction",
        "outputs_are": "logits",
    }
    frame = frame.cache()
    many = model(three, label_columns=["k"], **columns).transform(frame).cache()
    two = model(one, label_columns=["b"], **columns).transform(frame).cache()

    by_class = MulticlassClassificationEvaluator(labelCol="k")
    predicted = logits.argmax(1)
    assert 0.5 < (predicted == classes).mean() < 1
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        classes, predicted, average="weighted"
    )
    for name, expected in {
        "accuracy": metrics.accuracy_score(classes, predicted),
        "logLoss": metrics.log_loss(classes, softmax(logits)),
        "f1": f1,
        "weightedPrecision": precision,
        "weightedRecall": recall,
    }.items():
        assert by_class.setMetricName(name).evaluate(many) == pytest.approx(expected, rel=1e-6), (
            name
        )

    of_two = BinaryClassificationEvaluator(labelCol="b", numBins=0)
    area = metrics.roc_auc_score(binary, value)
    assert 0.6 < area < 1
    assert of_two.evaluate(two) == pytest.approx(area)
    # The model's output column works as well.
    assert of_two.setRawPredictionCol("b__output").evaluate(two) == pytest.approx(area)
    of_two.setRawPredictionCol("rawPrediction").setMetricName("areaUnderPR")
    exact = metrics.precision_recall_curve(binary, value)
    assert of_two.evaluate(two) == pytest.approx(metrics.auc(exact[1], exact[0]), abs=0.01)
    by_class.setLabelCol("b").setMetricName("logLoss")
    sigmoid = 1 / (1 + np.exp(-value))
    assert by_class.evaluate(two) == pytest.approx(metrics.log_loss(binary, sigmoid))

    of_numbers = RegressionEvaluator(labelCol="t", predictionCol="b__output")
    for name, expected in {
        "rmse": metrics.root_mean_squared_error(target, value),
        "mae": metrics.mean_absolute_error(target, value),
        "r2": metrics.r2_score(target, value),
    }.items():
        assert of_numbers.setMetricName(name).evaluate(two) == pytest.approx(expected), name

    tagger = model(tags, label_columns=["tags"], output_types=["array<double>"])
    found = tagger.transform(frame).withColumn(
        "found",
        F.expr(
            "transform(filter(sequence(0, 4), i -> tags__output[i] > 0), i -> cast(i as double))"
        ),
    )
    of_sets = MultilabelClassificationEvaluator(labelCol="tags", predictionCol="found")
    for name, expected in {
        "microF1Measure": metrics.f1_score(has_tag, of_tags > 0, average="micro"),
        "hammingLoss": metrics.hamming_loss(has_tag, of_tags > 0),
        "subsetAccuracy": metrics.accuracy_score(has_tag, of_tags > 0),
    }.items():
        assert of_sets.setMetricName(name).evaluate(found) == pytest.approx(expected), name
    for held in (many, two, frame):
        held.unpersist()
