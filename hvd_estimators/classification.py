"""A classifier's columns as Spark ML has them: prediction, probability, rawPrediction.

The params are the driver's; `ClassScores` runs on the executors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.params import DeclaredParams, declare, one_of, text
from hvd_estimators.parquet.columns import Array

__all__ = ["ClassScores", "ClassificationParams"]

# Sums of probabilities differ from one by more than this in a model that gives none. Half
# precision has three digits.
_TOLERANCE = 0.02


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


@dataclass(frozen=True)
class ClassScores:
    """Makes a classifier's columns of its output.

    Attributes
    ----------
    kind : str
        What the output is, see ``outputs_are``.
    wanted : tuple of str
        Some of ``prediction``, ``probability`` and ``raw``.
    """

    kind: str
    wanted: tuple[str, ...]

    def fields(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the names, and the shapes of a row, of what is made of an output of a shape."""
        classes = max(int(np.prod(shape)), 2)
        return {name: () if name == "prediction" else (classes,) for name in self.wanted}

    def __call__(self, output: Array) -> Mapping[str, Array]:
        """Return the columns of some rows.

        Parameters
        ----------
        output : array
            Scores, of shape (rows, classes), (rows, 1) or (rows,).

        Raises
        ------
        DataError
            If probabilities are wanted and the output has none.
        """
        scores = output.reshape(len(output), -1).astype(np.float64)
        if self.kind == "values":
            return {"prediction": scores[:, 0]}
        raw = _of_two_classes(scores[:, 0], self.kind) if scores.shape[1] == 1 else scores
        made = {"raw": raw, "prediction": _highest(raw)}
        if "probability" in self.wanted or self.kind != "logits":
            made["probability"] = self._probabilities(scores, raw)
        return made

    def _probabilities(self, scores: Array, raw: Array) -> Array:
        if self.kind == "logits":
            # -z and z differ by 2 z, and the probability is the sigmoid of z.
            logits = raw / 2 if scores.shape[1] == 1 else raw
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            return powers / powers.sum(axis=1, keepdims=True)
        given = scores if self.kind == "probabilities" else np.exp(scores)
        total = given.sum(axis=1) if given.shape[1] > 1 else np.ones(len(given))
        # NaN, which is neither, is left as it is.
        wrong = (given < 0) | (given > 1 + _TOLERANCE)
        if wrong.any() or (np.abs(total - 1) > _TOLERANCE).any():
            row = int(np.argmax(wrong.any(axis=1) | (np.abs(total - 1) > _TOLERANCE)))
            raise DataError(
                f"outputs_are={self.kind!r}: the model's output is not that, found "
                f"{scores[row].tolist()} for a row. Set outputs_are='logits' for scores of any "
                "size."
            )
        return given if given.shape[1] > 1 else np.column_stack([1 - given[:, 0], given[:, 0]])


def _of_two_classes(score: Array, kind: str) -> Array:
    """Return the scores of classes 0 and 1 of that of class 1."""
    if kind == "logits":
        return np.column_stack([-score, score])
    if kind == "probabilities":
        return np.column_stack([1 - score, score])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.column_stack([np.log1p(-np.exp(score)), score])


def _highest(raw: Array) -> Array:
    """Return the positions of the highest scores, the first of equal ones; NaN where one is NaN."""
    positions = raw.argmax(axis=1).astype(np.float64)
    positions[np.isnan(raw).any(axis=1)] = np.nan
    return positions
