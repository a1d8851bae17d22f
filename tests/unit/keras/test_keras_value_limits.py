"""Labels that are no classes in training, and unknown ids in predictions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from backends import InProcessBackend
from parquet_files import write_columns

from hvd_estimators.exceptions import DataError, PredictionError, ShapeError
from hvd_estimators.keras import KerasEstimator, KerasModel


def make_net() -> keras.Model:
    inputs = keras.Input((1,), dtype="int64", name="kind")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))


@pytest.mark.parametrize(
    ("label", "error", "message"),
    [
        ([1, 2, 3], ShapeError, r"(?s)The loss cannot take .*label value of 3 .*outside"),
        ([0] * 39 + [-1], DataError, r"label holds -1; the model's 3 outputs are classes 0 to 2"),
    ],
)
def test_numbers_out_of_range_are_found_before_training(
    store: Any, label: Any, error: type[Exception], message: str
) -> None:
    columns = {"kind": np.zeros(40, np.int64), "label": np.resize(label, 40)}
    write_columns(store.get_train_data_path(), columns)
    estimator = KerasEstimator(
        **{"backend": InProcessBackend(), "store": store, "model": make_net()},
        **{"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"},
        **{"feature_cols": ["kind"], "label_cols": ["label"], "verbose": 0},
    )
    with pytest.raises(error, match=message):
        estimator.fit_on_parquet()
    assert store.list_runs() == []


def test_a_prediction_names_the_input_and_the_unknown_id() -> None:
    model = KerasModel(model=make_net(), feature_columns=["kind"], label_columns=["label"])
    document, load = model._make_predictor()
    with pytest.raises(
        PredictionError, match=r"(?s)called with kind \(3, 1\).* = 7 is not in \[0, 5\)"
    ) as raised:
        load(document)([np.array([0, 7, 1])])
    assert len(str(raised.value)) < 1000
