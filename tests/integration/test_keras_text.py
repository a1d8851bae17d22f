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
from variants import others_in_soak

from hvd_estimators.exceptions import ColumnError, ShapeError
from hvd_estimators.keras import KerasModel, load_predictor

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


@pytest.mark.parametrize("kind", others_in_soak("functional", "subclassed"))
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
        unaware = functools.partial(Subclassed, keras.layers.Identity())
        with pytest.raises(ShapeError, match=r"(?s)called with text .*TextVectorization"):
            estimator.copy({estimator.model: unaware}).fit(df)


IDS = {"good": 1, "bad": 2, "fair": 3, "poor": 4}


def tokenized(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make ids of texts, of which a null is fair, padded to the longest."""
    texts = [(row["text"] or "fair").split() for row in rows]
    ids = np.zeros((len(rows), max(map(len, texts))), np.int64)
    for padded, words in zip(ids, texts, strict=True):
        padded[: len(words)] = [IDS[word] for word in words]
    batch: dict[str, Any] = {"ids": ids}
    if "label" in rows[0]:
        batch["label"] = np.array([row["label"] for row in rows])
    return batch


def make_classifier(masks: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int64", name="words" if masks else "ids")
    embedded = keras.layers.Embedding(len(IDS) + 1, 4, mask_zero=not masks)(ids)
    if not masks:
        pooled = keras.layers.GlobalAveragePooling1D()(embedded)
        return keras.Model(ids, keras.layers.Dense(2)(pooled))
    mask = keras.Input((None,), dtype="bool", name="words_mask")
    pooled = keras.layers.GlobalAveragePooling1D()(embedded, mask=mask)
    return keras.Model({"words": ids, "words_mask": mask}, keras.layers.Dense(2)(pooled))


@pytest.mark.parametrize("kind", ["collate_fn", "padding"])
def test_rows_of_any_length(spark: Any, store: Any, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for label in [0, 1] * 30:
        words = rng.choice(["good", "fair"] if label else ["bad", "poor"], rng.integers(1, 6))
        ids = [IDS[word] for word in words]
        rows.append({"text": " ".join(words), "words": ids, "label": label})
    if kind == "collate_fn":
        rows[5]["text"] = None
        params: dict[str, Any] = {"feature_cols": ["text"], "collate_fn": tokenized}
    else:
        params = {"feature_cols": ["words"], "padding": {"words": 0}, "masks": True}
    frame = spark.createDataFrame(
        [tuple(row.values()) for row in rows], "text string, words array<int>, label int"
    ).repartition(2)
    fitted = pooled_estimator(
        store,
        2,
        model=make_classifier(kind == "padding"),
        optimizer=keras.optimizers.Adam(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        label_cols=["label"],
        batch_size=7,
        epochs=8,
        validation=0.2,
        shuffle=True,
        **params,
    ).fit(frame)
    assert fitted.getHistory()["val_accuracy"][-1] > 0.9
    path = str(tmp_path / "model")
    fitted.save(path)

    ids = np.zeros((len(rows), 5), np.int64)
    for padded, row in zip(ids, rows, strict=True):
        of_row = row["words"] if kind == "padding" or row["text"] else [IDS["fair"]]
        padded[: len(of_row)] = of_row
    trained = fitted.getModel()
    inputs = {"words": ids, "words_mask": ids != 0} if kind == "padding" else ids
    scores = trained.predict(inputs, verbose=0)
    given = [{name: row[name] for name in params["feature_cols"]} for row in rows]
    served = [row["label__output"] for row in load_predictor(path).predict(given)]
    np.testing.assert_allclose(served, scores, rtol=1e-4, atol=1e-5)
    expected = dict(zip(map(str, given), scores.argmax(1), strict=True))
    for model in (fitted, KerasModel.load(path)):
        for row in model.transform(frame).collect():
            assert row.prediction == expected[str({n: row[n] for n in params["feature_cols"]})]
    labels = np.array([row["label"] for row in rows])
    loss, accuracy = trained.evaluate(inputs, labels, verbose=0)
    found = fitted.evaluate(frame)
    assert found["loss"] == pytest.approx(loss, rel=1e-4)
    assert found["accuracy"] == pytest.approx(accuracy)
