"""Text and ragged arrays through collate_fn and padding: fit, transform, save, load and predict."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from hvd_estimators import prepare_data
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.launch import LocalBackend
from hvd_estimators.torch import TorchEstimator, TorchModel, load_predictor

pytestmark = pytest.mark.spark

WORDS = {"good": 1, "bad": 2, "fair": 3, "poor": 4}
ROWS = 60


def tokenized(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Tokenize texts, of which a null has no word, and pad them to the longest."""
    ids = [[WORDS[word] for word in (row["text"] or "").split()] for row in rows]
    width = max(1, *map(len, ids))
    batch = {
        "input_ids": torch.tensor([[*each, *[0] * (width - len(each))] for each in ids]),
        "attention_mask": torch.tensor([[1] * len(e) + [0] * (width - len(e)) for e in ids]),
    }
    if "label" in rows[0]:
        batch["label"] = torch.tensor([row["label"] for row in rows])
    return batch


class Classifier(torch.nn.Module):
    """Mean of the words' embeddings, as networks of Hugging Face take their inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(len(WORDS) + 1, 4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask[..., None]
        mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        out: torch.Tensor = self.head(mean)
        return out


def texts() -> list[tuple[int, str | None, int]]:
    rng = np.random.default_rng(1)
    made: list[tuple[int, str | None, int]] = []
    for row in range(ROWS):
        label = row % 2
        words = rng.choice(["good", "fair"] if label else ["bad", "poor"], rng.integers(1, 6))
        made.append((row, None if row == 5 else " ".join(words), label))
    return made


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(texts(), "id int, text string, label int").repartition(2).cache()


def estimator(store: Any, **params: Any) -> TorchEstimator:
    net = Classifier()
    given: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), 0.1),
        "loss": torch.nn.functional.cross_entropy,
        "input_form": "keyword",
        "feature_cols": ["text"],
        "label_cols": ["label"],
        "collate_fn": tokenized,
    }
    return TorchEstimator(
        **{
            **given,
            "backend": LocalBackend(2),
            "store": store,
            "batch_size": 4,
            "epochs": 3,
            "random_seed": 3,
            "verbose": 0,
            **params,
        }
    )


def alone(model: torch.nn.Module) -> np.ndarray:
    """Return the outputs for all rows, one by one."""
    rows = [tokenized([{"text": text}]) for _, text, _ in texts()]
    with torch.no_grad():
        return np.concatenate([model(**row).numpy() for row in rows])


def outputs_of(frame: Any) -> np.ndarray:
    rows = frame.orderBy("id").select("label__output").collect()
    return np.stack([row[0].toArray() for row in rows])


def test_a_text_classifier_from_fit_to_a_served_row(store: Any, frame: Any, tmp_path: Path) -> None:
    made = estimator(store, validation=0.2)
    made.save(str(tmp_path / "estimator"))
    loaded = TorchEstimator.load(str(tmp_path / "estimator"))
    loaded.setBackend(LocalBackend(2)).setStore(store)
    model = loaded.fit(frame)
    assert model.getHistory()[-1]["validation"]["loss"] < 0.3

    expected = alone(model.getModel())
    transformed = model.setInferenceBatchSize(7).transform(frame)
    np.testing.assert_allclose(outputs_of(transformed), expected, rtol=1e-5, atol=1e-6)
    assert transformed.where("prediction = label").count() >= ROWS - 1

    targets = torch.tensor([label for _, _, label in texts()])
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(expected), targets)
    assert model.evaluate(frame).metrics["loss"] == pytest.approx(float(loss), rel=1e-5)

    model.save(str(tmp_path / "model"))
    again = TorchModel.load(str(tmp_path / "model"))
    np.testing.assert_allclose(outputs_of(again.transform(frame)), expected, rtol=1e-5, atol=1e-6)
    predictor = load_predictor(str(tmp_path / "model"))
    for given in ([{"text": text} for _, text, _ in texts()], {"text": [t[1] for t in texts()]}):
        found = predictor(given)
        found = (
            np.stack([row["label__output"] for row in found])
            if isinstance(found, list)
            else found["label__output"]
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    table = frame.orderBy("id").select("text").toPandas()
    found = np.stack(predictor(table)["label__output"])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    udf = model.as_udf()
    by_udf = frame.orderBy("id").select(udf("text")).collect()
    np.testing.assert_allclose([row[0] for row in by_udf], expected, rtol=1e-5, atol=1e-6)


def test_nulls_follow_handle_invalid(store: Any, frame: Any) -> None:
    model = estimator(store, epochs=1).fit(frame)
    assert model.setHandleInvalid("skip").transform(frame).count() == ROWS - 1
    with pytest.raises(Exception, match="Column 'text' holds nulls"):
        model.setHandleInvalid("error").transform(frame).collect()


WHEN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
UTC = WHEN.replace(tzinfo=None)


def test_prepared_data_holds_columns_of_any_type(store: Any, frame: Any) -> None:
    options: dict[str, Any] = {"allow_text": {"text": "any"}, "random_seed": 3}
    with prepare_data(2, store, frame, ["label"], ["text"], **options) as index:
        model = estimator(store).fit_on_parquet(dataset_idx=index)
    whole = estimator(store).fit(frame)
    for trained in (model, whole):
        assert trained.getHistory()[-1]["train"]["loss"] < 0.3
    np.testing.assert_array_equal(alone(model.getModel()), alone(whole.getModel()))


def with_topic(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    for row in rows:
        assert isinstance(row["topic"], str)
        assert row["topic"] == f"topic {row['id'] % 3}"
    return tokenized(rows)


def test_a_table_with_text_in_its_paths(spark: Any, store: Any, frame: Any) -> None:
    topic = F.concat(F.lit("topic "), F.col("id") % 3)
    with_topics = frame.withColumn("topic", topic)
    with_topics.write.partitionBy("topic").saveAsTable("texts_by_topic")
    try:
        made = estimator(store, feature_cols=["text", "topic", "id"], collate_fn=with_topic)
        model = made.fit_on_table("texts_by_topic")
    finally:
        spark.sql("DROP TABLE texts_by_topic")
    assert model.getHistory()[-1]["train"]["loss"] < 0.3
    assert model.transform(with_topics).where("prediction = label").count() >= ROWS - 1


class Seen(torch.nn.Module):
    """Module whose output is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def described(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Check the values and types of a row by the row's number."""
    for row in rows:
        number = row["number"]
        assert row["nested"] is None if number == 3 else len(row["nested"]) == number % 3
        for part in () if row["nested"] is None else row["nested"]:
            assert part.dtype == np.float32
            assert part.tolist() == [float(number)]
        assert row["words"] == {"a": number, "b": None}
        assert row["point"] == {"x": 0.5, "names": ["p", None]}
        assert row["vector"].tolist() == [1.0] * (1 + number % 2)
        assert row["vector"].dtype == np.float32
        assert row["price"] == number + 0.25
        assert row["when"] == UTC
        assert row["bytes"] == bytes([number])
        assert row["day"] == datetime.date(2026, 1, 2)
    return torch.tensor([[row["number"] * 1.0] for row in rows])


def test_all_types_reach_the_function_in_training_and_in_transform(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    rows = [
        (
            number,
            None if number == 3 else [[float(number)]] * (number % 3),
            {"a": number, "b": None},
            (0.5, ["p", None]),
            Vectors.dense([1.0] * (1 + number % 2)),
            decimal.Decimal(number) + decimal.Decimal("0.25"),
            bytearray([number]),
        )
        for number in range(20)
    ]
    schema = (
        "number int, nested array<array<float>>, words map<string,int>, "
        "point struct<x: double, names: array<string>>, price decimal(9,2), bytes binary"
    )
    vectors = spark.createDataFrame([(row[0], row[4]) for row in rows], ["key", "vector"])
    frame = spark.createDataFrame([(*row[:4], *row[5:]) for row in rows], schema)
    frame = frame.join(vectors, F.col("key") == F.col("number")).drop("key")
    moment = F.timestamp_seconds(F.lit(int(WHEN.timestamp())))
    frame = frame.withColumns({"when": moment, "day": F.to_date(F.lit("2026-01-02"))}).cache()
    net = Seen()
    model = estimator(
        store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), 0.0),
        loss=lambda outputs: outputs.square().mean(),
        loss_form="joint",
        input_form="positional",
        feature_cols=frame.columns,
        label_cols=[],
        collate_fn=described,
        epochs=1,
    ).fit(frame)
    assert model.getHistory()[0]["train"]["loss"] == pytest.approx(np.mean(np.arange(20) ** 2))
    found = model.transform(frame).select("number", "output").collect()
    assert [row[1] for row in found] == [float(row[0]) for row in found]
    model.save(str(tmp_path / "model"))
    # Spark's rows have local times without a time zone.
    given = [{**row.asDict(), "when": WHEN} for row in frame.collect()]
    served = load_predictor(str(tmp_path / "model")).predict(given)
    assert [row["output"] for row in served] == [float(row["number"]) for row in given]


class Speaker(Classifier):
    """Classifier that returns scores if it gets the classes, and otherwise each class thrice."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, said: Any = None
    ) -> torch.Tensor:
        scores = super().forward(input_ids, attention_mask)
        return scores if said is not None else scores.argmax(1)[:, None].repeat(1, 3)


def said(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = tokenized(rows)
    return {**batch, "said": batch["label"]} if "label" in batch else batch


def test_predictions_may_have_another_shape_than_in_training(store: Any, frame: Any) -> None:
    net = Speaker()
    params = {"model": net, "optimizer": torch.optim.Adam(net.parameters(), 0.1)}
    model = estimator(store, collate_fn=said, **params).fit(frame)

    transformed = model.transform(frame)

    assert model.getOutputShapes() == [[3]]
    # The column would hold the position of the largest of these numbers.
    assert "prediction" not in transformed.columns
    np.testing.assert_array_equal(outputs_of(transformed), alone(model.getModel()))
    right = [[label] * 3 for _, _, label in texts()]
    assert (outputs_of(transformed) == right).mean() > 0.9


def test_errors_name_the_way_out(spark: Any, store: Any, frame: Any) -> None:
    ragged = spark.createDataFrame([(1, [1.0, 2.0]), (0, [1.0])], "label int, text array<double>")
    bounded = {"batch_size_fn": lambda row: len(row["words"]), "max_batch_size": 9}
    synchronized = torch.nn.Sequential(torch.nn.SyncBatchNorm(3))
    for given, error, message in (
        ({"collate_fn": None}, ColumnError, r"^feature_cols: .*'text' has type string.*collate_fn"),
        ({"padding": {"text": 0}}, ParamError, "collate_fn and padding are both set"),
        ({"collate_fn": None, "padding": {"x": 0}}, ParamError, r"^padding: 'x' is no feature"),
        ({"masks": True}, ParamError, "^masks: found True without padding"),
        ({"input_shapes": [[-1, 3]]}, ParamError, "^input_shapes: .*collate_fn"),
        ({"transformation_fn": dict}, ParamError, "^collate_fn: .*transformation_fn"),
        ({"collate_fn": lambda rows: rows[0]["no"]}, ParamError, "collate_fn failed .*KeyError"),
        ({"collate_fn": lambda rows: 3}, DataError, "collate_fn returned int"),
        (
            {"collate_fn": lambda r: tokenized([{"text": ""}] * len(r))},
            DataError,
            "no label 'label'",
        ),
        ({"max_batch_size": 9}, ParamError, "^max_batch_size: found 9.0 without batch_size_fn"),
        ({**bounded, "max_batch_size": None}, ParamError, "^batch_size_fn: found .*Set both"),
        ({**bounded, "batch_size_fn": 3}, ParamError, "^batch_size_fn: expected a function"),
        ({**bounded, "collate_fn": None}, ParamError, "^batch_size_fn: it needs collate_fn"),
        ({**bounded, "train_minibatch_fn": print}, ParamError, "^batch_size_fn: .*steps by itself"),
        ({**bounded, "model": synchronized}, ParamError, "^batch_size_fn: the layer '0' is a Sync"),
        (bounded, ParamError, "^batch_size_fn failed with KeyError: 'words'"),
        ({"collate_fn": 3}, ParamError, "^collate_fn: expected a function"),
        ({"collate_fn": None, "padding": {"text": "a"}}, ParamError, "^padding: expected a dict"),
    ):
        with pytest.raises(error, match=message):
            estimator(store, **given).fit(frame)
    with pytest.raises(DataError, match=r"ragged.* set padding=\{'text': 0\} or collate_fn"):
        estimator(store, collate_fn=None).fit(ragged)
    interval = frame.withColumn("text", F.expr("interval 3 days"))
    with pytest.raises(ColumnError, match=r"a collate function takes no interval .*number"):
        estimator(store).fit(interval)
    model = estimator(store, epochs=1).fit(frame)

    def needs_labels(rows: list[dict[str, Any]]) -> Any:
        return {**tokenized(rows), "label": torch.tensor([row["label"] for row in rows])}

    model.setCollateFn(needs_labels)
    with pytest.raises(Exception, match="collate_fn failed on some rows with KeyError: 'label'"):
        model.transform(frame).collect()
