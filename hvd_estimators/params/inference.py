"""The params of how a model predicts, in an estimator and in its model. Runs on the driver."""

from __future__ import annotations

from typing import Any

from hvd_estimators.params import DeclaredParams, declare, integer, one_of, places

__all__ = ["InferenceParams"]


class InferenceParams(DeclaredParams):
    """Params of `transform`, whatever the model is."""

    outputs = declare(
        "Which of the model's outputs are predictions: a list of positions (0 is the first) or of "
        "names (keys of a dict, fields of a dataclass or a named tuple, Keras's output layers), or "
        "one of them. transform() adds a column for each. Metrics, and losses of one label each, "
        "compare them to label_cols, in this order. Default: all outputs; of outputs with names, "
        "those that label_cols name.",
        convert=places,
    )
    inference_batch_size = declare(
        "Rows of one forward pass. Default: a whole Arrow batch, of "
        "spark.sql.execution.arrow.maxRecordsPerBatch rows, or of 32 MiB if these are fewer.",
        convert=integer(1),
    )
    inference_precision = declare(
        "What transform() computes in: 'float32' (as the model is), or 'bfloat16' or 'float16' "
        "where that is safe: autocast in torch and Lightning, Keras's mixed precision for layers "
        "that compute in float32. Outputs are rounded to two or three digits.",
        default="float32",
        convert=one_of("float32", "bfloat16", "float16"),
    )
    handleInvalid = declare(
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
