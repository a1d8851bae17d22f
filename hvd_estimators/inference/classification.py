"""A classifier's columns as Spark ML has them: prediction, probability, rawPrediction.

Runs on the executors; the params are in `hvd_estimators.params.classification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hvd_estimators.exceptions import DataError
from hvd_estimators.parquet.columns import Array

__all__ = ["ClassScores"]

# Sums of probabilities differ from one by more than this in a model that gives none. Half
# precision has three digits.
_TOLERANCE = 0.02


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
