"""Keras objects sent to processes that lack their classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators.exceptions import DependencyError
from hvd_estimators.keras.backend import require_backend
from hvd_estimators.keras.compile_args import CompileSettings, optimizer_state
from hvd_estimators.keras.custom_objects import Recipe
from hvd_estimators.keras.serialization import dump, load, load_model, model_payload


@keras.saving.register_keras_serializable("tests")
class Doubling(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return 2 * x


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, step: Any) -> Any:
        return self.start * 0.5 ** keras.ops.cast(step, "float32")

    def get_config(self) -> dict[str, Any]:
        return {"start": self.start}


def raised(x: Any) -> Any:
    return x + 1


def shifted(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean((y_true - y_pred + 1) ** 2, axis=-1)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((2,)), Doubling(), keras.layers.Dense(1, activation=raised)]
    )
    model.compile(keras.optimizers.Adam(Halving(0.5)), loss=shifted, metrics=["mae"])
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    return model


def test_models_load_compiled_in_a_process_without_their_classes(tmp_path: Path) -> None:
    model = make_model()
    (tmp_path / "model.pkl").write_bytes(dump(model))
    script = (
        "import numpy as np\n"
        "from hvd_estimators.keras.serialization import load\n"
        f"model = load(open({str(tmp_path / 'model.pkl')!r}, 'rb').read())\n"
        "model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)\n"
        "print(int(model.optimizer.iterations), *np.ravel(model.get_weights()[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    iterations, *weights = done.stdout.split()[-3:]
    # Another step of the same optimizer, with its slots.
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert iterations == "2"
    np.testing.assert_allclose(
        [float(weight) for weight in weights], np.ravel(model.get_weights()[0]), rtol=1e-5
    )


def test_a_model_always_has_the_same_bytes() -> None:
    model = make_model()
    assert model_payload(model) == model_payload(model)


def test_an_optimizers_state_is_restored_for_other_variables() -> None:
    model = make_model()
    recipe, state = Recipe.of(model.optimizer), optimizer_state(model.optimizer)
    other = make_model()
    CompileSettings(recipe, state, {"loss": "mse"}, {}, ["y"]).apply(other, None)
    assert other.optimizer.learning_rate == model.optimizer.learning_rate
    for a, b in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_errors_name_an_unsupported_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    require_backend()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(
        DependencyError, match=r"'jax'.*KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch"
    ):
        require_backend()


class Layered(keras.Model):
    """Model that creates its layers in its constructor, with the global policy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(3)
        self.inner = keras.Sequential([keras.layers.Dense(2)])
        self.last = keras.layers.Dense(1, dtype="float32")

    def call(self, x: Any) -> Any:
        return self.last(self.inner(self.first(x)))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_layers_keep_the_global_dtype_policy(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        model = Layered()
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        documents = [dump(model), model_payload(model)]
    finally:
        keras.config.set_dtype_policy("float32")
    for copy in (load(documents[0]), load_model(documents[1])):
        assert copy.first.dtype_policy.name == policy
        assert copy.inner.layers[0].dtype_policy.name == policy
        assert copy.last.dtype_policy.name == "float32"
        assert [v.dtype for v in copy.variables] == [v.dtype for v in model.variables]
        np.testing.assert_array_equal(
            copy.predict(np.ones((1, 2)), verbose=0), model.predict(np.ones((1, 2)), verbose=0)
        )
    assert type(load(documents[0]).optimizer) is type(model.optimizer)
    assert keras.config.dtype_policy().name == "float32"


def test_functions_of_keras_ops_are_restored() -> None:
    """Keras writes their names, but cannot look them up."""
    x = keras.Input((3,))
    output = keras.layers.Dense(2, activation=keras.ops.square)(x)
    output = keras.layers.Lambda(keras.ops.sum, arguments={"axis": 1})(output)
    model = keras.Model(x, keras.layers.Activation(keras.ops.negative)(output))
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = load_model(model_payload(model))(rows)
    kernel, bias = model.layers[1].get_weights()
    np.testing.assert_allclose(found, -((rows @ kernel + bias) ** 2).sum(1), rtol=1e-5)


def make_layers() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    rows = keras.layers.Reshape((4, 1))(keras.layers.BatchNormalization()(inputs))
    of_rnn = keras.layers.Bidirectional(keras.layers.GRU(3))(rows)
    attended = keras.layers.MultiHeadAttention(2, 3)(rows, rows)
    image = keras.layers.Conv2D(3, 2, padding="same")(keras.layers.Reshape((2, 2, 1))(inputs))
    parts = [of_rnn, keras.layers.Flatten()(attended), keras.layers.Flatten()(image)]
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))


def predictions(model: keras.Model, rows: Any) -> Any:
    return keras.ops.convert_to_numpy(model(rows))


_OTHER_BACKEND = """
import sys
from pathlib import Path
import keras, numpy as np
from hvd_estimators.keras.serialization import dump, load
assert keras.backend.backend() == "torch"
for path in Path(sys.argv[1]).glob("*.model"):
    model = load(path.read_bytes())
    rows = np.load(path.with_suffix(".npy"))
    np.save(path.with_suffix(".npy"), keras.ops.convert_to_numpy(model(rows)))
    path.write_bytes(dump(model))
"""


def test_models_and_optimizers_load_on_the_other_backend(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {width: rng.normal(size=(5, width)).astype(np.float32) for width in (2, 4)}
    models = {2: make_model(), 4: make_layers()}
    for width, model in models.items():
        (tmp_path / f"{width}.model").write_bytes(dump(model))
        np.save(tmp_path / f"{width}.npy", rows[width])
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_BACKEND, str(tmp_path)],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    copies = {width: load((tmp_path / f"{width}.model").read_bytes()) for width in models}
    for width, model in models.items():
        expected = predictions(model, rows[width])
        for found in (np.load(tmp_path / f"{width}.npy"), predictions(copies[width], rows[width])):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    states = [[v.numpy() for v in each.optimizer.variables] for each in (models[2], copies[2])]
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)
