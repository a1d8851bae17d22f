"""Spark ML's columns of a classifier: prediction, probability and rawPrediction.

Executors compute the columns. The params are in `hvd_estimators.params.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import DataError, ParamError

_PARAMS = {
    "prediction": "predictionCol",
    "probability": "probabilityCol",
    "raw": "rawPredictionCol",
}

_PER_LABEL = "multilabel_"
"""Prefix of the kinds of outputs that are scores of independent labels."""

KINDS = (
    *("logits", "probabilities", "log_probabilities"),
    *(f"{_PER_LABEL}logits", f"{_PER_LABEL}probabilities"),
    "values",
)
"""Kinds of outputs, the values of ``outputs_are``."""

_SCORES = (
    "'logits', 'probabilities' or 'log_probabilities' of classes, 'multilabel_logits' or "
    "'multilabel_probabilities' of independent labels"
)

# Maximum deviation of a sum of probabilities from one. Outputs that are not probabilities deviate
# more; half precision has three digits.
_TOLERANCE = 0.02


@dataclass(frozen=True)
class ClassScores:
    """Conversion of a classifier's output to its columns.

    Attributes
    ----------
    kind : str
        Kind of the output, see ``outputs_are``.
    requested : tuple of str
        Requested columns: some of ``prediction``, ``probability`` and ``raw``.
    """

    kind: str
    requested: tuple[str, ...]

    def fields(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the columns' names and the shapes of their rows, given the output's shape."""
        # If a size is known only from a batch, only the number of dimensions counts.
        classes = max(int(np.prod([size or 1 for size in shape])), 2)
        is_class = not is_multilabel(self.kind)
        return {
            name: () if name == "prediction" and is_class else (classes,) for name in self.requested
        }

    def __call__(self, output: Array) -> Mapping[str, Array]:
        """Return the columns for some rows.

        Parameters
        ----------
        output : array
            Scores, of shape (rows, classes), (rows, 1) or (rows,).

        Raises
        ------
        DataError
            If the output should hold probabilities, or their logarithms, and does not.
        """
        scores = output.reshape(len(output), -1).astype(np.float64)
        if self.kind == "values":
            return {"prediction": scores[:, 0]}
        if is_multilabel(self.kind):
            return self._per_label(scores)
        raw = _of_two_classes(scores[:, 0], self.kind) if scores.shape[1] == 1 else scores
        made = {"raw": raw, "prediction": _highest(raw)}
        if "probability" in self.requested or self.kind != "logits":
            made["probability"] = self._probabilities(scores, raw)
        return made

    def _per_label(self, scores: Array) -> Mapping[str, Array]:
        """Return the columns of independent labels: a vector with an entry per label in each."""
        if self.kind == f"{_PER_LABEL}logits":
            with np.errstate(invalid="ignore"):  # NaN
                probability = np.exp(-np.logaddexp(0, -scores))  # the sigmoid, without overflow
            is_set = scores > 0
        else:
            probability = self._checked(scores, (scores < 0) | (scores > 1 + _TOLERANCE))
            is_set = scores > 0.5
        prediction = np.where(np.isnan(scores), np.nan, is_set)
        return {"raw": scores, "probability": probability, "prediction": prediction}

    def _probabilities(self, scores: Array, raw: Array) -> Array:
        if self.kind == "logits":
            # The raw scores -z and z differ by 2 z, and the probability is the sigmoid of z.
            logits = raw / 2 if scores.shape[1] == 1 else raw
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            return powers / powers.sum(axis=1, keepdims=True)
        given = scores if self.kind == "probabilities" else np.exp(scores)
        total = given.sum(axis=1) if given.shape[1] > 1 else np.ones(len(given))
        # NaN fulfils neither condition and stays NaN.
        wrong = (given < 0) | (given > 1 + _TOLERANCE)
        self._checked(scores, wrong | (np.abs(total - 1) > _TOLERANCE)[:, None])
        return given if given.shape[1] > 1 else np.column_stack([1 - given[:, 0], given[:, 0]])

    def _checked(self, scores: Array, wrong: Array) -> Array:
        """Return scores if no score is ``wrong``."""
        if wrong.any():
            row = int(np.argmax(wrong.any(axis=1)))
            raise DataError(
                f"outputs_are={self.kind!r}: the model's output has other values, found "
                f"{scores[row].tolist()} for a row. Set outputs_are='logits' for scores of any "
                "size, or 'multilabel_logits' or 'multilabel_probabilities' for independent labels."
            )
        return scores


def is_multilabel(kind: str | None) -> bool:
    """Return whether outputs of this kind are scores of independent labels."""
    return kind is not None and kind.startswith(_PER_LABEL)


def of_labels(kind: str) -> str:
    """Return the kind of outputs whose entries are each scores of this kind for one label."""
    return f"{_PER_LABEL}{kind}"


def resolve_kind(given: str | None, told: str | None) -> str | None:
    """Return the kind of outputs, from the set value of ``outputs_are`` and what the loss tells.

    A loss of independent labels gives logits and probabilities of labels, not of classes.
    """
    if given is not None and is_multilabel(told) and of_labels(given) in KINDS:
        return of_labels(given)
    return given or told


def _of_two_classes(score: Array, kind: str) -> Array:
    """Return the scores of classes 0 and 1, given the score of class 1."""
    if kind == "logits":
        return np.column_stack([-score, score])
    if kind == "probabilities":
        return np.column_stack([1 - score, score])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.column_stack([np.log1p(-np.exp(score)), score])


def _highest(raw: Array) -> Array:
    """Return each row's position of the highest score: the first of equals, NaN if any is NaN."""
    positions = raw.argmax(axis=1).astype(np.float64)
    positions[np.isnan(raw).any(axis=1)] = np.nan
    return positions


def class_columns(get: Callable[[str], Any]) -> dict[str, str]:
    """Return the names of the requested columns by content, given a function that reads params."""
    columns = {content: get(param) for content, param in _PARAMS.items()}
    return {content: name for content, name in columns.items() if name}


def check_classes(requested: Mapping[str, str], kind: str | None, outputs: int) -> None:
    """Check the params as far as possible before the outputs' shapes are known.

    Parameters
    ----------
    requested : mapping
        The requested columns, see `class_columns`.
    kind : str or None
        The value of ``outputs_are``.
    outputs : int
        Number of the model's outputs.

    Raises
    ------
    ParamError
        If the params contradict each other, or if the model does not have exactly one output.
    """
    if not requested:
        return
    if outputs != 1:
        raise ParamError(
            f"{_named(requested)}: expected a model with one output, found {outputs}. Leave them "
            "out."
        )
    if kind is None and "probability" in requested:
        raise _kind_is_missing(requested)
    if kind == "values" and set(requested) != {"prediction"}:
        raise ParamError(
            f"{_named(requested)}: outputs_are='values' are not class scores; only "
            f"predictionCol accepts them. Set {_SCORES}."
        )


def class_scores(
    requested: Mapping[str, str], kind: str | None, shapes: Sequence[tuple[int | None, ...]]
) -> ClassScores | None:
    """Return the conversion to a classifier's columns; None if no column is requested.

    Parameters
    ----------
    requested, kind
        See `check_classes`.
    shapes : sequence of tuple of (int or None)
        Shape of a row of each output.

    Raises
    ------
    ParamError
        If the columns cannot be computed from outputs of these shapes.
    """
    if not requested:
        return None
    check_classes(requested, kind, len(shapes))
    shape = tuple(shapes[0])
    single = shape in ((), (1,))
    if len(shape) > 1:
        raise ParamError(
            f"{_named(requested)}: expected a model that gives a number or a vector per row, found "
            f"shape {shape}. Leave the columns out."
        )
    if kind is None and single:
        raise _kind_is_missing(requested)
    if kind == "values" and not single:
        raise ParamError(
            f"{_named(requested)}: outputs_are='values' takes a model that gives a number per row, "
            f"found shape {shape}. Set {_SCORES}."
        )
    kind = kind or "logits"
    # A single label has two classes.
    return ClassScores(kind.removeprefix(_PER_LABEL) if single else kind, tuple(requested))


def _named(requested: Mapping[str, str]) -> str:
    return ", ".join(_PARAMS[content] for content in requested)


def _kind_is_missing(requested: Mapping[str, str]) -> ParamError:
    return ParamError(
        f"{_named(requested)}: outputs_are is not set. Set outputs_are to what the "
        f"model gives: {_SCORES}, or 'values'."
    )
