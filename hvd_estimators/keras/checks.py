"""Whether columns, rows and batches are what a model takes and returns; on the driver."""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Sequence
from typing import Any

import keras

from hvd_estimators.exceptions import DataError, ParamError, ShapeError
from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.synchronized import synchronized_layers
from hvd_estimators.keras.tensors import Field
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.parquet.columns import Columns

__all__ = [
    "LAMBDA_REMEDY",
    "check_batches",
    "check_columns",
    "check_lambdas",
    "check_rows",
    "text_remedy",
]

LAMBDA_REMEDY = (
    "Keras sends the code of a Lambda's lambda without the modules and variables that the lambda "
    "uses. Write a named function (def square(x): return ops.square(x)) and set "
    "keras.layers.Lambda(square), or write a layer with a call()."
)


def check_columns(fields: Sequence[Field], columns: Columns, param: str, end: str) -> None:
    """Refuse columns whose kind or shape is none that a model's inputs, or labels, take.

    Parameters
    ----------
    fields : sequence of Field
        What is expected of which column.
    columns : mapping of str to numpy.ndarray
        Some rows.
    param, end : str
        The parameter that names the columns, and the end of the model that they go to, for
        messages.

    Raises
    ------
    ShapeError
        If one does not fit.
    """
    for field in fields:
        array = columns[field.column]
        shape, is_text = array.shape[1:], array.dtype.kind in "OSU"
        if field.dtype is not None and is_text != (field.dtype == "string"):
            raise ShapeError(
                f"{param}: column {field.column!r} holds {'text' if is_text else array.dtype}, "
                f"and the model's {end} for it is of type {field.dtype}. Set columns in the "
                f"order of the model's {end}s; text takes keras.Input(..., dtype='string')."
            )
        if not field.fits(shape):
            raise ShapeError(
                f"{param}: a row of column {field.column!r} has shape {shape}, and the model's "
                f"{end} for it has {field.shape}. Set columns in the order of the model's "
                f"{end}s, with as many elements as these."
            )


def check_lambdas(model: keras.Model) -> None:
    """Reject a copy of a model with a Lambda whose function lacks the names that it uses.

    Raises
    ------
    ParamError
        If a name is not defined, as it would be on the ranks.
    """
    for layer in all_layers(model):
        function = getattr(layer, "function", None)
        if not isinstance(layer, keras.layers.Lambda):
            continue
        if not isinstance(function, types.FunctionType):
            continue
        for instruction in dis.get_instructions(function.__code__):
            name = instruction.argval
            is_global = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            if is_global and name not in function.__globals__ and not hasattr(builtins, name):
                raise ParamError(
                    f"model: the layer {layer.name!r} fails on the ranks (NameError: name "
                    f"{name!r} is not defined). {LAMBDA_REMEDY}"
                )


def check_rows(flat: Sequence[Any], labels: Sequence[str | None] | None, rows: int) -> None:
    """Reject outputs that are not one per row; ``labels`` is the label of each, if known."""
    for label, output in zip(labels or (None,) * len(flat), flat, strict=True):
        if not output.shape or output.shape[0] != rows:
            which = "" if label is None else f" for label {label!r}"
            raise ShapeError(
                f"The model's output{which} has shape {tuple(output.shape)} for "
                f"{rows} rows. Its first dimension must count the rows; outputs can leave out "
                "others."
            )


def check_batches(model: keras.Model, data: DataSpec) -> None:
    """Refuse batches that a model cannot take.

    Raises
    ------
    DataError
        If a batch has no rows and the model normalizes batches.
    ParamError
        If a rank plays several shards, which a layer cannot be made to do.
    """
    plan = data.train_plan
    if synchronized_layers(model):
        data.require_one_shard_per_rank(
            "model", "over which BatchNormalization(synchronized=True) takes no statistics"
        )
    sizes = [
        size
        for shard in range(plan.num_shards)
        for size in plan.batch_sizes(shard, data.batch_size)
    ]
    has_batch_norm = any(
        isinstance(layer, keras.layers.BatchNormalization) for layer in all_layers(model)
    )
    if has_batch_norm and 0 in sizes:
        raise DataError(
            "Batch normalization needs a row on every rank in every step, and there are "
            f"{sum(sizes)} rows for {plan.num_shards} ranks. Set num_proc or batch_size so that "
            "the rows can be shared out."
        )


def text_remedy(columns: Columns, inputs: Any) -> str:
    """Return what to do about columns of text, if there are any among a model's inputs."""
    text = [
        field.column
        for field in keras.tree.flatten(inputs)
        if columns[field.column].dtype.kind in "OSU"
    ]
    if not text:
        return ""
    return (
        f" The columns {', '.join(map(repr, text))} are text: make numbers of it in the model, "
        "with keras.layers.TextVectorization, StringLookup or Hashing, or before, with "
        "pyspark.ml.feature.StringIndexer or a transformation_fn."
    )
