"""Class weights, compared with Keras's ``class_weight``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.exceptions import DataError, ShapeError
from hvd_estimators.keras.tensors import Field, TensorSpec
from hvd_estimators.training.row_weights import check_classes

WEIGHTS = {2: 0.25, 0: 3.0, 7: 0.0}


class Seen(keras.Model):
    """Model that records the sample weights of `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = None

    def train_step(self, data: Any) -> dict[str, Any]:
        self.weight = data[2].numpy()
        return {"loss": 0.0}


def weights_of_keras(labels: np.ndarray) -> np.ndarray:
    model = Seen()
    model.compile(run_eagerly=True)
    model.fit(
        np.zeros((len(labels), 1)),
        labels,
        class_weight=WEIGHTS,
        batch_size=len(labels),
        shuffle=False,
        verbose=0,
    )
    return np.asarray(model.weight)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 1, 2, 3, 7, 2, 9]),
        np.array([[2.0], [0.0], [1.0], [7.0]], np.float32),
        np.eye(8, dtype=np.float32)[[7, 2, 2, 0, 5]],
        np.array([True, False]),
    ],
    ids=["numbers", "floats", "one-hot", "booleans"],
)
def test_weights_equal_those_of_keras(labels: np.ndarray) -> None:
    columns = {"x": np.zeros(len(labels)), "y": labels}
    expected = weights_of_keras(np.asarray(labels, np.float32))
    spec = TensorSpec(Field("x"), Field("y"), class_weight=WEIGHTS)
    np.testing.assert_array_equal(spec.arrays(columns)[2], expected)
    traced = tf.function(lambda: spec.tensors({k: tf.constant(v) for k, v in columns.items()})[2])
    assert traced().dtype == tf.float32
    np.testing.assert_array_equal(traced(), expected)
    columns["w"] = np.linspace(1.0, 2.0, len(labels))
    both = TensorSpec(Field("x"), Field("y"), "w", WEIGHTS)
    product = expected * columns["w"].astype(np.float32)
    np.testing.assert_array_equal(both.arrays(columns)[2], product)
    tensors = both.tensors({k: tf.constant(v) for k, v in columns.items()})
    np.testing.assert_array_equal(tensors[2], product)
    # Keras validates without class weights.
    np.testing.assert_array_equal(
        both.for_validation().arrays(columns)[2], columns["w"].astype(np.float32)
    )
    assert len(spec.for_validation().arrays(columns)) == 2


def test_labels_that_are_not_classes_are_rejected() -> None:
    check_classes("y", np.array([[0.1, 0.9], [0.8, 0.2]]))  # smoothed
    check_classes("y", np.array([-1, 3]))
    with pytest.raises(DataError, match=r"class_weight: .*'y', found 0\.5.*sample_weight_col"):
        check_classes("y", np.array([[1.0], [0.5]]))
    with pytest.raises(DataError, match=r"found \[1, 0, 1\]"):
        check_classes("y", np.array([[0, 1, 0], [1, 0, 1]]))
    with pytest.raises(ShapeError, match=r"rows of shape \(3, 2\)"):
        check_classes("y", np.zeros((4, 3, 2)))
