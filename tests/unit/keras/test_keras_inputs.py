"""Inputs of models called on the driver, and models with added losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from variants import others_in_soak

from hvd_estimators.exceptions import DataError, ParamError, ShapeError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.keras import KerasEstimator, load_predictor
from hvd_estimators.keras.custom_objects import remember
from hvd_estimators.keras.dry_run import DryRun
from hvd_estimators.keras.losses import may_add_loss
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.tensors import input_structure
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.store import LocalStore

COLUMNS = {
    "b": np.full((3, 2), 5.0, np.float32),
    "a": np.full(3, 7.0, np.float32),
    "y": np.ones(3, np.float32),
}
FEATURES = ["b", "a"]


class Weighing(keras.Model):
    """Model that returns 10 b + a for inputs in any form."""

    def __init__(self, pick: Callable[[Any], tuple[Any, Any]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pick = pick
        self.many = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.one = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        b, a = self.pick(inputs)
        return 10 * self.many(b) + self.one(a)


FORMS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "index": lambda inputs: (inputs["b"], inputs["a"]),
    "method": lambda inputs: (inputs.get("b"), inputs.get("a")),
    "tuple": lambda inputs: inputs,
    "place": lambda inputs: (inputs[0], inputs[1]),
}


def make(form: str) -> Weighing:
    model = Weighing(FORMS[form])
    remember(model, lambda: make(form))
    model.compile("sgd", "mse")
    return model


def test_text_for_layers_of_numbers_fails_on_the_driver() -> None:
    model = keras.Sequential([keras.layers.Embedding(8, 3), keras.layers.Flatten()])
    columns = {"word": np.array(["a", "b", "c"], object), "y": COLUMNS["y"]}
    with pytest.raises(ShapeError, match=r"(?s)called with word .*TextVectorization"):
        DryRun(model, ["word"], ["y"], None, None).run(columns)


@pytest.mark.parametrize("wrong", [2.5, np.nan])
def test_fractions_for_inputs_of_integers_are_rejected(wrong: float) -> None:
    word = keras.Input((), dtype="int32")
    model = keras.Model(word, keras.layers.Dense(1)(keras.layers.Embedding(8, 3)(word)))
    model.compile("sgd", "mse")
    columns = {"word": np.array([1.0, 2.0, wrong]), "y": COLUMNS["y"]}
    message = rf"^feature_cols: expected whole numbers in the column 'word'.*int32, found {wrong:g}"
    with pytest.raises(DataError, match=message):
        DryRun(model, ["word"], ["y"], None, None).run(columns)
    columns["word"][2] = 3.0
    DryRun(model, ["word"], ["y"], None, None).run(columns)


@keras.saving.register_keras_serializable("tests")
class Updating(keras.Model):
    """A model whose step updates it a number of times, and which measures a value by itself."""

    def __init__(self, times: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.times, self.dense = times, keras.layers.Dense(1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "times": self.times}

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        return [super(Updating, self).train_step(data) for _ in range(self.times)][-1]


class Measuring(keras.Sequential):
    """A model that logs a value besides its metrics."""

    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().compute_metrics(*args, **kwargs), "own": 1.0}


@pytest.mark.parametrize("times", [1, 2])
def test_updates_of_a_step_are_counted_for_trained_optimizers(times: int) -> None:
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    columns = {"x": x, "y": x[:, 0]}
    model = Updating(times)
    model.compile("adam", "mse")
    model.fit(x, columns["y"], epochs=3, verbose=0)
    given = {"feature_cols": ["x"], "label_cols": ["y"]}
    trial: Any = Fit(KerasEstimator(model=model, **given)).framework.dry_run(columns)
    expected = None if times == 1 else "and the model's train_step applies optimizers 2 times"
    assert trial.dry_run.joint_steps == expected


def test_names_of_metrics_are_those_of_the_logs() -> None:
    model = Measuring([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    dry_run = DryRun(model, ["x"], ["y"], None, None)
    dry_run.run({"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)})
    assert dry_run.metric_names == ["loss", "mae", "own"]


def test_a_single_row_may_have_other_dimensions() -> None:
    class Squeezing(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return keras.ops.squeeze(self.dense(inputs))[..., None]

    model = Squeezing()
    model.compile("sgd", "mse")
    trial = DryRun(model, ["b"], ["y"], None, None, copy=Squeezing)
    trial.run(COLUMNS)
    trial.note_other_sizes([{name: array[:1] for name, array in COLUMNS.items()}])
    assert trial.output_shapes == [(1,)]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("built", others_in_soak(True, False))
def test_subclassed_models_get_inputs_in_the_form_they_accept(
    form: str, built: bool, tmp_path: Any
) -> None:
    model, by_name = make(form), form in ("index", "method")
    if by_name and not built:
        with pytest.raises(ShapeError, match=r"(?s)a dict .*call it on one before"):
            DryRun(make(form), FEATURES, ["y"], None, None).run(COLUMNS)
    if by_name or built:
        rows = [COLUMNS["b"], COLUMNS["a"][:, None]]
        model(dict(zip(FEATURES, rows, strict=True)) if by_name else tuple(rows))
    trial = DryRun(model, FEATURES, ["y"], None, None, copy=lambda: make(form))
    trial.run(COLUMNS)
    x, _ = trial.tensors.arrays(COLUMNS)
    assert isinstance(x, dict) is by_name
    np.testing.assert_array_equal(trial.model(x), np.full((3, 1), 107.0))
    keys = FEATURES if by_name else None
    fitted = KerasModel(
        model=trial.model,
        feature_columns=FEATURES,
        label_columns=["y"],
        _input_keys=keys,
        output_shapes=[[1]],
    )
    fitted.save(str(tmp_path / "model"))
    for found in (fitted, KerasModel.load(str(tmp_path / "model"))):
        document, load = found._make_predictor()
        (predicted,) = load(document)([COLUMNS["b"], COLUMNS["a"]])
        np.testing.assert_array_equal(predicted, np.full((3, 1), 107.0))


def test_nested_functional_models_get_columns_by_name() -> None:
    # With a tuple, the inner model would pair the first input with its first key.
    class Around(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
            self.inner = keras.Model({"a": a, "b": b}, 10 * b + a)

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

    columns = {**COLUMNS, "b": COLUMNS["b"][:, 0]}
    model = Around()
    model.compile("sgd", "mse")
    trial = DryRun(model, FEATURES, ["y"], None, None, copy=Around)
    trial.run(columns)
    np.testing.assert_array_equal(
        trial.model(trial.tensors.arrays(columns)[0]), np.full((3, 1), 57.0)
    )


def test_inputs_in_a_dict_pair_by_name_or_are_rejected() -> None:
    a, b = keras.Input((1,), name="a"), keras.Input((2,), name="b")
    functional = keras.Model({"b": b, "a": a}, keras.layers.Dense(1)(b) + a)
    found = input_structure(functional, FEATURES)
    assert {key: (f.column, f.shape) for key, f in found.items()} == {
        "b": ("b", (2,)),
        "a": ("a", (1,)),
    }
    called = make("index")
    called({"b": COLUMNS["b"], "a": COLUMNS["a"][:, None]})
    for model in (functional, called):
        with pytest.raises(ShapeError, match=r"keys .*rename columns"):
            input_structure(model, ["b", "c"])
    single = keras.Model({"b": b}, keras.layers.Dense(1)(b))
    assert input_structure(single, ["features"])["b"].column == "features"


def titled(structure: Callable[[Any, Any], Any]) -> keras.Model:
    """Return a model of 10 title + body, with inputs in a structure."""
    title, body = keras.Input((1,), name="title"), keras.Input((1,), name="body")
    return keras.Model(structure(title, body), 10 * title + body)


STRUCTURES: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda title, body: [title, body],
    "tuple": lambda title, body: (title, body),
    "nested": lambda title, body: [[title], {"key": body}],
}


@pytest.mark.parametrize("form", STRUCTURES)
def test_inputs_pair_by_name_if_all_names_are_columns(form: str) -> None:
    model = titled(STRUCTURES[form])

    def pairs(columns: list[str]) -> list[str]:
        return [field.column for field in keras.tree.flatten(input_structure(model, columns))]

    assert pairs(["body", "title"]) == pairs(["title", "body"]) == ["title", "body"]
    # One name is not a column: pair by position.
    assert pairs(["body", "text"]) == ["body", "text"]
    columns = {"title": np.ones(3, np.float32), "body": np.full(3, 5.0), "y": np.ones(3)}
    model.compile("sgd", "mse")
    trial = DryRun(model, ["body", "title"], ["y"], None, None)
    trial.run(columns)
    x, _ = trial.tensors.arrays(columns)
    np.testing.assert_array_equal(model(x), np.full((3, 1), 15.0))


@pytest.mark.usefixtures("spark")
def test_saved_models_pair_by_name(tmp_path: Path) -> None:
    model = KerasModel(
        model=titled(STRUCTURES["list"]),
        feature_columns=["body", "title"],
        label_columns=["y"],
        output_shapes=[[1]],
    )
    rows = {"body": np.full(3, 5.0), "title": np.ones(3)}

    def predicted(found: KerasModel, path: str) -> list[float]:
        document, load = found._make_predictor()
        (first, *_) = load(document)([rows["body"], rows["title"]])[0][:, 0]
        (second, *_) = np.ravel(load_predictor(path).predict(rows)["y__output"])
        return [float(first), float(second)]

    path = f"{tmp_path / 'model'}"
    model.save(path)
    assert predicted(model, path) == predicted(KerasModel.load(path), path) == [15.0, 15.0]


def test_the_dry_run_finds_undeclared_output_sizes() -> None:
    words = keras.Input((None,), dtype="int32")
    model = keras.Model(words, keras.layers.Embedding(9, 4)(words))
    model.compile("sgd", "mse")
    columns = {"w": np.zeros((3, 5), np.int64), "y": np.zeros((3, 20), np.float32)}
    trial = DryRun(model, ["w"], ["y"], None, None)
    assert trial.output_shapes == [(None, 4)]
    trial.run(columns)
    assert trial.output_shapes == [(5, 4)]
    # A label of the same size gets the output's shape.
    _, label = trial.tensors.arrays(columns)
    assert label.shape == (3, 5, 4)


class AddsLoss(keras.Model):
    """Autoencoder that compares nothing with labels."""

    def __init__(self, only_in_training: bool = False, by_row: bool = False) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.only_in_training = only_in_training
        self.by_row = by_row

    def call(self, x: Any, training: bool = False) -> Any:
        rebuilt = self.dense(x)
        if training or not self.only_in_training:
            self.add_loss(keras.ops.mean((rebuilt - x) ** 2, axis=1 if self.by_row else None))
        return rebuilt, x


def try_uncompared(model: keras.Model) -> DryRun:
    model.compile("sgd")
    trial = DryRun(model, ["b"], ["y"], None, None, compares=False)
    trial.run(COLUMNS)
    return trial


@pytest.mark.parametrize("only_in_training", [False, True])
def test_added_losses_suffice_as_a_loss(only_in_training: bool) -> None:
    trial = try_uncompared(AddsLoss(only_in_training))
    # The numbers of outputs and labels may differ.
    assert trial.output_shapes == [(2,), (2,)]
    assert trial.outputs is None
    with pytest.raises(ShapeError, match=r"2 outputs.*1 label"):
        DryRun(AddsLoss(), ["b"], ["y"], None, None).run(COLUMNS)


def test_the_loss_must_be_a_number() -> None:
    dense = keras.layers.Dense(1, kernel_regularizer="l2")
    assert not may_add_loss(keras.Sequential([keras.Input((2,)), dense]))
    assert may_add_loss(keras.Sequential([keras.layers.ActivityRegularization(l2=0.1)]))
    with pytest.raises(ShapeError, match=r"add_loss: expected a number, found shape \(3,\).*mean"):
        try_uncompared(AddsLoss(by_row=True))


class _OfKeras2:
    pass


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"model": _OfKeras2()}, "model: it is of Keras 2 .*keras instead of tf_keras"),
        ({"label_cols": []}, r"label_cols: found \[\], and loss.*train_step.*add_loss"),
        (
            {"label_cols": [], "loss": None, "sample_weight_col": "w"},
            r"sample_weight_col: .*label_cols is \[\]",
        ),
        ({"loss": None}, "loss is not set.*compile the model.*add_loss"),
    ],
)
def test_errors_suggest_alternatives(
    tmp_path: Any, monkeypatch: Any, params: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(_OfKeras2, "__module__", "tf_keras.src.models.sequential")
    given: dict[str, Any] = {
        "store": LocalStore(str(tmp_path)),
        "model": keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        "optimizer": "sgd",
        "loss": "mse",
        "feature_cols": ["b"],
        "label_cols": ["y"],
        "backend": LocalBackend(1),
        **params,
    }
    with pytest.raises(ParamError, match=message):
        KerasEstimator(**given).fit_on_parquet()


def test_models_without_a_call_fail_in_prediction_with_a_clear_error() -> None:
    class Trainer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.part = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    model = KerasModel(model=Trainer(), feature_columns=["x"], label_columns=[])
    with pytest.raises(
        ParamError, match=r"^model: Trainer has no call\(\), .*setModel\(\) to a part"
    ):
        model._output_shapes()
    assert model.setModel(model.getModel().part)._output_shapes() == [(1,)]
    # The shapes of a fit were those of the whole model.
    fitted = KerasModel(
        model=Trainer(), feature_columns=["x"], label_columns=[], output_shapes=[[2]]
    )
    x = keras.Input((2,))
    fitted.setModel(keras.Model(x, [keras.layers.Dense(3)(x), keras.layers.Dense(1)(x)]))
    assert fitted._output_shapes() == [(3,), (1,)]
    assert fitted.getOutputCols() == ["output_0", "output_1"]


def test_another_model_keeps_the_kind_of_the_outputs_if_it_has_the_same() -> None:
    def net(outputs: int) -> keras.Model:
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(outputs)])

    fitted = KerasModel(
        model=net(3), feature_columns=["x"], label_columns=["y"], output_shapes=[(3,)]
    )
    fitted._setDefault(outputs_are="logits", predictionCol="prediction")
    assert fitted.setModel(net(3)).numClasses == 3
    assert fitted.getPredictionCol() == "prediction"
    assert fitted.setModel(net(2)).numClasses is None
    assert (fitted.getPredictionCol(), fitted._output_shapes()) == (None, [(2,)])


def within_half(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.cast(keras.ops.abs(y_true - y_pred) < 0.5, "float32")


def squared(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.square(y_true - y_pred)


class Squared(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squared(y_true, y_pred)


class Within(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(within_half(y_true, y_pred), sample_weight)


class OwnLoss(keras.Model):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return keras.ops.mean(squared(y, y_pred))


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def flat(kind: type[keras.Model], **arguments: Any) -> keras.Model:
    """Return a model with an output of shape (rows,)."""
    keras.utils.set_random_seed(0)
    x = keras.Input((2,))
    model = kind(x, keras.ops.squeeze(keras.layers.Dense(1)(x), -1))
    model.compile("sgd", **{"loss": "mse", **arguments})
    return model


FLAT: dict[str, Callable[[], keras.Model]] = {
    "the loss Squared": lambda: flat(keras.Model, loss=Squared()),
    "the metric within_half": lambda: flat(keras.Model, metrics=["mae", within_half]),
    "the metric within": lambda: flat(keras.Model, metrics=[Within(name="within")]),
    "compute_loss": lambda: flat(OwnLoss),
    "train_step": lambda: flat(OwnStep),
}


@pytest.mark.parametrize("own", FLAT)
def test_labels_that_would_be_compared_with_all_rows_are_rejected(own: str) -> None:
    columns = {"x": np.ones((3, 2), np.float32), "y": np.arange(3, dtype=np.float32)}

    def run(label_shapes: Any) -> DryRun:
        trial = DryRun(FLAT[own](), ["x"], ["y"], None, label_shapes, copy=FLAT[own])
        trial.run(columns)
        return trial

    with pytest.raises(ShapeError, match=rf"found \(rows,\).* {own} would .*label_shapes=\[\[-1"):
        run(None)
    for shape in ([-1], [-1, 1]):
        _, label = run([shape]).tensors.arrays(columns)
        assert label.shape == (3, *shape[1:])


@pytest.mark.parametrize("loss", ["mse", keras.losses.Huber(), squared])
def test_labels_that_keras_aligns_are_not_rejected(loss: Any) -> None:
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(9, 2)).astype(np.float32), "y": rng.normal(size=9)}
    model = flat(keras.Model, loss=loss, metrics=["mae"])
    trial = DryRun(model, ["x"], ["y"], None, None)
    trial.run(columns)
    found = model.test_on_batch(*trial.tensors.arrays(columns))
    alone = flat(keras.Model, loss=loss, metrics=["mae"])
    np.testing.assert_allclose(found, alone.test_on_batch(columns["x"], columns["y"]), rtol=1e-5)
