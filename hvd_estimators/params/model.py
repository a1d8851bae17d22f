"""Params that estimators share with their models. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from hvd_estimators.exceptions import ParamError
from hvd_estimators.history import history_rows
from hvd_estimators.inference.classification import (
    ClassScores,
    check_classes,
    class_columns,
    class_scores,
)
from hvd_estimators.loading.transform import Transformation, make_transformation
from hvd_estimators.params import (
    DeclaredParams,
    boolean,
    column_names,
    integer,
    one_of,
    param,
    places,
    string,
)

__all__ = ["ClassificationParams", "HistoryParams", "InferenceParams", "TransformationParams"]

_ONE_VS_REST = "mc2b$"


"""What the names of the labels that Spark's ``OneVsRest`` makes begin with."""


class ClassificationParams(DeclaredParams):
    """Params of what `transform` adds for a classifier, in an estimator and in its model."""

    predictionCol = param(
        "Column for the class (a double: the position of the highest score), which transform() "
        "adds beside the output's. With outputs_are='values' the output itself. Default: none.",
        convert=string,
        accessor="PredictionCol",
    )
    probabilityCol = param(
        "Column for the classes' probabilities, an ML vector. Default: none.",
        convert=string,
        accessor="ProbabilityCol",
    )
    rawPredictionCol = param(
        "Column for the classes' scores as the model gives them, an ML vector. Default: none.",
        convert=string,
        accessor="RawPredictionCol",
    )
    outputs_are = param(
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


class InferenceParams(DeclaredParams):
    """Params of `transform`, whatever the model is."""

    outputs = param(
        "Which of the model's outputs are predictions: a list of positions (0 is the first) or of "
        "names (keys of a dict, fields of a dataclass or a named tuple, Keras's output layers), or "
        "one of them. transform() adds a column for each. Metrics, and losses of one label each, "
        "compare them to label_cols, in this order. Default: all outputs; of outputs with names, "
        "those that label_cols name.",
        convert=places,
    )
    inference_batch_size = param(
        "Rows of one forward pass. Default: a whole Arrow batch, of "
        "spark.sql.execution.arrow.maxRecordsPerBatch rows, or of 32 MiB if these are fewer.",
        convert=integer(1),
    )
    inference_precision = param(
        "What transform() computes in: 'float32' (as the model is), or 'bfloat16' or 'float16' "
        "where that is safe: autocast in torch and Lightning, Keras's mixed precision for layers "
        "that compute in float32. Outputs are rounded to two or three digits.",
        default="float32",
        convert=one_of("float32", "bfloat16", "float16"),
    )
    handleInvalid = param(
        "What transform() does with rows that have a null in a column that the model is given: "
        "'keep' them, with nulls in all columns that it adds; 'skip' them: the result lacks them; "
        "or fail with an 'error'. NaN is a number like others. A null within an array counts as "
        "one of the row.",
        default="keep",
        convert=one_of("keep", "skip", "error"),
        accessor="HandleInvalid",
    )

    def _inference_params(self) -> dict[str, Any]:
        """Return these params, those that are set, as an estimator gives them to its model."""
        return {
            name: self.getOrDefault(name)
            for name in InferenceParams._declarations
            if self.isSet(name)
        }


class TransformationParams(DeclaredParams):
    """What is made of rows between reading and the model."""

    transformation_fn = param(
        "Row (a dict) to row, applied by the readers. Strings and bytes reach it; what the model "
        "is given has to be numbers."
    )
    transformation_batch_fn = param(
        "Columns (a dict of NumPy arrays, rows first) to columns of as many rows, applied by the "
        "readers instead of transformation_fn to many rows at a time."
    )
    transformation_edit_fields = param(
        "Fields that the transformation makes or changes, as (name, dtype, shape): they are cast "
        "and checked."
    )
    transformation_removed_fields = param(
        "Fields that are dropped after the transformation.", convert=column_names
    )
    apply_transformation = param(
        "Whether the model's transform() applies the transformation, too, to its input columns and "
        "to those others that were trained on, as far as the DataFrame has them. By default it "
        "does not, and takes columns as the transformation leaves them.",
        default=False,
        convert=boolean,
    )

    def _make_transformation(
        self, needed: Sequence[str], text: Sequence[str] = ()
    ) -> Transformation | None:
        """Return what is made of rows; None if nothing.

        Parameters
        ----------
        needed : sequence of str
            Fields that must be there, and numbers, in the end.
        text : sequence of str
            Those that may be text, too.
        """
        return make_transformation(self.getOrDefault, needed, text)

    def _transformation_params(self) -> dict[str, Any]:
        """Return these params, those that are set, as an estimator gives them to its model."""
        return {
            name: self.getOrDefault(name)
            for name in TransformationParams._declarations
            if self.isSet(name)
        }


class HistoryParams(DeclaredParams):
    """What was measured while a model was trained."""

    history = param(
        "What was measured in each epoch: a list of dicts with epoch, train and validation. See "
        "history_frame() for rows."
    )

    def history_frame(self) -> pd.DataFrame:
        """Return what was measured as rows: the same columns for all frameworks.

        ``getHistory()`` has a shape of its own for each of them:

        - Keras: that of Keras's ``History.history``, a dict of name to a list of values by epoch;
          names of validation begin with ``val_``, which is left out here. It does not tell epochs:
          of what a callback adds in some of them only, the first value is taken for epoch 0's.
        - torch: a list of dicts, one per epoch, with ``epoch``, ``train`` and (with validation)
          ``validation``; the latter two hold ``loss`` and ``all_metrics``, a list with a dict per
          group of metrics, such as ``{"my_metric": 0.1}``.
        - Lightning: the same list; ``train`` and ``validation`` hold ``loss`` where steps return
          one, and what the module logs by the names that it logs it by.

        Returns
        -------
        pandas.DataFrame
            A row per number, with the columns ``epoch`` (of the whole run, from 0), ``stage``
            (``"train"`` or ``"validation"``), ``name`` (that of a metric; members of an array are
            numbered, ``name_0`` and so on) and ``value`` (a float). Empty if there is no history.
        """
        rows = history_rows(self.getOrDefault("history") or [])
        columns = {"epoch": "int64", "stage": "object", "name": "object", "value": "float64"}
        return pd.DataFrame(rows, columns=list(columns)).astype(columns)
