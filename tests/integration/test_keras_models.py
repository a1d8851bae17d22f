"""A model of two inputs, two outputs and custom objects, on ranks and in one process of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from parquet_files import write_columns

pytestmark = pytest.mark.integration


class Scaled(keras.layers.Layer):
    """Custom layer with a weight."""

    def __init__(self, start: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = start

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(
            shape=(shape[-1],), initializer=keras.initializers.Constant(self.start)
        )

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "start": self.start}


class Quartic(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean((y_true - y_pred) ** 4, axis=-1)


def bent(x: Any) -> Any:
    return keras.ops.where(x > 0, x, 0.1 * x)


class Largest(keras.metrics.Metric):
    """Metric that counts outputs above one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 1.0, "float32")))

    def result(self) -> Any:
        return self.count.value


class TwoTowers(keras.Model):
    """Subclassed and unbuilt model with two inputs and two outputs."""

    def __init__(self, units: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.embedding = keras.layers.Embedding(5, 3)
        self.hidden = keras.layers.Dense(units, activation=bent)
        self.scaled = Scaled(0.5)
        self.number = keras.layers.Dense(1)
        self.vector = keras.layers.Dense(2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        kind, wide = inputs
        kind = keras.ops.squeeze(self.embedding(kind), axis=1)
        hidden = self.scaled(self.hidden(keras.ops.concatenate([kind, wide], axis=1)))
        return self.number(hidden), self.vector(hidden)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def functional_towers() -> keras.Model:
    keras.utils.set_random_seed(3)
    kind = keras.Input((1,), dtype="int32", name="kind")
    wide = keras.Input((3,), name="wide")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(kind))
    hidden = keras.layers.Dense(4, activation=bent)(keras.layers.Concatenate()([embedded, wide]))
    hidden = Scaled(0.5)(hidden)
    outputs = {
        "number": keras.layers.Dense(1, name="number")(hidden),
        "vector": keras.layers.Dense(2, name="vector")(hidden),
    }
    return keras.Model({"kind": kind, "wide": wide}, outputs)


@pytest.mark.parametrize("subclassed", [False, True])
def test_two_inputs_and_outputs_with_custom_objects(store: Any, subclassed: bool) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "kind": rng.integers(0, 5, 60).astype(np.float64),
        "wide": rng.normal(size=(60, 3)).astype(np.float32),
        "number": rng.normal(size=60),
        "vector": rng.normal(size=(60, 2)).astype(np.float32),
    }
    write_columns(store.get_train_data_path(), columns, row_group_size=200)
    keras.utils.set_random_seed(3)
    model = TwoTowers() if subclassed else functional_towers()
    # Dict inputs are matched by name, in any order.
    features = ["kind", "wide"] if subclassed else ["wide", "kind"]
    estimator = pooled_estimator(
        store,
        2,
        model=model,
        optimizer=keras.optimizers.SGD(0.05),
        loss=[Quartic(), "mae"] if subclassed else {"number": Quartic(), "vector": "mae"},
        loss_weights=[0.5, 2.0],
        metrics=[[Largest()], ["mse"]] if subclassed else {"number": Largest(), "vector": "mse"},
        feature_cols=features,
        label_cols=["number", "vector"],
        batch_size=30,
    )
    if not subclassed:
        estimator.setLoss([Quartic(), "mae"]).setMetrics({"number": [Largest()], "vector": ["mse"]})
    fitted = estimator.fit_on_parquet()
    if subclassed:
        assert not model.built
    trained = fitted.getModel()
    history = fitted.getHistory()
    assert history["vector_mse" if not subclassed else "mse"][0] > 0
    kind = columns["kind"][:, None]
    wide = columns["wide"]
    x = (kind, wide) if subclassed else {"kind": kind, "wide": wide}
    if not subclassed:
        alone = functional_towers()
        alone.compile(
            keras.optimizers.SGD(0.05),
            {"number": Quartic(), "vector": "mae"},
            loss_weights={"number": 0.5, "vector": 2.0},
        )
        y = {"number": columns["number"][:, None], "vector": columns["vector"]}
        alone.fit(x, y, batch_size=60, verbose=0)
        assert_same_weights(trained, alone)
    assert len(keras.tree.flatten(trained(x))) == 2
