"""Kinds of models, trained on ranks and in one process of Keras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from parquet_files import write_columns
from sklearn.datasets import load_digits

from hvd_estimators.exceptions import ShapeError

pytestmark = pytest.mark.integration


def conv_net() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


@pytest.mark.soak
def test_digits_match_one_process_and_load_without_horovod(store: Any, tmp_path: Path) -> None:
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1400], order[1400:]
    write_columns(
        store.get_train_data_path(),
        {"pixels": images[train], "digit": labels[train]},
        row_group_size=200,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fitted = pooled_estimator(
        store,
        2,
        model=conv_net(),
        optimizer=keras.optimizers.Adam(0.005),
        loss=loss,
        metrics=["accuracy"],
        feature_cols=["pixels"],
        label_cols=["digit"],
        batch_size=32,
        epochs=8,
        shuffle=True,
        run_id="digits",
    ).fit_on_parquet()
    model = fitted.getModel()
    alone = conv_net()
    alone.compile(keras.optimizers.Adam(0.005), loss)
    shaped = images.reshape(-1, 8, 8, 1)
    alone.fit(shaped[train], labels[train], batch_size=64, epochs=8, verbose=0)
    found, expected = (
        (net.predict(shaped[test], verbose=0).argmax(axis=1) == labels[test]).mean()
        for net in (model, alone)
    )
    assert found > expected - 0.01
    assert fitted.getHistory()["accuracy"][-1] > 0.97

    # A saved model contains a plain .keras file.
    saved = tmp_path / "digits.keras"
    saved.write_bytes(fitted._extra_files()["model.keras"])
    np.save(tmp_path / "images.npy", shaped[test])
    script = (
        "import sys\n"
        "sys.modules['horovod'] = sys.modules['hvd_estimators'] = sys.modules['pyspark'] = None\n"
        "import keras, numpy as np\n"
        f"model = keras.saving.load_model({str(saved)!r})\n"
        "assert type(model.optimizer) is keras.optimizers.Adam\n"
        "assert abs(float(model.optimizer.learning_rate) - 0.005) < 1e-9\n"
        f"images = np.load({str(tmp_path / 'images.npy')!r})\n"
        f"np.save({str(tmp_path / 'out.npy')!r}, model.predict(images, verbose=0))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    np.testing.assert_allclose(
        np.load(tmp_path / "out.npy"), model.predict(shaped[test], verbose=0), atol=1e-5
    )


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


def test_mismatched_shapes_are_rejected_and_custom_train_steps_run(store: Any) -> None:
    rng = np.random.default_rng(0)
    write_columns(
        store.get_train_data_path(),
        {"x": rng.normal(size=(40, 3)), "y": rng.normal(size=40)},
        row_group_size=200,
    )

    def fit(**params: Any) -> Any:
        given = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 20, **params}
        return pooled_estimator(store, 1, **given).fit_on_parquet()

    def net(inputs: int, outputs: int) -> keras.Model:
        return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(outputs)])

    with pytest.raises(ShapeError, match=r"'x' has shape \(3,\), and the model's input.*\(4,\)"):
        fit(model=net(4, 1))
    with pytest.raises(ShapeError, match=r"element by element.*output \(20, 2\), label \(20, 1\)"):
        fit(model=net(3, 2))
    with pytest.raises(ShapeError, match="1 outputs, and there are 2 label"):
        fit(model=net(3, 1), label_cols=["y", "x"])
    with pytest.raises(ShapeError, match=r"1 inputs.*2 feature columns.*VectorAssembler"):
        fit(model=net(3, 1), feature_cols=["x", "y"])

    class OwnStep(keras.Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"own": loss}

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            # As in keras-hub, whose fit() preprocesses text.
            raise AssertionError("the readers have prepared the data")

    fitted = fit(model=OwnStep(), loss=None)
    assert fitted.getHistory()["own"][0] > 0
