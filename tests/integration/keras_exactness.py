"""Cells of the matrix of exactness in Keras, on any backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from exactness import (
    CLASS_WEIGHTS,
    CLASSES,
    CLIP,
    HIDDEN,
    KINDS,
    LENGTH,
    MOMENTUM,
    OUT,
    PADDING,
    SITUATIONS,
    WIDTH,
    assert_as_alone,
    cells,
    settings,
    start_weights,
)
from fewer_ranks import ThreeShards

from hvd_estimators.keras import KerasEstimator

ops: Any = keras.ops


class KerasOfThreeShards(ThreeShards, KerasEstimator):
    """Run started with 3 ranks."""


class Counted(keras.losses.Loss):
    """Loss that states its denominator."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        positive = ops.cast(y_true > 0, y_pred.dtype)
        errors = ops.square(y_pred - y_true) * positive
        return ops.divide_no_nan(ops.sum(errors), ops.sum(positive))

    def denominator(self, y_true: Any, y_pred: Any) -> Any:
        return y_true > 0


class Joint(keras.Model):
    """Model with one loss of inputs and outputs, without labels."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        error = ops.sum(ops.square(y_pred[:, :WIDTH] - x), axis=1)
        return ops.mean(error) + 0.1 * ops.mean(ops.sum(ops.square(y_pred[:, WIDTH:]), axis=1))


class OwnStep(keras.Model):
    """Model with the step of Keras's guides for its backend."""

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        variables = self.trainable_variables
        if keras.backend.backend() == "torch":
            import torch

            self.zero_grad()
            loss = ops.mean(ops.square(self(x, training=True) - ops.convert_to_tensor(y)))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            return {"loss": loss}
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Cropped(keras.layers.Layer):
    """Scores of as many tokens as a batch has."""

    def call(self, scores: Any, tokens: Any) -> Any:
        return scores[:, : ops.shape(tokens)[1]]


class OfWords(keras.Model):
    """Model whose loss compares its outputs with an input that is padded."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        return _of_classes(ignore_class=PADDING)(x["words"], y_pred)


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad words to the longest row, and mark them."""
    length = max(len(row["words"]) for row in rows)
    words = np.full((len(rows), length), PADDING)
    for padded, row in zip(words, rows, strict=True):
        padded[: len(row["words"])] = row["words"]
    features = np.stack([row["features"] for row in rows])
    return {"is_word": words != PADDING, "words": words, "features": features}


def _of_classes(reduction: str = "sum_over_batch_size", **options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction, **options)


def params_of(kind: str) -> dict[str, Any]:
    """Return the params of a kind; made anew, because models keep their losses."""
    found: dict[str, dict[str, Any]] = {
        "mean": {"loss": "mse"},
        "sum": {"loss": _of_classes("sum")},
        "class and sample weights": {
            "loss": _of_classes(),
            "class_weight": CLASS_WEIGHTS,
            "sample_weight_col": "weight",
        },
        "weighted mean": {
            "loss": _of_classes("mean_with_sample_weight"),
            "class_weight": CLASS_WEIGHTS,
        },
        "masked": {"loss": _of_classes(ignore_class=PADDING)},
        "masked, of a collate_fn": {
            "loss": _of_classes(ignore_class=PADDING),
            "collate_fn": collate,
        },
        "masked, of padding": {
            "loss": None,
            "outputs": 0,
            "padding": {"words": PADDING},
            "masks": True,
            "feature_cols": ["features", "words"],
        },
        "counted": {"loss": Counted()},
        "sample weights": {"loss": "mse", "sample_weight_col": "weight"},
        "joint": {"loss": None, "outputs": 0},
        "own step": {"loss": None},
    }
    return found[kind]


LACKING = ("joint sum", "own step with a weighted mean")
CELLS = [
    (kind, situation)
    for kind, situation in cells(kind for kind in KINDS if kind not in LACKING)
    # With several batches in a step, the sum is an error.
    if kind != "sum" or situation in ("2 ranks", "empty batch")
]


def make_model(kind: str) -> keras.Model:
    x = keras.Input((WIDTH,), name="features")
    out = keras.layers.Dense(OUT)(keras.layers.Dense(HIDDEN, activation="tanh")(x))
    inputs: Any = x
    if kind.startswith("masked"):
        out = keras.layers.Reshape((LENGTH, CLASSES))(out)
    if kind == "masked, of a collate_fn":
        inputs = {"features": x, "is_word": keras.Input((None,), dtype="bool", name="is_word")}
        out = Cropped()(out, inputs["is_word"])
    if kind == "masked, of padding":
        words = keras.Input((None,), dtype="int64", name="words")
        mask = keras.Input((None,), dtype="bool", name="words_mask")
        inputs = {"features": x, "words": words, "words_mask": mask}
        out = Cropped()(out, mask)
    kinds = {"joint": Joint, "own step": OwnStep, "masked, of padding": OfWords}
    model = kinds.get(kind, keras.Model)(inputs, out)
    model.set_weights(start_weights())
    return model


def check(
    backend: Any, store: Any, paths: Any, kind: str, situation: str, collectives: str
) -> None:
    """Train a cell, and compare with one process."""
    clip = {"global_clipnorm": CLIP} if KINDS[kind].own_step else {}
    estimator = KerasOfThreeShards if SITUATIONS[situation].shards == 3 else KerasEstimator
    model = estimator(
        **{**settings(backend, store, kind, situation, collectives), **params_of(kind)},
        model=make_model(kind),
        optimizer=keras.optimizers.SGD(KINDS[kind].rate, MOMENTUM, **clip),
    ).fit_on_parquet(paths[SITUATIONS[situation].rows])
    weights = [np.asarray(weight) for weight in model.getModel().get_weights()]
    assert_as_alone(weights, backend.results, kind, situation)
