"""The params of a classifier's columns, in an estimator and in its model. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.classification import (
    ClassScores,
    check_classes,
    class_columns,
    class_scores,
)
from hvd_estimators.params import DeclaredParams, declare, one_of, text

__all__ = ["ClassificationParams"]

_ONE_VS_REST = "mc2b$"
"""What the names of the labels that Spark's ``OneVsRest`` makes begin with."""


class ClassificationParams(DeclaredParams):
    """Params of what `transform` adds for a classifier, in an estimator and in its model."""

    predictionCol = declare(
        "Column for the class (a double: the position of the highest score), which transform() "
        "adds beside the output's. With outputs_are='values' the output itself. Default: none.",
        convert=text,
        accessor="PredictionCol",
    )
    probabilityCol = declare(
        "Column for the classes' probabilities, an ML vector. Default: none.",
        convert=text,
        accessor="ProbabilityCol",
    )
    rawPredictionCol = declare(
        "Column for the classes' scores as the model gives them, an ML vector. Default: none.",
        convert=text,
        accessor="RawPredictionCol",
    )
    outputs_are = declare(
        "What the model's output is: 'logits' (scores of any size; their softmax, or the sigmoid "
        "of a single one, are the probabilities), 'probabilities', 'log_probabilities', or "
        "'values' (no scores of classes). A single score is that of class 1 of two: raw scores are "
        "[-z, z] for a logit and [1 - p, p] for a probability. For probabilityCol, and for the "
        "other two columns where the output is a single number.",
        convert=one_of("logits", "probabilities", "log_probabilities", "values"),
    )

    def _classification(self) -> dict[str, Any]:
        """Return these params, those that are set, as an estimator gives them to its model."""
        return {
            name: self.getOrDefault(name)
            for name in ClassificationParams._declarations
            if self.isSet(name)
        }

    def _class_columns(self) -> dict[str, str]:
        """Return the columns that are wanted: what they hold, to their names."""
        return class_columns(self.getOrDefault)

    def _check_classification(self, outputs: int) -> None:
        """Check these params as far as that is possible before the outputs' shapes are known."""
        check_classes(self.getOrDefault, outputs)

    def _check_one_vs_rest(self) -> None:
        """Make sure that a classifier of Spark's ``OneVsRest`` gives the scores that it compares.

        Raises
        ------
        ParamError
            If it does not: `OneVsRest` would find out after training all classes.
        """
        labels = self.getOrDefault("label_cols") or [""]
        if labels[0].startswith(_ONE_VS_REST) and not self.getOrDefault("rawPredictionCol"):
            raise ParamError(
                "rawPredictionCol: OneVsRest compares the scores that its classifiers put into "
                "this column, found none. Set rawPredictionCol in the classifier to that of "
                "OneVsRest, 'rawPrediction' by default, and outputs_are to what the model's "
                "output is, 'logits' for example."
            )

    def _class_scores(self, shapes: Sequence[tuple[int | None, ...]]) -> ClassScores | None:
        """Return what makes the columns; None if none is wanted."""
        return class_scores(self.getOrDefault, shapes)
