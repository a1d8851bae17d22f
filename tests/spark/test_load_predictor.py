"""Saved models without Spark predict the same bits as transform()."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.feature import StringIndexerModel, VectorAssembler
from pyspark.ml.linalg import Vectors

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import (
    ColumnError,
    DataError,
    GpuError,
    ParamError,
    PredictionError,
    StoreError,
)
from hvd_estimators.prepare.datasets import column_metadata
from hvd_estimators.torch import TorchModel, load_predictor

pytestmark = pytest.mark.spark


class Named(torch.nn.Module):
    """Take inputs by name; return a matrix and a number by the labels' names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not self.training
        hidden = self.linear(b) * a[:, None]
        return {"number": hidden.sum(1), "matrix": hidden.reshape(-1, 2, 2)}


def save(model: Any, folder: Path) -> str:
    path = str(folder / "model")
    model.save(path)
    return path


def transformed(model: Any, frame: Any, predictor: Any) -> pd.DataFrame:
    """Return the columns that `transform` adds to one partition, where batches are the same."""
    predicted = model.transform(frame.coalesce(1))
    assert tuple(predicted.columns[len(frame.columns) :]) == predictor.output_columns
    return predicted.select(*predictor.output_columns).toPandas()


def values(column: Any) -> Any:
    """Return a column as an array, with NaN for nulls."""
    first = next(value for value in column if value is not None)
    if np.ndim(getattr(first, "values", first)) == 0:
        return np.array([np.nan if value is None else value for value in column], float)
    missing = np.full_like(np.array(getattr(first, "values", np.array(first).tolist()), float), 0)
    return np.array(
        [
            missing * np.nan
            if value is None
            else np.array(getattr(value, "values", value)).tolist()
            for value in column
        ],
        float,
    )


def assert_same(found: Any, expected: pd.DataFrame) -> None:
    names = found.column_names if hasattr(found, "column_names") else list(found)
    assert names == list(expected.columns)
    for name in names:
        column = found[name].to_pylist() if hasattr(found, "column_names") else found[name]
        wanted = [None if value is pd.NA else value for value in expected[name]]
        np.testing.assert_array_equal(values(column), values(wanted), err_msg=name)


def test_a_classifier_on_vectors_predicts_as_transform_does(spark: Any, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model = TorchModel(
        model=net.train(),
        feature_columns=["features"],
        label_columns=["label"],
        input_shapes=[[-1, 5]],
        predictionCol="class",
        probabilityCol="p",
        outputs_are="logits",
        output_types=["array<float>"],
    )
    predictor = load_predictor(save(model, tmp_path), num_threads=1)
    numbers = np.random.default_rng(1).normal(size=(50, 5)).astype(np.float32)
    numbers[:, 1:] *= numbers[:, 1:] > 0.5
    dense = [Vectors.dense(row.tolist()) for row in numbers]
    sparse = [Vectors.sparse(5, np.flatnonzero(row), row[row != 0]) for row in numbers[:25]]
    frame = spark.createDataFrame(
        [(vector, i) for i, vector in enumerate([*sparse, *dense[25:], None])], ["features", "id"]
    )
    expected = transformed(model, frame, predictor)

    frame.coalesce(1).write.parquet(str(tmp_path / "rows"))
    table = pq.read_table(tmp_path / "rows")
    made = predictor.predict(table)
    assert_same(made, expected)
    assert made["label__output"].type.value_type == "float"
    assert made["class"].null_count == 1
    assert_same(predictor(table.to_batches()[0]), expected)
    assert_same(predictor(frame.toPandas()), expected)
    # Arrays have no nulls.
    for given in ({"features": numbers}, {"features": numbers.astype(np.float64), "id": None}):
        assert_same(predictor.predict(given), expected[:-1])
    empty = predictor({"features": numbers[:0]})
    assert {name: array.shape for name, array in empty.items()} == {
        **{"label__output": (0, 3), "class": (0,), "p": (0, 3)}
    }
    by_seven = load_predictor(str(tmp_path / "model"), batch_size=7)({"features": numbers})
    np.testing.assert_allclose(by_seven["p"], values(expected["p"][:-1]), atol=1e-6)

    with pytest.raises(ColumnError, match="no column 'features'"):
        predictor(table.select(["id"]))
    with pytest.raises(PredictionError, match=r"features \(5,\) per row"):
        predictor({"features": numbers[:, :4]})
    with pytest.raises(ParamError, match="device: expected 'cpu', 'cuda'"):
        load_predictor(str(tmp_path / "model"), device="tpu")
    with pytest.raises(ParamError, match="batch_size: expected a whole number"):
        load_predictor(str(tmp_path / "model"), batch_size=0)
    if not torch.cuda.is_available():
        with pytest.raises(GpuError, match="sees no GPU"):
            load_predictor(str(tmp_path / "model"), device="cuda")


@pytest.mark.parametrize("handling", ["keep", "skip", "error"])
def test_inputs_and_outputs_by_name_and_null_rows(
    spark: Any, tmp_path: Path, handling: str
) -> None:
    model = TorchModel(
        model=Named(),
        feature_columns=["a", "b"],
        label_columns=["matrix", "number"],
        output_shapes=[[2, 2], []],
        outputCols=["m", "n"],
        input_form="keyword",
        handleInvalid=handling,
    )
    predictor = load_predictor(save(model, tmp_path))
    rows = [(float(i), [i * 0.1, -1.0, i * 2.0]) for i in range(20)]
    rows[3] = (float("nan"), [1.0, float("nan"), 2.0])
    with_nulls = [*rows, (None, [1.0, 2.0, 3.0]), (1.0, [None, 1.0, 2.0]), (1.0, None)]
    frame = spark.createDataFrame(rows, "a double, b array<double>")

    expected = transformed(model, frame, predictor)
    a, b = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    assert_same(predictor.predict({"b": b, "a": a}), expected)
    assert np.isnan(expected["n"][3])
    # Several threads, starting with the first call.
    fresh = load_predictor(str(tmp_path / "model"))
    with ThreadPoolExecutor(4) as threads:
        for made in threads.map(lambda _: fresh.predict({"a": a, "b": b}), range(16)):
            assert_same(made, expected)

    nulls = pd.DataFrame(with_nulls, columns=["a", "b"], index=range(5, 28))
    nulls["a"] = nulls["a"].astype(object).where([*[True] * 20, False, True, True], None)
    if handling == "error":
        with pytest.raises(DataError, match="Column 'a' holds nulls"):
            predictor.predict(nulls)
        return
    frame = spark.createDataFrame(with_nulls, "a double, b array<double>")
    expected = transformed(model, frame, predictor)
    made = predictor.predict(nulls)
    assert_same(made, expected)
    assert made.index.tolist() == list(range(5, 28 if handling == "keep" else 25))


def test_paths_without_a_torch_model_are_rejected(spark: Any, tmp_path: Path) -> None:
    model = TorchModel(model=torch.nn.Linear(2, 1), feature_columns=["x"], label_columns=["y"])
    PipelineModel([model]).save(str(tmp_path / "pipeline"))
    (stage,) = (tmp_path / "pipeline" / "stages").iterdir()

    # In another fsspec filesystem; output shapes are inferred.
    memory = fsspec.filesystem("memory")
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    for number, folder in enumerate((stage, tmp_path / "pipeline")):
        memory.put(str(folder), f"/models/{number}", recursive=True)
        predictor = load_predictor(f"memory://models/{number}")
        made = predictor.predict({"x": x})["y__output"]
        np.testing.assert_array_equal(made, model.getModel()(torch.tensor(x))[:, 0].detach())
    memory.rm("/models", recursive=True)

    with pytest.raises(StoreError, match="found no saved model at"):
        load_predictor(str(tmp_path))
    with pytest.raises(ParamError, match="path: expected a path or a URL as a string"):
        load_predictor(tmp_path)  # type: ignore[arg-type]
    (stage / "params" / "model.pkl").unlink()
    with pytest.raises(StoreError, match="is not complete: it lacks the param 'model'"):
        load_predictor(str(stage))
    (metadata,) = (stage / "metadata").glob("part-*")
    for text, error, told in (
        ('{"class": "mine.Model"}', ParamError, r"holds a mine\.Model\. .* Load their models with"),
        ("no JSON", StoreError, "is not a saved model"),
    ):
        metadata.write_text(text)
        with pytest.raises(error, match=told):
            load_predictor(str(stage))


class Several(torch.nn.Module):
    """Return the input's first number, all its numbers, and its second number."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, 0], x, x[:, 1]


def test_nan_becomes_null_in_types_without_nan(spark: Any, tmp_path: Path) -> None:
    model = TorchModel(
        model=Several(),
        feature_columns=["x"],
        label_columns=["whole", "several", "flag"],
        output_shapes=[[], [2], []],
        output_types=["int", "array<smallint>", "boolean"],
    )
    predictor = load_predictor(save(model, tmp_path))
    numbers = [[-1.7, 2.5], [float("nan"), 0.0], [300.9, float("nan")], [-32768.5, 32767.9]]
    frame = spark.createDataFrame([(row,) for row in [*numbers, None]], "x array<double>")

    expected = transformed(model, frame, predictor)
    table = pa.table({"x": pa.array([*numbers, None], pa.list_(pa.float64()))})
    made = predictor.predict(table)
    assert made.to_pydict() == {
        "whole__output": [-1, None, 300, -32768, None],
        "several__output": [[-1, 2], [None, 0], [300, None], [-32768, 32767], None],
        "flag__output": [True, False, None, True, None],
    }
    assert_same(made, expected)
    assert_same(predictor(table.to_pandas()), expected)
    assert_same(predictor({"x": np.array(numbers)}), expected[:-1])
    whole = predictor({"x": np.array(numbers[3:])})
    assert [array.dtype.name for array in whole.values()] == ["int32", "int16", "bool"]

    too_large = np.array([[0.0, 32768.0]])
    wrong = r"several__output is 32768\.0, which type smallint cannot hold"
    with pytest.raises(PredictionError, match=wrong):
        predictor({"x": too_large})
    # One partition: Spark 3.5 kills the other tasks of a failed query, and may close a socket of a
    # Python worker that the next query uses.
    one = spark.createDataFrame([(too_large[0].tolist(),)], frame.schema).coalesce(1)
    with pytest.raises(Exception, match=wrong):
        model.transform(one).collect()


def test_a_keras_model_predicts_on_numbers_and_text(spark: Any, tmp_path: Path) -> None:
    import keras

    from hvd_estimators import keras as package

    words, numbers = keras.Input((), dtype="string", name="word"), keras.Input((2,), name="n")
    known = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(words)
    joined = keras.layers.Concatenate()([known, numbers])
    outputs = {
        "y": keras.layers.Dense(1, name="y")(keras.layers.Dropout(0.5)(joined)),
        "z": keras.layers.Dense(2, activation="softmax", name="z")(joined),
    }
    net = keras.Model({"word": words, "n": numbers}, outputs)
    net.compile("adam", "mse", steps_per_execution=3)
    model = package.KerasModel(
        model=net, feature_columns=["n", "word"], label_columns=["z", "y"], _floatx="float32"
    )
    predictor = package.load_predictor(save(model, tmp_path))
    rows = [([i * 1.0, -1.0], "abc"[i % 3]) for i in range(10)] + [(None, "a"), ([1.0, 2.0], None)]
    frame = spark.createDataFrame(rows, "n array<float>, word string")

    expected = transformed(model, frame, predictor)
    pandas = frame.toPandas()
    assert_same(predictor.predict(pandas), expected)
    n, word = np.array(pandas["n"][:10].tolist()), pandas["word"][:10]
    for given in ({"n": n, "word": word}, {"n": n, "word": np.array(word, "U")}):
        assert_same(predictor.predict(given), expected[:10])
    assert predictor._predictor._model.optimizer is None


WITHOUT_SPARK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
import numpy as np
import importlib

for package, path in zip(sys.argv[1::2], sys.argv[2::2]):
    module = importlib.import_module(f"hvd_estimators.{package}")
    predictor = module.load_predictor(path)
    made = predictor.predict({"x": np.array([[1.0, 2.0], [-3.0, 4.0]], np.float32)})
    print(*made["y__output"].tolist())
assert not {"pyspark", "py4j"} & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.usefixtures("spark")
def test_no_rows_before_any_others_give_empty_columns(tmp_path: Path) -> None:
    """The shapes of ``predict_step`` are not known before it has run."""
    from lightning.pytorch import LightningModule

    from hvd_estimators.lightning import LightningModel

    class Stepping(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.linear(batch["x"])

    model = LightningModel(
        model=Stepping(),
        use_predict_step=True,
        feature_columns=["x"],
        label_columns=["y"],
        predictionCol="class",
    )
    rows = np.ones((2, 3), np.float32)
    predictor = load_predictor(save(model, tmp_path))
    assert len(predictor({"x": rows[:0]})["class"]) == 0
    assert len(predictor({"x": rows})["class"]) == 2
    assert len(predictor({"x": rows[:0]})["class"]) == 0


@pytest.mark.usefixtures("spark")
def test_models_that_edit_their_inputs_leave_the_callers_rows_as_they_are(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule

    from hvd_estimators.lightning import LightningModel

    class Editing(LightningModule):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return batch["x"].sub_(1.0)

    columns = {"feature_columns": ["x"], "label_columns": ["y"]}
    model = LightningModel(model=Editing(), use_predict_step=True, **columns)
    predictor = load_predictor(save(model, tmp_path))
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    given = rows.copy()
    for _ in range(2):  # the first call also finds the shapes
        np.testing.assert_array_equal(predictor.predict({"x": given})["y__output"], rows - 1)
    np.testing.assert_array_equal(given, rows)


@pytest.mark.once
def test_predictors_load_without_pyspark(spark: Any, tmp_path: Path) -> None:
    import keras

    from hvd_estimators.keras import KerasModel
    from hvd_estimators.lightning import LightningModel

    net = torch.nn.Linear(2, 1)
    columns: dict[str, Any] = {"feature_columns": ["x"], "label_columns": ["y"]}
    twin = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    twin.set_weights([net.weight.detach().numpy().T, net.bias.detach().numpy()])
    paths = {name: tmp_path / name for name in ("torch", "lightning", "keras")}
    # The saved column metadata holds classes of Spark's.
    known = column_metadata([ColumnSpec("x", "vector", "float32", (2,))])
    doubling = TorchModel(
        model=net,
        transformation_fn=lambda row: {"x": row["x"] * 2},
        apply_transformation=True,
        _metadata=known,
        **columns,
    )
    doubling.save(str(paths["torch"]))
    LightningModel(model=net, **columns).save(str(paths["lightning"]))
    KerasModel(model=twin, **columns).save(str(paths["keras"]))

    words = StringIndexerModel.from_labels(["a"], "word", "index")
    assembler = VectorAssembler(inputCols=["x"], outputCol="features")
    columns["feature_columns"] = ["features"]
    first = TorchModel(model=net, outputCols=["first"], **columns)
    stages = [words, assembler, first, KerasModel(model=twin, **columns)]
    PipelineModel(stages).save(str(tmp_path / "pipeline"))

    arguments = [str(argument) for pair in paths.items() for argument in pair]
    arguments += ["torch", str(tmp_path / "pipeline")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SPARK, *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    x = np.array([[1.0, 2.0], [-3.0, 4.0]], np.float32)
    expected = [net(torch.tensor(k * x))[:, 0].tolist() for k in (2, 1, 1, 1)]
    found = [[float(number) for number in line.split()] for line in done.stdout.splitlines()]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
