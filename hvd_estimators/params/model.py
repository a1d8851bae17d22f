"""Params that estimators share with their models. Runs on the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.ml.param.shared import (
    HasHandleInvalid,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
)

from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.classification import KINDS
from hvd_estimators.params import (
    DeclaredParams,
    boolean,
    column_names,
    integer,
    one_of,
    output_keys,
    param,
    string,
)


def _collate_fn(
    name: str, value: Callable[[list[dict[str, Any]]], Any]
) -> Callable[[list[dict[str, Any]]], Any]:
    if not callable(value):
        raise ParamError(f"{name}: expected a function of a list of rows (dicts), found {value!r}.")
    return value


def _padding(name: str, value: Any) -> dict[str, float]:
    is_valid = isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(number, (int, float)) for key, number in value.items()
    )
    if not is_valid:
        raise ParamError(
            f"{name}: expected a dict of column to the number after its rows' ends, such as "
            f"{{'tokens': 0}}, found {value!r}."
        )
    return dict(value)


class SharedParams(
    DeclaredParams, HasHandleInvalid, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol
):
    """Params of all estimators and models, with Spark's mixins, by which others recognize some."""

    # Transforming rows

    transformation_fn = param(
        "Function from row to row (dicts), which the readers apply. It receives strings and "
        "bytes; the columns for the model must be numbers.",
        type="Callable[..., Any]",
    )
    transformation_batch_fn = param(
        "Function from columns to columns with the same number of rows (dicts of NumPy arrays, "
        "rows first). The readers apply it to many rows at a time, instead of "
        "transformation_fn.",
        type="Callable[..., Any]",
    )
    transformation_edit_fields = param(
        "Fields that the transformation adds or changes, as (name, dtype, shape). They are cast "
        "and checked.",
        type="Sequence[Any]",
    )
    transformation_removed_fields = param(
        "Fields to drop after the transformation.", convert=column_names
    )
    apply_transformation = param(
        "Whether the model's transform() also applies the transformation: to its input columns, "
        "and to other training columns that the DataFrame has. By default, transform() expects "
        "transformed columns.",
        default=False,
        convert=boolean,
    )

    # Rows of any length

    collate_fn = param(
        "Function that makes a batch of a list of rows, as in torch.utils.data.DataLoader. A row "
        "is a dict of column to value: a number, text, bytes, a NumPy array of any length, a list, "
        "a dict (struct or map), a datetime or None. The function returns a tensor (the input), a "
        "tuple (inputs, labels), or a dict of tensors: label_cols are its labels, and all other "
        "entries are inputs, with feature_cols first. For Keras, NumPy arrays replace tensors. A "
        "LightningModule gets the batch unchanged. The readers' workers call it in one thread at a "
        "time, or in processes with reader_pool_type='process'. transform(), evaluate() and "
        "load_predictor() call it as well, for predictions on rows without labels.",
        convert=_collate_fn,
    )
    padding = param(
        "Dict of column to number, such as {'tokens': 0}: each batch's arrays in the column are "
        "padded with the number to the longest one. Replaces collate_fn.",
        convert=_padding,
    )
    masks = param(
        "Whether the inputs get a boolean mask <column>_mask for each padded feature column, true "
        "for a row's own elements. Masks follow the feature columns.",
        default=False,
        convert=boolean,
    )

    # Predicting

    outputs = param(
        "Outputs of the model that are predictions: positions (0 is the first) or names (keys "
        "of a dict, fields of a dataclass or named tuple, Keras's output layers), as a list or "
        "a single one. transform() adds a column for each. Metrics, and losses of one label "
        "each, compare them to label_cols, in this order. Default: all outputs; for named "
        "outputs, those that label_cols name.",
        convert=output_keys,
    )
    inference_batch_size = param(
        "Rows per forward pass. Default: an Arrow batch, which has "
        "spark.sql.execution.arrow.maxRecordsPerBatch rows or 32 MiB (the smaller one).",
        convert=integer(1),
    )
    inference_precision = param(
        "Precision in which transform() computes: 'float32' (the model's own), or 'bfloat16' or "
        "'float16' where they are safe: autocast in torch and Lightning, Keras's mixed "
        "precision for layers that compute in float32. These round outputs to two or three "
        "digits.",
        default="float32",
        convert=one_of("float32", "bfloat16", "float16"),
    )
    handleInvalid = param(
        "Treatment of rows with a null in a column of the model: 'keep' gives them null "
        "predictions, 'skip' removes them, 'error' fails. NaN is not a null. A null within an "
        "array counts as a null of the row.",
        default="keep",
        convert=one_of("keep", "skip", "error"),
        accessor="HandleInvalid",
    )

    # Columns of a classifier

    predictionCol = param(
        "Column that transform() adds for the class, as a double: the position of the highest "
        "score. For independent labels, it is an ML vector of 0s and 1s. With "
        "outputs_are='values', it is the output itself. Default: 'prediction', if the "
        "model has one label, outputs_are is known, and the DataFrame has no such column. '' adds "
        "none.",
        convert=string,
        accessor="PredictionCol",
    )
    probabilityCol = param(
        "Column for the probabilities of the classes, as an ML vector. Default: none.",
        convert=string,
        accessor="ProbabilityCol",
    )
    rawPredictionCol = param(
        "Column for the model's scores of the classes, as an ML vector. Default: none.",
        convert=string,
        accessor="RawPredictionCol",
    )
    outputs_are = param(
        "Meaning of the model's output: 'logits' (any scores; their softmax, or a single "
        "score's sigmoid, gives the probabilities), 'probabilities', 'log_probabilities', "
        "'multilabel_logits' (a score for each of several independent labels; the sigmoid of "
        "each gives its probability), 'multilabel_probabilities', or "
        "'values' (not scores of classes). A single score belongs to class 1 of two: raw scores "
        "are [-z, z] for a logit and [1 - p, p] for a probability. Default: what the loss tells, "
        "such as 'logits' for cross entropy, and 'multilabel_logits' for binary cross entropy of "
        "several outputs. If it tells nothing, probabilityCol requires "
        "outputs_are, and so do the other two columns if the output is a single number.",
        convert=one_of(*KINDS),
    )


COLLATE_PARAMS = ("collate_fn", "padding", "masks")
"""Params that make batches of rows of any length and type."""
