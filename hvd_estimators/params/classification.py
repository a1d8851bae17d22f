"""The params of a classifier's columns, in an estimator and in its model. Runs on the driver."""

from __future__ import annotations

from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.classification import ClassScores
from hvd_estimators.params import DeclaredParams, declare, one_of, text

__all__ = ["ClassificationParams"]


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
        columns = {
            "prediction": self.getOrDefault("predictionCol"),
            "probability": self.getOrDefault("probabilityCol"),
            "raw": self.getOrDefault("rawPredictionCol"),
        }
        return {content: name for content, name in columns.items() if name}

    def _check_classification(self, outputs: int) -> None:
        """Check these params as far as that is possible before the outputs' shapes are known.

        Raises
        ------
        ParamError
            If they do not go together, or not with so many outputs.
        """
        wanted = self._class_columns()
        if not wanted:
            return
        kind, names = self.getOrDefault("outputs_are"), self._class_column_params()
        if outputs != 1:
            raise ParamError(
                f"{names}: expected a model with one output, found {outputs}. Leave them out."
            )
        if kind is None and "probability" in wanted:
            raise self._kind_is_missing()
        if kind == "values" and set(wanted) != {"prediction"}:
            raise ParamError(
                f"{names}: outputs_are='values' are no scores of classes, which are for "
                "predictionCol alone. Set 'logits', 'probabilities' or 'log_probabilities'."
            )

    def _class_scores(self, shapes: list[tuple[int, ...]]) -> ClassScores | None:
        """Return what makes the columns; None if none is wanted.

        Raises
        ------
        ParamError
            If they cannot be made of outputs of these shapes.
        """
        wanted = self._class_columns()
        if not wanted:
            return None
        self._check_classification(len(shapes))
        kind, names = self.getOrDefault("outputs_are"), self._class_column_params()
        shape = tuple(shapes[0])
        single = shape in ((), (1,))
        if len(shape) > 1:
            raise ParamError(
                f"{names}: expected a model that gives a number or a vector per row, found shape "
                f"{shape}. Leave the columns out."
            )
        if kind is None and single:
            raise self._kind_is_missing()
        if kind == "values" and not single:
            raise ParamError(
                f"{names}: outputs_are='values' takes a model that gives a number per row, found "
                f"shape {shape}. Set 'logits', 'probabilities' or 'log_probabilities'."
            )
        return ClassScores(kind or "logits", tuple(wanted))

    def _class_column_params(self) -> str:
        names = {"prediction": "predictionCol", "probability": "probabilityCol"}
        return ", ".join(names.get(name, "rawPredictionCol") for name in self._class_columns())

    def _kind_is_missing(self) -> ParamError:
        return ParamError(
            f"{self._class_column_params()}: outputs_are is not set. Set outputs_are to what the "
            "model gives: 'logits', 'probabilities' or 'log_probabilities' of classes, or 'values'."
        )
