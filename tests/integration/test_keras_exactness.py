"""Matrix of exactness in Keras on TensorFlow; validation, schedules, resumed runs and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import exactness
import keras
import keras_exactness
import numpy as np
import pytest
from exactness import KINDS, SITUATIONS
from keras_reference import OPTIMIZERS, assert_same_weights, make_net, pooled_estimator, train_alone
from rank_pool import shared_ranks
from reference import WIDTH, global_batches, write_rows
from sklearn.metrics import f1_score, precision_score
from variants import others_in_soak

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError

pytestmark = pytest.mark.integration

COLLECTIVES = ("torch", "horovod")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    for module in (exactness, keras_exactness):
        cloudpickle.register_pickle_by_value(module)
    return exactness.write_all(tmp_path_factory.mktemp("rows"))


def in_ci(kind: str, situation: str) -> str:
    """Return the collectives of a cell in CI: each kind and each situation has both."""
    # With an empty batch, the weight in a sum is a constant on one rank only. Horovod takes it.
    shift = kind == "sum"
    return COLLECTIVES[([*KINDS].index(kind) + [*SITUATIONS].index(situation) + shift) % 2]


@pytest.mark.parametrize(
    ("kind", "situation", "collectives"),
    [
        pytest.param(*cell, library, marks=() if library == in_ci(*cell) else pytest.mark.soak)
        for cell in keras_exactness.CELLS
        for library in COLLECTIVES
    ],
)
def test_cells_of_the_matrix(
    paths: Any, store: Store, kind: str, situation: str, collectives: str
) -> None:
    ranks = shared_ranks(2, "tensorflow")
    keras_exactness.check(ranks, store, paths, kind, situation, collectives)


@pytest.mark.parametrize("collectives", others_in_soak("torch", "horovod"))
def test_validation_matches_one_process_and_the_rate_is_unscaled(
    store: Any, collectives: str
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 128)
    # Fewer validation rows than ranks: one rank has none.
    held_out = write_rows(Path(store.get_val_data_path()), 2, seed=1)
    fitted = pooled_estimator(
        store,
        3,
        batch_size=16,
        validation=0.5,
        metrics=["mae", keras.metrics.RootMeanSquaredError()],
        scale_learning_rate=True,
        collectives=collectives,
    ).fit_on_parquet()
    model, history = fitted.getModel(), fitted.getHistory()
    batches = global_batches(128, 3, 16)
    assert_same_weights(model, train_alone(columns, batches, keras.optimizers.SGD(0.15), 1))
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    errors = model.predict(held_out["features"], verbose=0)[:, 0] - held_out["label"]
    assert history["val_loss"] == [pytest.approx(float((errors**2).mean()), rel=1e-5)]
    assert history["val_mae"] == [pytest.approx(np.abs(errors).mean(), rel=1e-5)]
    assert history["val_root_mean_squared_error"] == [
        pytest.approx(np.sqrt((errors**2).mean()), rel=1e-5)
    ]
    assert list(history) == [
        *("loss", "mae", "root_mean_squared_error"),
        *("val_loss", "val_mae", "val_root_mean_squared_error"),
    ]


def summed_estimator(store: Any, collectives: str, val_rows: int, val_batch_size: int) -> Any:
    write_rows(Path(store.get_train_data_path()), 16)
    write_rows(Path(store.get_val_data_path()), val_rows, seed=1)
    return pooled_estimator(
        store,
        2,
        loss=keras.losses.MeanSquaredError(reduction="sum"),
        optimizer=keras.optimizers.SGD(0.001),
        batch_size=4,
        validation=0.5,
        val_batch_size=val_batch_size,
        collectives=collectives,
    )


@pytest.mark.parametrize("collectives", COLLECTIVES)
def test_a_sum_is_validated_on_equal_numbers_of_batches(store: Any, collectives: str) -> None:
    fitted = summed_estimator(store, collectives, val_rows=7, val_batch_size=2).fit_on_parquet()
    held_out = write_rows(Path(store.get_val_data_path()), 7, seed=1)
    guess = fitted.getModel().predict(held_out["features"], verbose=0)[:, 0]
    errors = (guess - held_out["label"]) ** 2
    # Keras weights the sums of the global batches by their rows.
    total = sum(len(rows) * errors[rows].sum() for rows in global_batches(7, 2, 2))
    assert fitted.getHistory()["val_loss"] == [pytest.approx(total / 7, rel=1e-5)]


@pytest.mark.parametrize("collectives", COLLECTIVES)
@pytest.mark.parametrize("val_rows", [1, 3])
def test_a_sum_is_an_error_if_a_rank_has_fewer_validation_batches(
    store: Any, val_rows: int, collectives: str
) -> None:
    estimator = summed_estimator(store, collectives, val_rows, val_batch_size=1)
    # The shared ranks' error.
    with pytest.raises(AssertionError, match=r"ParamError: loss: .* Set val_batch_size to 2"):
        estimator.fit_on_parquet()


class Noted(keras.layers.Layer):
    """Layer that records a rank's dropout mask in each step."""

    def __init__(self, directory: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.directory = directory

    def call(self, x: Any, training: bool = False) -> Any:
        import os

        import tensorflow as tf

        def note(values: Any) -> np.int32:
            with open(f"{directory}/{os.environ['HOROVOD_RANK']}", "a") as file:
                print("".join(str(int(value != 0)) for value in values.numpy()[0]), file=file)
            return np.int32(0)

        directory = self.directory
        if not training or "HOROVOD_RANK" not in os.environ:
            return x
        with tf.control_dependencies([tf.py_function(note, [x], tf.int32)]):
            return tf.identity(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "directory": self.directory}


def statistics_net(directory: Path) -> keras.Model:
    directory.mkdir(exist_ok=True)
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization(momentum=0.5)(inputs)
    hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer="l2")(hidden)
    hidden = keras.layers.Dropout(0.2)(hidden)
    noise = keras.layers.Dense(32, kernel_initializer="zeros", bias_initializer="ones")(inputs)
    noise = Noted(str(directory))(keras.layers.Dropout(0.5)(noise))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, noise])))


@pytest.mark.parametrize("collectives", others_in_soak("horovod", "torch"))
def test_a_resumed_run_and_its_callbacks_match_an_uninterrupted_one(
    store: Any, tmp_path: Path, collectives: str
) -> None:
    write_rows(Path(store.get_train_data_path()), 200)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)

    def fit(epochs: int, run_id: str) -> Any:
        return pooled_estimator(
            store,
            3,
            model=statistics_net(tmp_path / run_id),
            optimizer=keras.optimizers.Adam(0.05),
            batch_size=16,
            epochs=epochs,
            run_id=run_id,
            validation=0.1,
            shuffle=True,
            scale_learning_rate=True,
            collectives=collectives,
            # Counts epochs without much progress, and keeps the count after a restart.
            callbacks=[keras.callbacks.ReduceLROnPlateau(patience=2, min_delta=1e9)],
        ).fit_on_parquet()

    whole = fit(5, "whole")
    fit(2, "parts")
    resumed = fit(5, "parts")
    assert len(resumed.getHistory()["loss"]) == 5
    # This also shows that three ranks sum in the same order in every run.
    assert resumed.getHistory() == whole.getHistory()
    # No epoch is left: the model is the checkpoint's.
    again = fit(5, "parts")

    def variables(fitted: Any) -> list[Any]:
        """Return the weights, the states of random layers, and those of the optimizer."""
        model = fitted.getModel()
        return [*model.variables, *model.optimizer.variables]

    for other in (resumed, again):
        for a, b in zip(variables(whole), variables(other), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    rates = whole.getHistory()["learning_rate"]
    assert rates[-1] < rates[0] == pytest.approx(0.05)
    # Dropout masks differ between ranks and steps, and are the same in the resumed run.
    masks = [(tmp_path / "whole" / str(rank)).read_text().split() for rank in range(3)]
    steps = 5 * 5
    assert list(map(len, masks)) == [steps] * 3
    assert len(set(masks[0] + masks[1] + masks[2])) == 3 * steps
    parts = [(tmp_path / "parts" / str(rank)).read_text().split() for rank in range(3)]
    assert parts == masks


def test_training_continues_a_copy_of_the_given_model_and_optimizer(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    net, optimizer = make_net(), OPTIMIZERS["momentum"]()
    net.compile(optimizer, "mse", jit_compile=False)
    net.fit(columns["features"], columns["label"], batch_size=64, shuffle=False, verbose=0)
    before = [variable.numpy() for variable in [*net.variables, *optimizer.variables]]
    fitted = pooled_estimator(store, 1, model=net, optimizer=None, loss=None, batch_size=64)
    model = fitted.fit_on_parquet().getModel()
    for variable, value in zip([*net.variables, *optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    net.fit(columns["features"], columns["label"], batch_size=64, shuffle=False, verbose=0)
    assert_same_weights(model, net)
    assert type(model.optimizer) is keras.optimizers.SGD
    assert int(model.optimizer.iterations) == 2


def classifier_metrics() -> list[keras.metrics.Metric]:
    return [
        keras.metrics.AUC(name="auc"),
        keras.metrics.F1Score(average="macro", threshold=0.5, name="f1"),
        keras.metrics.Precision(name="precision"),
        "accuracy",
    ]


@pytest.mark.parametrize("is_compiled", others_in_soak(True, False))
def test_stateful_metrics_match_one_process_and_scikit_learn(store: Any, is_compiled: bool) -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [keras.Input((WIDTH,)), keras.layers.Dense(1, activation="sigmoid")]
        )

    columns = {}
    for path, rows, stage in (
        (store.get_train_data_path(), 41, ""),
        (store.get_val_data_path(), 17, "val_"),
    ):
        written = write_rows(Path(path), rows, seed=rows)
        columns[stage] = written["features"], (written["label"] > 0.5).astype(np.float32)

    def binary(row_batch: Any) -> Any:
        return {**row_batch, "label": (row_batch["label"] > 0.5).astype(np.float32)}

    model, settings = make(), {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"}
    given: dict[str, Any] = {**settings, "metrics": classifier_metrics()}
    if is_compiled:
        model.compile(**given)
        given = dict.fromkeys(given)
    history = (
        pooled_estimator(
            store,
            2,
            model=model,
            **given,
            transformation_batch_fn=binary,
            validation=0.3,
            batch_size=8,
            val_batch_size=8,
            epochs=1,
        )
        .fit_on_parquet()
        .getHistory()
    )
    alone = make()
    alone.compile(**settings, metrics=classifier_metrics())
    for stage, (features, label) in columns.items():
        expected = alone.evaluate(features, label[:, None], verbose=0, return_dict=True)
        guess = alone.predict(features, verbose=0)[:, 0] > 0.5
        for name, value in expected.items():
            assert history[f"{stage}{name}"] == [pytest.approx(value, rel=1e-5)], (stage, name)
        assert history[f"{stage}f1"] == [pytest.approx(f1_score(label, guess), rel=1e-5)]
        precision = pytest.approx(precision_score(label, guess), rel=1e-5)
        assert history[f"{stage}precision"] == [precision]


@keras.saving.register_keras_serializable("tests")
class PerRow(keras.losses.Loss):
    """Mean over the rows, made of a sum that another loss computes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total = keras.losses.MeanSquaredError(reduction="sum")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        rows = keras.ops.cast(keras.ops.shape(y_pred)[0], "float32")
        return self.total(y_true, y_pred) / rows


@pytest.mark.parametrize("collectives", others_in_soak("torch", "horovod"))
def test_a_loss_that_calls_another_one_is_weighted_once(store: Any, collectives: str) -> None:
    # The last batches of the ranks differ in their rows.
    columns = write_rows(Path(store.get_train_data_path()), 37)
    given = {"batch_size": 8, "loss": PerRow(), "collectives": collectives}
    fitted = pooled_estimator(store, 2, **given).fit_on_parquet()
    expected = train_alone(columns, global_batches(37, 2, 8), OPTIMIZERS["sgd"](), 1)
    assert_same_weights(fitted.getModel(), expected)


@keras.saving.register_keras_serializable("tests")
class Squared(keras.losses.Loss):
    """Squares of differences, in whichever shapes."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.square(y_true - y_pred)


def within_half(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.cast(keras.ops.abs(y_true - y_pred) < 0.5, "float32")


def test_label_shapes_fit_outputs_without_further_dimensions(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 37)

    def flat() -> keras.Model:
        net = make_net()
        return keras.Model(net.inputs, keras.ops.squeeze(net.outputs[0], -1))

    given = {"batch_size": 8, "loss": Squared(), "metrics": [within_half], "epochs": 2}
    fitted = pooled_estimator(store, 2, model=flat(), label_shapes=[[-1]], **given).fit_on_parquet()

    alone = flat()
    alone.compile(OPTIMIZERS["sgd"](), Squared(), metrics=[within_half])
    history = fitted.getHistory()
    for epoch in range(2):
        batches = (
            (columns["features"][rows], columns["label"][rows]) for rows in global_batches(37, 2, 8)
        )
        expected = alone.fit(batches, verbose=0).history
        for name in ("loss", "within_half"):
            assert history[name][epoch] == pytest.approx(expected[name][0], rel=1e-4), name
    assert_same_weights(fitted.getModel(), alone)


def test_what_an_optimizer_does_not_decay_stays_so(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)

    def optimizer() -> keras.optimizers.Optimizer:
        made = keras.optimizers.AdamW(0.01, weight_decay=5.0)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    fitted = pooled_estimator(store, 2, batch_size=8, optimizer=optimizer()).fit_on_parquet()
    batches = global_batches(64, 2, 8)
    assert_same_weights(fitted.getModel(), train_alone(columns, batches, optimizer(), 1))
    decayed = train_alone(columns, batches, keras.optimizers.AdamW(0.01, weight_decay=5.0), 1)
    with pytest.raises(AssertionError):
        assert_same_weights(fitted.getModel(), decayed)
    net = make_net()
    given = optimizer()
    given.exclude_from_weight_decay(var_list=net.trainable_variables[:1])
    with pytest.raises(ParamError, match=r"optimizer: .*var_list=.*give var_names"):
        pooled_estimator(store, 2, model=net, optimizer=given).fit_on_parquet()
