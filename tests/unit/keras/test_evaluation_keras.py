"""`KerasModel`'s evaluator: metric states of partitions merge to the values over all rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import KerasModel
from hvd_estimators.keras.tensors import Field

ROWS = 23


class Ones(keras.metrics.Metric):
    """The number of labels above a half."""

    def __init__(self, name: str = "ones", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_true > 0.5, "float32")))

    def result(self) -> Any:
        return self.count


class Largest(Ones):
    """The largest error, which the states of partitions do not add up to."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.count.assign(keras.ops.maximum(self.count, error))


def make_columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "y": rng.integers(0, 2, ROWS).astype(np.float32),
        "z": rng.normal(size=ROWS).astype(np.float32),
        "w": rng.uniform(0.5, 2.0, ROWS).astype(np.float32),
    }


def make_model(net: keras.Model, **params: Any) -> KerasModel:
    return KerasModel(
        **{
            "model": net,
            "feature_columns": ["x"],
            "label_columns": ["y", "z"],
            "_labels": [Field("y", (1,)), Field("z", (1,))],
            "custom_objects": {"Ones": Ones},
            **params,
        }
    )


def evaluate(
    model: KerasModel, columns: dict[str, Any], cuts: Sequence[int] = (0, 4, 4, 15, ROWS)
) -> tuple[int, dict[str, Any]]:
    """Evaluate partitions of the rows, in batches of five, one of them empty."""
    document, load, combine = model._make_evaluator()
    evaluator = load(document)
    states = []
    for start, stop in itertools.pairwise(cuts):
        sums = evaluator.start()
        for first in range(start, stop, 5):
            rows = slice(first, min(first + 5, stop))
            sums.add({name: column[rows] for name, column in columns.items()})
        states.append(sums.state())
    return combine(states)


def two_outputs(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), name="x")
    outputs = [
        keras.layers.Dense(1, "sigmoid", name="first")(inputs),
        keras.layers.Dense(1, name="second")(inputs),
    ]
    model = keras.Model(inputs, outputs)
    model.compile("adam", **compiled)
    return model


def test_several_losses_weights_and_metrics_equal_keras_over_one_batch() -> None:
    columns = make_columns()
    net = two_outputs(
        loss=["binary_crossentropy", "mse"],
        loss_weights=[0.3, 2.0],
        metrics=[[keras.metrics.AUC(name="auc"), "accuracy"], ["mae", Ones()]],
        weighted_metrics=[[], ["mse"]],
    )
    model = make_model(net, sample_weight_col="w")
    rows, values = evaluate(model, columns)
    labels = [columns["y"].reshape(-1, 1), columns["z"].reshape(-1, 1)]
    expected = net.evaluate(
        columns["x"],
        labels,
        sample_weight=[columns["w"]] * 2,
        batch_size=ROWS,
        verbose=0,
        return_dict=True,
    )
    assert rows == ROWS
    assert values == pytest.approx(expected, rel=1e-5)
    assert evaluate(model, columns, cuts=(0, 0))[0] == 0


def test_metrics_that_do_not_add_up_are_rejected_for_several_partitions() -> None:
    columns = make_columns()
    net = two_outputs(loss="mse", metrics=[["mae"], [Largest("largest")]])
    model = make_model(net, custom_objects={"Largest": Largest})
    with pytest.raises(ParamError, match=r"'largest'.*partitions.*evaluate\(df\.coalesce\(1\)\)"):
        evaluate(model, columns)
    _, values = evaluate(model, columns, cuts=(0, ROWS))
    errors = np.abs(net(columns["x"])[1].numpy().reshape(-1) - columns["z"])
    assert values["second_largest"] == pytest.approx(float(errors.max()), rel=1e-5)


def test_masked_targets_count_by_the_mask() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 5, (ROWS, 4)) * (rng.uniform(size=(ROWS, 4)) < 0.6)
    columns = {"x": tokens, "y": rng.normal(size=(ROWS, 4)).astype(np.float32)}
    columns["x"][:2] = 0
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), dtype="int32", name="x")
    hidden = keras.layers.Embedding(5, 3, mask_zero=True)(inputs)
    net = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    net.compile("adam", loss="mse")
    model = make_model(net, label_columns=["y"], _labels=Field("y", (4, 1)))
    _, values = evaluate(model, columns)
    outputs = net(columns["x"])[..., 0].numpy()
    mask = columns["x"] != 0
    expected = (((outputs - columns["y"]) ** 2) * mask).sum() / mask.sum()
    assert values == {"loss": pytest.approx(float(expected), rel=1e-5)}


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Model):
    """A model that measures its loss in its own test step, without labels."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(3)
        self.measured = keras.metrics.Mean("distance")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    @property
    def metrics(self) -> list[Any]:
        return [self.measured]

    def train_step(self, data: Any) -> Any:
        return self.test_step(data)

    def test_step(self, data: Any) -> Any:
        distance = tf.reduce_mean((self(data) - data) ** 2)
        self.measured.update_state(distance, sample_weight=tf.shape(data)[0])
        return {"distance": self.measured.result()}


def test_a_models_own_test_step_gets_its_inputs_alone() -> None:
    columns = make_columns()
    keras.utils.set_random_seed(1)
    net = OwnStep()
    net(columns["x"])
    net.compile("adam")
    model = make_model(net, label_columns=[], _labels=None)
    _, values = evaluate(model, columns)
    expected = float(np.mean((net(columns["x"]).numpy() - columns["x"]) ** 2))
    assert values == {"distance": pytest.approx(expected, rel=1e-5)}


@keras.saving.register_keras_serializable("tests")
class WithoutMetrics(OwnStep):
    """A model whose test step updates no metric."""

    @property
    def metrics(self) -> list[Any]:
        return super(OwnStep, self).metrics

    def test_step(self, data: Any) -> Any:
        return {"loss": tf.reduce_mean(self(data))}


def test_models_without_a_measured_value_are_rejected() -> None:
    columns = make_columns()
    net = WithoutMetrics()
    net(columns["x"])
    net.compile("adam")
    message = r"model: its test_step\(\) updates no metric.*Update a keras\.metrics"
    with pytest.raises(ParamError, match=message):
        evaluate(make_model(net, label_columns=[], _labels=None), columns)


def test_what_is_not_known_is_named() -> None:
    net = two_outputs(loss="mse")
    with pytest.raises(ParamError, match="model: expected a fitted model"):
        make_model(net, _labels=None)._make_evaluator()
    inputs = keras.Input((3,))
    with pytest.raises(ParamError, match="model: expected a compiled model"):
        make_model(keras.Model(inputs, keras.layers.Dense(1)(inputs)))._make_evaluator()
