"""Dry runs on the driver: whether columns, model, loss and labels fit each other."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import torch

from hvd_estimators.exceptions import DataError, ShapeError
from hvd_estimators.fitting.dry_run import leave_to_ranks, traceless
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.parquet.columns import Columns
from hvd_estimators.torch.loss import Loss
from hvd_estimators.torch.outputs import as_list
from hvd_estimators.torch.serialization import dump_module, load_module, plain_module
from hvd_estimators.torch.tensors import TensorSpec
from hvd_estimators.unpickling import loads

__all__ = ["check_batches", "check_fit", "output_shapes", "torch_traceless"]


@contextlib.contextmanager
def torch_traceless() -> Iterator[None]:
    """Be `traceless` with torch's random numbers too, and without gradients."""
    with traceless(), torch.random.fork_rng(devices=[]), torch.no_grad():
        yield


def output_shapes(
    module: torch.nn.Module, tensors: TensorSpec, inputs: Sequence[torch.Tensor]
) -> list[tuple[int, ...]]:
    """Return the shape of one row of each of a module's outputs. Leaves the module as it is.

    Raises
    ------
    ShapeError
        If the module cannot take the inputs.
    """
    module = _copy(module)
    try:
        with torch_traceless():
            raw = tensors.call(module, inputs)
    except Exception as error:
        raise ShapeError(
            f"{_not_taken(error, tensors, inputs)} Or set output_shapes, such as [[1]] for a "
            "model with one output of one number, where it cannot run on the driver."
        ) from error
    return [tuple(output.shape[1:]) for output in as_list(raw, tensors.label_cols)]


def _not_taken(error: Exception, tensors: TensorSpec, inputs: Sequence[torch.Tensor]) -> str:
    given = ", ".join(
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in zip(tensors.feature_cols, inputs, strict=True)
    )
    return (
        f"The model cannot take the feature columns. It was called with {given} and raised "
        f"{type(error).__name__}: {error}. Set feature_cols in the order of the model's inputs, "
        "input_shapes (such as [[-1, 1]]) where it expects other shapes, or column_dtypes (such "
        "as {'features': 'float64'}) where it expects other types; input_form='dict' or 'keyword' "
        "gives it the columns by name."
    )


def check_fit(
    module: torch.nn.Module, loss: Loss | None, tensors: TensorSpec, columns: Columns
) -> list[tuple[int, ...]]:
    """Run a few rows through copies of a model and its loss.

    What cannot run in this process, which is no rank and may have no GPU, is left to the ranks with
    a warning.

    Parameters
    ----------
    module : torch.nn.Module
        The model; left as it is.
    loss : Loss or None
        The loss; None where it is made on the ranks.
    tensors : TensorSpec
        How columns become tensors.
    columns : Columns
        A few rows.

    Returns
    -------
    list of tuple of int
        Shape of one row of each output; empty for a model that cannot run here.

    Raises
    ------
    ShapeError
        If the columns do not fit the shapes that are set, the model cannot take them, its
        outputs are not as many as the labels, or the loss cannot take outputs and labels.
    """
    try:
        batch = tensors.batch(columns)
    except RuntimeError as error:
        raise ShapeError(
            f"input_shapes, label_shapes: the columns {_describe(columns)} cannot be reshaped to "
            f"input_shapes={tensors.input_shapes}, label_shapes={tensors.label_shapes} ({error})."
        ) from error
    module = _copy(module)
    try:
        with torch_traceless():
            raw = tensors.call(module, batch.inputs)
    except Exception as error:
        if leave_to_ranks(error):
            return []
        raise ShapeError(_not_taken(error, tensors, batch.inputs)) from error
    labels = tensors.label_cols
    outputs = as_list(raw, labels)
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise ShapeError(
                f"label_cols: the model returns {type(raw).__name__} of {type(output).__name__}. "
                "Return a tensor per label: alone, in a tuple, or in a dict or dataclass by name."
            )
    if len(outputs) != len(labels):
        raise ShapeError(
            f"label_cols: the model has {len(outputs)} outputs, and there are {len(labels)} label "
            f"columns: {', '.join(labels)}. Set one label column per output."
        )
    for name, output in zip(labels, outputs, strict=True):
        if output.dim() == 0 or len(output) != batch.rows:
            raise ShapeError(
                f"The model's output for label {name!r} has shape {tuple(output.shape)} for "
                f"{batch.rows} rows. Its first dimension must count the rows."
            )
    if loss is not None:
        _check_loss(loss, outputs, batch, tensors)
    return [tuple(output.shape[1:]) for output in outputs]


def check_batches(module: torch.nn.Module, data: DataSpec, own_step: bool, all_rows: bool) -> None:
    """Refuse batches that a model or a training function cannot take.

    Parameters
    ----------
    module : torch.nn.Module
        The model.
    data : DataSpec
        What is planned.
    own_step : bool
        Whether the user's function makes the steps.
    all_rows : bool
        Whether an epoch holds each row once, as by default.

    Raises
    ------
    DataError
        If a batch has no rows, or one row.
    ParamError
        If a rank plays several shards, which this cannot be made to do.
    """
    plan = data.train_plan
    if own_step:
        data.require_one_shard_per_rank("train_minibatch_fn", "and this function steps by each")
    # Horovod's, which knows ranks only.
    if any(type(layer).__name__ == "SyncBatchNorm" for layer in module.modules()):
        data.require_one_shard_per_rank("model", "over which SyncBatchNorm takes no statistics")
    sizes = [
        size
        for shard in range(plan.num_shards)
        for size in plan.batch_sizes(shard, data.batch_size)
    ]
    if own_step and 0 in sizes:
        raise DataError(
            "train_minibatch_fn needs a row on every rank in every step, and there are "
            f"{sum(sizes)} rows for {plan.num_shards} ranks. Set num_proc or batch_size so that "
            "the rows can be shared out."
        )
    has_batch_norm = any(
        isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in module.modules()
    )
    if has_batch_norm and 1 in sizes and all_rows:
        raise DataError(
            "Batch normalization cannot train on a batch of one row, and "
            f"batch_size={data.batch_size} leaves one on some rank ({sum(sizes)} rows, "
            f"{plan.num_shards} ranks). Set another batch_size."
        )


def _check_loss(
    loss: Loss, outputs: Sequence[torch.Tensor], batch: Any, tensors: TensorSpec
) -> None:
    aligned, targets = tensors.align(list(outputs), batch.labels)
    # Modules may keep state, functions may count in variables of their module.
    functions = loads(cloudpickle.dumps(loss.functions))
    loss = Loss(functions, loss.loss_weights)
    shapes = "; ".join(
        f"{name}: output {tuple(output.shape)}, label {tuple(target.shape)}"
        for name, output, target in zip(tensors.label_cols, aligned, targets, strict=True)
    )
    try:
        with torch_traceless():
            # Labels that only broadcast to the output train on something nobody meant.
            warnings.filterwarnings("error", message="Using a target size")
            value = loss(aligned, targets, batch.weights)
    except Exception as error:
        if leave_to_ranks(error):
            return
        reshaped = [
            f"{name} from {tuple(label.shape)}"
            for name, label, target in zip(tensors.label_cols, batch.labels, targets, strict=True)
            if label.shape != target.shape
        ]
        hint = ""
        if reshaped:
            hint = (
                f" Labels were brought into the shape of their outputs: {', '.join(reshaped)}. The "
                "loss can rely on that, and need not index the output (output[:, 0])."
            )
        raise ShapeError(
            f"The loss cannot take outputs and labels ({shapes}): {type(error).__name__}: {error}. "
            "Set label_cols and the model's outputs to the same shapes, label_shapes, or "
            f"column_dtypes (such as {{'label': 'int64'}} for class numbers).{hint}"
        ) from error
    if value.dim() != 0:
        raise ShapeError(f"The loss must return a number, found shape {tuple(value.shape)}.")


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy for evaluation, which is not compiled: that takes longer than a few rows."""
    return load_module(dump_module(plain_module(module))).eval()


def _describe(columns: Columns) -> str:
    return ", ".join(f"{name} {array.shape}" for name, array in columns.items())
