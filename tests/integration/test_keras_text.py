"""Models with string inputs on two ranks, compared with `keras.Model.fit` in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from parquet_files import write_columns

from hvd_estimators.exceptions import ColumnError, ShapeError
from hvd_estimators.keras import KerasModel

pytestmark = pytest.mark.integration

WORDS = np.array(["good", "bad", "film", "plot", "über", "dull", "fine"])
KINDS = np.array(["news", "blog", "mail"])


def make_columns(rows: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 6))) for _ in range(rows)]
    return {
        "text": np.array(texts, object),
        "kind": np.array(rng.choice(KINDS, rows), object),
        "x": rng.normal(size=(rows, 2)).astype(np.float32),
        "y": np.array(["good" in text for text in texts], np.float32),
    }


def make_functional(columns: dict[str, Any]) -> keras.Model:
    keras.utils.set_random_seed(3)
    words = keras.layers.TextVectorization(max_tokens=6, output_sequence_length=4)
    words.adapt(columns["text"])
    kinds = keras.layers.StringLookup(vocabulary=["mail", "news"], output_mode="one_hot")
    text = keras.Input((1,), dtype="string", name="a")
    kind = keras.Input((1,), dtype="string", name="b")
    x = keras.Input((2,), name="c")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(8, 3)(words(text)))
    hashed = keras.layers.Hashing(3, output_mode="one_hot")(kind)
    parts = [embedded, kinds(kind), hashed, x]
    outputs = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(parts))
    return keras.Model([text, x, kind], outputs)


class Subclassed(keras.Model):
    """Model without a config that does not declare its text input."""

    def __init__(self, words: Any) -> None:
        super().__init__()
        self.words = words
        self.embedding = keras.layers.Embedding(8, 3)
        self.dense = keras.layers.Dense(1, "sigmoid")

    def call(self, text: Any) -> Any:
        return self.dense(keras.ops.mean(self.embedding(self.words(text)), axis=1))


def make_subclassed(columns: dict[str, Any]) -> keras.Model:
    keras.utils.set_random_seed(3)
    words = keras.layers.TextVectorization(max_tokens=6, output_sequence_length=4)
    words.adapt(columns["text"])
    model = Subclassed(words)
    model(keras.ops.convert_to_tensor(columns["text"][:1, None]))
    return model


def inputs(columns: dict[str, Any], features: list[str], rows: Any = slice(None)) -> Any:
    arrays = [columns[n][rows] if n == "x" else columns[n][rows][:, None] for n in features]
    # Keras does not train on NumPy object arrays.
    found = [keras.ops.convert_to_tensor(array) for array in arrays]
    return found if len(found) > 1 else found[0]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["subclassed", "functional"])
def test_string_inputs_train_as_one_process(
    spark: Any, store: Any, kind: str, tmp_path: Path
) -> None:
    columns = make_columns()
    make = make_functional if kind == "functional" else make_subclassed
    features = ["text", "x", "kind"] if kind == "functional" else ["text"]
    params = {
        "model": make(columns) if kind == "functional" else functools.partial(make, columns),
        "optimizer": keras.optimizers.SGD(0.3),
        "loss": "binary_crossentropy",
        "feature_cols": features,
        "label_cols": ["y"],
        "batch_size": 15,
        "epochs": 2,
    }
    write_columns(store.get_train_data_path(), columns, row_group_size=25)
    estimator = pooled_estimator(store, 2, **params)
    fitted = estimator.fit_on_parquet()
    alone = make(columns)
    alone.compile(keras.optimizers.SGD(0.3), "binary_crossentropy")
    order = np.concatenate([np.r_[i : i + 15, 30 + i : 45 + i] for i in (0, 15)])
    alone.fit(
        inputs(columns, features, order),
        keras.ops.convert_to_tensor(columns["y"][order, None]),
        batch_size=30,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    assert_same_weights(fitted.getModel(), alone)
    rows = [
        (t, k, [float(a) for a in x], float(y))
        for t, k, x, y in zip(*(columns[n] for n in ("text", "kind", "x", "y")), strict=True)
    ]
    df = spark.createDataFrame(rows, "text string, kind string, x array<float>, y float")
    expected = np.ravel(alone.predict(inputs(columns, features), verbose=0))
    fitted.write().overwrite().save(str(tmp_path / "model"))
    for model in (fitted, KerasModel.load(str(tmp_path / "model"))):
        found = [row.y__output for row in model.transform(df).select("y__output").collect()]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    # A DataFrame is also written and read.
    refit = estimator.fit(df.coalesce(1), {estimator.epochs: 1})
    assert refit.getModel().count_params() == alone.count_params()
    if kind == "functional":
        other = estimator.copy({estimator.feature_cols: ["x", "text", "kind"]})
        with pytest.raises((ColumnError, ShapeError), match="Column 'text' has type string"):
            other.fit(df)
        plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        given = {estimator.model: plain, estimator.feature_cols: ["text"]}
        with pytest.raises(ColumnError, match=r"'text' has type string.*StringIndexer"):
            estimator.copy(given).fit(df)
    else:
        unaware = Subclassed(keras.layers.Identity())
        with pytest.raises(ShapeError, match=r"'text' are text: .*TextVectorization"):
            estimator.copy({estimator.model: unaware}).fit(df)
