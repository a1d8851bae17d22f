"""Metrics over ranks equal those of one process, or are rejected."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.metrics import check_metrics


class Largest(keras.metrics.Metric):
    """The largest output."""

    def __init__(self, aggregation: str = "sum", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.most = self.add_variable((), "zeros", aggregation=aggregation, name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.most.value


class Smallest(Largest):
    """The smallest output; starts with a large number."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.minimum(self.most, keras.ops.min(y_pred)))

    def reset_state(self) -> None:
        self.most.assign(1e9)


class KeptMean(Largest):
    """Mean metric whose state is the mean itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(1.0)
        self.most.assign_add((keras.ops.mean(y_pred) - self.most) / self.seen)


class Counted(Largest):
    """Count of outputs above a half; counts can be added."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 0.5, "float32")))


def of_the_batch(y_true: Any, y_pred: Any) -> Any:
    """Return one number per batch, which Keras averages over batches."""
    return keras.ops.sqrt(keras.ops.mean((y_true - y_pred) ** 2))


def model_with(metrics: list[Any]) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=metrics)
    return model


def check(metrics: list[Any], rows: int = 5) -> None:
    # Inputs, labels and outputs are zeros.
    zeros = np.zeros((rows, 1), np.float32)
    check_metrics(model_with(metrics), np.zeros((rows, 2)), zeros, zeros)


@pytest.mark.parametrize("metric", [Largest(), Smallest(), KeptMean()])
def test_states_that_cannot_be_added_are_rejected(metric: Any) -> None:
    with pytest.raises(ParamError, match=rf"'{metric.name}'.*sums and counts.*aggregation='mean'"):
        check(["mae", metric])


def test_states_that_can_be_added_or_averaged_are_accepted() -> None:
    check([Counted(), of_the_batch, Largest(aggregation="mean"), "mae"])
    check([Largest()], rows=1)


def test_metrics_that_fail_on_the_driver_are_left_to_the_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(Largest):
        def update_state(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("only there")

    check([Fails()])
    assert "only there" in caplog.text


def keras_metrics() -> list[keras.metrics.Metric]:
    """Return each of Keras's metrics, for labels of two classes and outputs in [0, 1]."""
    given: dict[str, dict[str, Any]] = {
        "MeanIoU": {"num_classes": 2},
        "IoU": {"num_classes": 2, "target_class_ids": [0]},
        "BinaryIoU": {},
        "OneHotIoU": {"num_classes": 2, "target_class_ids": [1]},
        "OneHotMeanIoU": {"num_classes": 2},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
        "PrecisionAtRecall": {"recall": 0.5},
        "RecallAtPrecision": {"precision": 0.5},
    }
    abstract = {"Metric", "Mean", "Sum", "MeanMetricWrapper"}
    sparse = {"SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"}
    sparse |= {"SparseTopKCategoricalAccuracy"}
    kinds = {
        name: kind
        for name, kind in vars(keras.metrics).items()
        if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)
    }
    return [
        kind(**given.get(name, {})) for name, kind in kinds.items() if name not in abstract | sparse
    ]


@pytest.mark.parametrize("metric", keras_metrics(), ids=lambda metric: type(metric).__name__)
def test_states_of_keras_metrics_can_be_added(metric: keras.metrics.Metric) -> None:
    rng = np.random.default_rng(0)
    # One-hot labels of the two classes.
    labels = np.eye(2, dtype=np.float32)[rng.integers(0, 2, 40)]
    outputs = rng.uniform(0.05, 0.95, (40, 2)).astype(np.float32)
    if type(metric).__name__ in ("MeanIoU", "IoU"):
        outputs = np.round(outputs)
    states = []
    for rows in (slice(0, 25), slice(25, 40)):
        metric.reset_state()
        metric.update_state(labels[rows], outputs[rows])
        states.append([v.numpy() for v in metric.variables])
    metric.reset_state()
    metric.update_state(labels, outputs)
    expected = np.asarray(metric.result())
    assert all(variable.aggregation == "sum" for variable in metric.variables)
    for variable, a, b in zip(metric.variables, *states, strict=True):
        variable.assign(a + b)
    np.testing.assert_allclose(np.asarray(metric.result()), expected, rtol=1e-5)
