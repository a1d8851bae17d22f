"""Layers that add or rewrite variables, and functional classes, train as in one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_reference import pooled_estimator
from reference import WIDTH, write_rows

from hvd_estimators.checkpoints import load_checkpoint

pytestmark = pytest.mark.integration


@keras.saving.register_keras_serializable("test_keras_rewritten")
def signs(x: Any) -> Any:
    return ops.cast(x > 0, "int32")


def with_adapters() -> keras.Model:
    """Return a model with LoRA on all layers that support it, also quantized, and int8 and int4."""
    keras.utils.set_random_seed(5)
    x = keras.Input((WIDTH,))
    dense = layers.Dense(8, activation="tanh")
    einsum = layers.EinsumDense("abc,cd->abd", output_shape=(2, 3), bias_axes="d")
    embedding = layers.Embedding(2, 3)
    both, int8, int4 = layers.Dense(6), layers.Dense(4), layers.Dense(4)
    number = layers.Flatten()(embedding(layers.Lambda(signs, output_shape=(WIDTH,))(x)))
    y = layers.Flatten()(einsum(layers.Reshape((2, 4))(dense(x))))
    y = int4(int8(both(layers.Concatenate()([y, number]))))
    model = keras.Model(x, layers.Dense(1)(y))
    both.quantize("int8")
    int8.quantize("int8")
    int4.quantize("int4")
    for layer in (dense, einsum, embedding, both):
        layer.enable_lora(2)
    # The config does not record that a single variable is frozen.
    dense.bias.trainable = False
    return model


def with_backbone() -> keras.Model:
    """Return a KerasHub backbone, a functional class of an importable module, with a head."""
    import keras_hub

    keras.utils.set_random_seed(6)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        max_sequence_length=WIDTH,
        dropout=0.0,
    )
    x = keras.Input((WIDTH,))
    tokens = layers.Lambda(signs, output_shape=(WIDTH,))(x)
    y = backbone({"token_ids": tokens, "padding_mask": ops.ones_like(tokens)})
    return keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(y)))


VARIANTS: dict[str, Callable[[], keras.Model]] = {"adapters": with_adapters}
if importlib.util.find_spec("keras_hub") is not None:
    VARIANTS["backbone"] = with_backbone
MARKS = {"backbone": pytest.mark.soak}


def assert_same_variables(found: keras.Model, expected: keras.Model, tolerance: float) -> None:
    assert len(found.variables) == len(expected.variables)
    for a, b in zip(found.variables, expected.variables, strict=True):
        assert a.trainable == b.trainable, b.path
        assert a.dtype == b.dtype, b.path
        np.testing.assert_allclose(
            a.numpy(), b.numpy(), rtol=tolerance, atol=tolerance / 10, err_msg=b.path
        )


@pytest.mark.parametrize("kind", [pytest.param(k, marks=MARKS.get(k, ())) for k in VARIANTS])
def test_ranks_train_resume_and_save_as_one_process(store: Any, kind: str) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    make_model = VARIANTS[kind]

    def fit(epochs: int) -> Any:
        return pooled_estimator(
            store,
            2,
            model=make_model(),
            optimizer=keras.optimizers.SGD(0.02, momentum=0.5),
            batch_size=16,
            epochs=epochs,
            run_id=kind,
        ).fit_on_parquet()

    first = fit(1)
    fitted = fit(2)
    alone = make_model()
    alone.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse")
    before = [variable.numpy() for variable in alone.trainable_variables]
    # The ranks read contiguous halves, 16 rows of each for a step.
    order = np.concatenate([np.r_[i : i + 16, 32 + i : 48 + i] for i in (0, 16)])
    rows, label = columns["features"][order], columns["label"][order, None]
    for result in (first, fitted):
        alone.fit(rows, label, batch_size=32, epochs=1, shuffle=False, verbose=0)
        assert_same_variables(result.getModel(), alone, 1e-4)
    moved = [
        float(np.abs(variable.numpy() - value).max())
        for variable, value in zip(alone.trainable_variables, before, strict=True)
    ]
    assert min(moved) > 0, moved
    trained = fitted.getModel()
    saved = fitted._load_params({"model": fitted._dump_param("model", trained)})["model"]
    assert_same_variables(saved, trained, 0)
    document, load = fitted._make_predictor()
    (found,) = load(document)([rows])
    np.testing.assert_allclose(found, alone.predict(rows, verbose=0), rtol=1e-3, atol=1e-4)
    checkpoint = load_checkpoint(store, run_id=kind).content
    for value, variable in zip(checkpoint.values(), trained.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy(), err_msg=variable.path)
