"""Columns of classifiers, compared with closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.inference.classification import ClassScores
from hvd_estimators.torch import TorchEstimator, TorchModel

ALL = ("prediction", "probability", "raw")


def scores(kind: str, output: Any) -> Any:
    return ClassScores(kind, ALL)(np.array(output, np.float32))


def test_logits_become_probabilities_and_the_most_likely_class() -> None:
    made = scores("logits", [[0.0, math.log(3), 0.0], [1000.0, 0.0, 0.0]])

    np.testing.assert_allclose(made["probability"], [[0.2, 0.6, 0.2], [1, 0, 0]], atol=1e-6)
    assert made["prediction"].tolist() == [1.0, 0.0]
    assert made["raw"][1].tolist() == [1000.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "output", "raw"),
    [
        ("logits", math.log(3), [-math.log(3), math.log(3)]),
        ("probabilities", 0.75, [0.25, 0.75]),
        ("log_probabilities", math.log(0.75), [math.log(0.25), math.log(0.75)]),
    ],
)
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_single_score_belongs_to_class_1(kind: str, output: float, raw: Any, shape: Any) -> None:
    made = scores(kind, np.full(shape, output))

    np.testing.assert_allclose(made["probability"], [[0.25, 0.75]], atol=1e-6)
    np.testing.assert_allclose(made["raw"], [raw], atol=1e-6)
    assert made["prediction"].tolist() == [1.0]


def test_log_probabilities_are_exponentiated() -> None:
    made = scores("log_probabilities", np.log([[0.1, 0.2, 0.7]]))

    np.testing.assert_allclose(made["probability"], [[0.1, 0.2, 0.7]], atol=1e-6)
    assert made["prediction"].tolist() == [2.0]


def test_values_become_predictions_unchanged() -> None:
    made = ClassScores("values", ("prediction",))(np.array([[1.5], [-2.0]]))

    assert made["prediction"].tolist() == [1.5, -2.0]


@pytest.mark.parametrize("kind", ["multilabel_logits", "multilabel_probabilities"])
def test_independent_labels_have_their_own_probabilities_and_predictions(kind: str) -> None:
    probability = [[0.9, 0.75, 0.25], [0.5, 0.1, math.nan]]
    logits = [[math.log(p / (1 - p)) for p in row] for row in probability]
    given = logits if kind == "multilabel_logits" else probability

    made = scores(kind, given)

    np.testing.assert_allclose(made["probability"], probability, atol=1e-6)
    np.testing.assert_allclose(made["raw"], given, atol=1e-6)
    np.testing.assert_array_equal(made["prediction"], [[1, 1, 0], [0, 0, math.nan]])
    assert set(ClassScores(kind, ALL).fields((3,)).values()) == {(3,)}


def test_large_logits_of_labels_do_not_overflow() -> None:
    made = scores("multilabel_logits", [[-1000.0, 1000.0]])

    assert made["probability"].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("value", ["logits", "probabilities"])
def test_a_loss_of_labels_makes_class_scores_those_of_labels(value: str) -> None:
    model = TorchModel(outputs_are=value, probabilityCol="p", output_shapes=[(3,)])
    assert model._class_scores([(3,)]) == ClassScores(value, ("probability",))
    assert model.numClasses == 3
    model._setDefault(outputs_are="multilabel_logits")
    assert model._class_scores([(3,)]) == ClassScores(f"multilabel_{value}", ("probability",))
    assert model.numClasses is None
    # One label has two classes.
    assert model._class_scores([(1,)]) == ClassScores(value, ("probability",))


@pytest.mark.parametrize("kind", ["probabilities", "log_probabilities", "multilabel_probabilities"])
def test_invalid_probabilities_are_rejected(kind: str) -> None:
    with pytest.raises(DataError, match=rf"outputs_are='{kind}'.*found \[1.5, -0.5\] for a row"):
        scores(kind, [[1.5, -0.5]])


def test_rows_with_nan_have_no_class() -> None:
    made = scores("logits", [[np.nan, 1.0], [0.0, 1.0]])

    assert np.isnan(made["prediction"][0])
    assert made["prediction"][1] == 1.0


@pytest.mark.parametrize(
    ("params", "shapes", "message"),
    [
        ({"predictionCol": "p"}, [()], r"predictionCol: outputs_are is not set"),
        ({"probabilityCol": "p"}, [(3,)], r"probabilityCol: outputs_are is not set"),
        ({"rawPredictionCol": "p"}, [(3,), (3,)], r"rawPredictionCol: expected a model with one"),
        (
            {"predictionCol": "p"},
            [(3, 3)],
            r"predictionCol: expected .* a number or a vector per row",
        ),
        (
            {"predictionCol": "p", "outputs_are": "values"},
            [(3,)],
            r"takes a model that gives a number per row",
        ),
        ({"probabilityCol": "p", "outputs_are": "values"}, [()], r"not class scores"),
    ],
)
def test_unavailable_columns_are_rejected(params: Any, shapes: Any, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        TorchModel(**params)._class_scores(shapes)


def test_estimators_reject_unavailable_columns_before_preparing_data(store: Any) -> None:
    net = torch.nn.Linear(1, 1)
    params = {"store": store, "model": net, "feature_cols": ["x"], "label_cols": ["y"]}
    params["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.1)
    params["loss"] = torch.nn.functional.mse_loss

    Fit(TorchEstimator(**params, predictionCol="p")).check()
    with pytest.raises(ParamError, match="probabilityCol: outputs_are is not set"):
        Fit(TorchEstimator(**params, probabilityCol="p")).check()
    two = {**params, "label_cols": ["y", "z"]}
    with pytest.raises(ParamError, match="rawPredictionCol: expected a model with one output"):
        Fit(TorchEstimator(**two, rawPredictionCol="p")).check()


def test_estimators_pass_inference_params_to_their_models() -> None:
    given = {"inference_batch_size": 7, "inference_precision": "bfloat16", "handleInvalid": "skip"}
    fitted = {"model": None, "history": None, "run_id": "r", "metadata": {}, "optimizer": None}

    kwargs = TorchEstimator(**given)._get_model_kwargs(**fitted)
    assert {name: kwargs[name] for name in given} == given
    assert not set(given) & set(TorchEstimator()._get_model_kwargs(**fitted))
