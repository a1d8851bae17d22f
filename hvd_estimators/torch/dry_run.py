"""Dry runs on the driver: checks that columns, model, loss and labels fit each other.

A dry run works on copies and does not change the user's objects.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.inputs import matrix_hint
from hvd_estimators.exceptions import DataError, ParamError, ShapeError
from hvd_estimators.fitting.trial import leave_to_ranks, log_untried, traceless, with_open_sizes
from hvd_estimators.inference.errors import described
from hvd_estimators.launch.rank.outcome import report_error
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.torch.loss import Evaluation
from hvd_estimators.torch.loss_weights import StepWeights
from hvd_estimators.torch.metrics import EpochMetricStates, Metrics
from hvd_estimators.torch.objective import JointLoss, Objective, RankObjective
from hvd_estimators.torch.optimizer_step import set_optimizer_mode
from hvd_estimators.torch.serialization import copied, plain_module
from hvd_estimators.torch.tensors import (
    NO_COMPLEX_COLUMN,
    Batch,
    Inputs,
    TensorSpec,
    require_tensors,
)
from hvd_estimators.training.row_weights import NO_MEAN, compare_halves

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def torch_traceless() -> Iterator[None]:
    """Extend `traceless` to torch's random numbers, and disable gradients."""
    with traceless(), torch.random.fork_rng(devices=[]), torch.no_grad():
        yield


def check_initialized(module: torch.nn.Module) -> None:
    """Check that all parameters and buffers have shapes, which lazy layers may lack.

    Raises
    ------
    ParamError
        If one has no shape yet.
    """
    weights = itertools.chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, weight in weights if torch.nn.parameter.is_lazy(weight)]
    if lazy:
        raise ParamError(
            f"model: {', '.join(map(repr, lazy[:3]))} {'has' if len(lazy) == 1 else 'have'} no "
            "shape yet, because lazy layers learn it from their first rows. Call the model once "
            "before fit(), such as model(torch.zeros(2, 3)) for rows of 3 numbers, and make the "
            "optimizer after that."
        )


def output_shapes(
    module: torch.nn.Module, tensors: TensorSpec, inputs: Sequence[torch.Tensor]
) -> list[tuple[int, ...]]:
    """Return the shape of one row of each of a module's outputs. Does not change the module.

    Raises
    ------
    ShapeError
        If the module cannot take the inputs, or an output does not have one entry per row.
    """
    try:
        module = _copy(module)
        with torch_traceless():
            module.eval()
            raw = tensors.call(module, inputs)
    except Exception as error:
        raise ShapeError(
            f"{_not_taken(error, module, tensors, inputs)} If it cannot run on the driver, set "
            "output_shapes, such as [[1]] for a model with one output of one number."
        ) from error
    return _row_shapes(require_tensors(tensors.select(raw), raw), tensors, len(inputs[0]))


def with_any_size(
    shapes: Sequence[tuple[int | None, ...]],
    module: torch.nn.Module,
    tensors: TensorSpec,
    batches: Sequence[Sequence[torch.Tensor]],
) -> list[tuple[int | None, ...]]:
    """Return the shapes of outputs with None for each size that differs between batches.

    Parameters
    ----------
    shapes : sequence of tuple of int
        Shapes of rows in a batch that the module takes.
    module, tensors
        See `output_shapes`.
    batches : sequence of sequence of torch.Tensor
        Inputs of one row each.
    """
    found = list(shapes)
    for inputs in batches:
        try:
            others = output_shapes(module, tensors, inputs)
        except ShapeError as error:
            logger.info("The model does not take a single row (%s)", error)
            continue
        found = with_open_sizes(found, others)
    return found


def _row_shapes(
    outputs: Sequence[torch.Tensor], tensors: TensorSpec, rows: int
) -> list[tuple[int, ...]]:
    """Return the shape of one row of each output.

    Raises
    ------
    ShapeError
        If an output does not have one entry per row.
    """
    for position, output in enumerate(outputs):
        if output.dim() == 0 or len(output) != rows:
            paired = tensors.label_cols[position:] if tensors.pairs else ()
            which = f"for label {paired[0]!r}" if paired else f"at position {position}"
            raise ShapeError(
                f"The model's output {which} has shape {tuple(output.shape)} for {rows} rows. Its "
                "first dimension must count the rows; outputs can leave out others."
            )
    return [tuple(output.shape[1:]) for output in outputs]


def _not_taken(
    error: Exception, module: torch.nn.Module, tensors: TensorSpec, inputs: Sequence[torch.Tensor]
) -> str:
    given = described(tensors.named(inputs))
    hint = ""
    if tensors.input_form == "positional" and not _accepts(module, len(inputs)):
        shapes = (tuple(tensor.shape[1:]) for tensor in inputs)
        hint = matrix_hint(dict(zip(tensors.names(inputs), shapes, strict=True)))
    return (
        f"The model cannot take the feature columns. It was called with {given} and raised "
        f"{type(error).__name__}: {error}. Set feature_cols in the order of the model's inputs, "
        "input_shapes (such as [[-1, 1]]) if it expects other shapes, or column_dtypes (such as "
        "{'features': 'float64'}, or 'int64' for ids of an embedding) if it expects other types. "
        f"input_form='dict' or 'keyword' passes the columns by name.{hint}"
    )


def _accepts(module: torch.nn.Module, count: int) -> bool:
    """Return whether a module's ``forward`` accepts a number of positional arguments."""
    try:
        inspect.signature(module.forward).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # no signature
        pass
    return True


def check_fit(
    module: torch.nn.Module, objective: Objective, columns: Columns, validates: bool = True
) -> list[tuple[int, ...]]:
    """Run a few rows through copies of a model, its loss and its metrics.

    The model is called in evaluation mode. A joint loss is tried in training mode, in which the
    model may return losses, and in evaluation mode if ``validates`` is set.

    This process is not a rank and may have no GPU. If one of them cannot run here, the check warns
    and leaves it to the ranks.

    Parameters
    ----------
    module : torch.nn.Module
        The model; not modified.
    objective : Objective
        Loss and metrics; a loss that the ranks create is not tried.
    columns : Columns
        A few rows.
    validates : bool
        Whether the fit validates.

    Returns
    -------
    list of tuple of int
        Shape of one row of each output; empty if the model cannot run here.

    Raises
    ------
    ShapeError
        If the columns do not fit the configured shapes, or the model cannot take the columns. Also
        if outputs and labels differ in number, or the loss or a metric cannot take them.
    """
    batch, tensors = _batch(objective.tensors, columns), objective.tensors
    objective = replace(objective, loss_constructors=None, train_minibatch_fn=None)
    try:
        # Loss modules may have state, and may refer to the module. Compiling it would take longer
        # than running a few rows.
        module, objective = copied((plain_module(module), objective))
    except Exception as error:
        log_untried(error)
        return []
    tried = objective.on_rank(torch.device("cpu"))
    is_joint, shapes = isinstance(tried.loss, JointLoss), []
    with contextlib.suppress(_UntriedError):
        raw = _call(module.eval(), tensors, batch)
        shapes = _check_outputs(raw, tensors, batch)
        if validates or not is_joint:
            _check_loss(tried, raw, batch)
        if tried.metrics.names != []:
            aligned = tensors.align(raw, batch.labels)
            _check_metrics(tried.metrics, Evaluation(torch.zeros(()), *aligned, batch.rows))
        if is_joint:
            _check_loss(tried, _call(module.train(), tensors, batch), batch)
        if tried.loss is not None:
            _check_reduction(tried, batch, module)
    return shapes


class _UntriedError(Exception):
    """An error that says nothing about the ranks, which have another machine or GPUs."""


@contextlib.contextmanager
def _trying(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Run user code, and raise its errors as `ShapeError` with a description."""
    try:
        with torch_traceless():
            yield
    except (ParamError, DataError):
        raise
    except Exception as error:
        if leave_to_ranks(error):
            raise _UntriedError from error
        raise ShapeError(describe(error)) from error


def _call(module: torch.nn.Module, tensors: TensorSpec, batch: Batch) -> Any:
    mode = "training" if module.training else "evaluation"
    with _trying(
        lambda error: f"{_not_taken(error, module, tensors, batch.inputs)} (In {mode} mode.)"
    ):
        return tensors.call(module, batch.inputs)


def _check_outputs(raw: Any, tensors: TensorSpec, batch: Batch) -> list[tuple[int, ...]]:
    """Check what a model returned, and return the shape of one row of each output."""
    outputs = require_tensors(tensors.select(raw), raw)
    labels = tensors.label_cols
    if tensors.pairs and len(outputs) != len(labels):
        raise ShapeError(
            f"the model has {len(outputs)} outputs, and there are {len(labels)} label "
            f"columns: {', '.join(labels)}. Set one label column per output, outputs to those "
            "that have labels, such as [0], or loss_form='joint' for one loss of all outputs.",
            param="label_cols",
        )
    if not outputs:
        raise ShapeError(f"outputs: the model returns {type(raw).__name__} without a tensor.")
    if any(output.is_complex() for output in outputs):
        logger.warning("model: training works, but %s", NO_COMPLEX_COLUMN)
    return _row_shapes(outputs, tensors, batch.rows)


def check_own_step(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    columns: Columns,
    passes_per_step: int,
) -> list[tuple[int, ...]]:
    """Run the user's training step on some rows, with copies of all referenced objects.

    Parameters
    ----------
    module, optimizer
        Trained module and its optimizer; not modified.
    objective : Objective
        The step, and the loss that the step can call.
    columns : Columns
        As many rows as the step should take.
    passes_per_step : int
        Batches per optimizer step.

    Returns
    -------
    list of tuple of int
        Shape of one row of each output; empty if only the ranks can determine the shapes.

    Raises
    ------
    ShapeError
        If the columns do not fit the configured shapes, or the step fails.
    """
    batch = _batch(objective.tensors, columns)
    device = torch.device("cpu")
    try:
        module, optimizer, objective = copied((plain_module(module), optimizer, objective))
        with torch_traceless(), torch.enable_grad():
            on_rank = objective.on_rank(
                device, model=module, optimizer=optimizer, rank=0, size=1, spec=None
            )
    except Exception as error:
        log_untried(error)
        return []

    def failed(error: Exception) -> str:
        return (
            f"train_minibatch_fn failed on a batch of {_tensors_of(batch, objective.tensors)} with "
            f"{type(error).__name__}: {error}. Set feature_cols, label_cols, input_shapes or "
            "column_dtypes (such as {'label': 'int64'}) to what it expects."
        )

    with contextlib.suppress(_UntriedError):
        with _trying(failed), torch.enable_grad():
            set_optimizer_mode(optimizer, training=True)
            weights = StepWeights()
            weights.start(batch.rows, batch.rows, passes_per_step)
            evaluation = on_rank.run_minibatch(module.train(), optimizer, batch, weights)
        outputs: Sequence[Any] = evaluation.outputs
        if all(isinstance(o, torch.Tensor) and o.dim() and len(o) == batch.rows for o in outputs):
            _check_metrics(on_rank.metrics, evaluation)
            return [tuple(output.shape[1:]) for output in outputs]
    return []


def takes_one_row(
    module: torch.nn.Module, call: Callable[[Any], Any], others: Sequence[Callable[[Any], Any]] = ()
) -> bool | None:
    """Return whether the model can train on a batch of one row; None if unknown.

    Batch normalization cannot, unless a row has several values per channel, as images have. Nor can
    a model that squeezes the dimension of rows and then uses it. Without batch normalization, a
    failure that more rows share says nothing about one row, and the result is true.

    Parameters
    ----------
    module : torch.nn.Module
        The model; not modified.
    call : callable
        Runs a copy of the module, in training mode, on one row.
    others : sequence of callable
        Run the copy on a few rows each, to see if one row is the reason for a failure.
    """
    try:
        trial = _copy(module).train()
        with torch_traceless():
            call(trial)
    except Exception:
        try:
            with torch_traceless():
                for on_several_rows in others:
                    on_several_rows(trial)
        except Exception:
            others = ()
        if others:
            return False
        return None if _batch_norms(module) else True
    return True


def _batch_norms(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, _BATCH_NORMS)]


_BATCH_NORMS = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.LazyBatchNorm1d, torch.nn.LazyBatchNorm2d, torch.nn.LazyBatchNorm3d),
)


def needs_two_rows(module: torch.nn.Module, one_row: bool | None) -> bool:
    """Return whether each batch of a rank needs two rows, given `takes_one_row`.

    A module with batch normalization is assumed to need them if ``one_row`` is None.
    """
    return not one_row if one_row is not None else bool(_batch_norms(module))


def check_one_row(module: torch.nn.Module, data: DataSpec, one_row: bool | None) -> None:
    """Check that no rank trains on a batch of one row if the model cannot.

    The plan avoids such a batch if a full batch has more than two rows, and each step of a rank can
    have two.

    Parameters
    ----------
    module : torch.nn.Module
        The model.
    data : DataSpec
        Planned data; an epoch has each row once.
    one_row : bool or None
        See `needs_two_rows`.

    Raises
    ------
    DataError
        If a rank would train on one row and the model cannot.
    """
    if 1 in data.train_batch_sizes() and needs_two_rows(module, one_row):
        raise DataError(
            "The model cannot train on a batch of one row, as with batch normalization, and "
            f"batch_size={data.batch_size} leaves one on some rank "
            f"({data.train_plan.total_rows} rows, {data.train_plan.num_shards} ranks). Set another "
            "batch_size."
        )


def check_batches(
    module: torch.nn.Module, data: DataSpec, own_step: bool, all_rows: bool, one_row: bool | None
) -> None:
    """Reject batches that a model or a training function cannot take.

    Parameters
    ----------
    module : torch.nn.Module
        The model.
    data : DataSpec
        Planned data.
    own_step : bool
        Whether the user's function makes the steps.
    all_rows : bool
        Whether an epoch has each row once, which is the default.
    one_row : bool or None
        Whether the model can train on one row, see `takes_one_row`.

    Raises
    ------
    DataError
        If a batch without rows, or with one row, cannot be used.
    ParamError
        If a rank runs several virtual shards, which the function or the model does not support.
    """
    if own_step:
        data.require_one_shard_per_rank("train_minibatch_fn", "and this function steps by each")
        data.require_rows_in_batches("train_minibatch_fn")
    check_sync_batch_norm(module, data)
    if all_rows:
        check_one_row(module, data, one_row)


def check_sync_batch_norm(
    module: torch.nn.Module, data: DataSpec, is_converted: bool = False
) -> None:
    """Check that each rank has rows of one shard in each step, if layers synchronize in it.

    ``is_converted`` says that the ranks convert layers of batch normalization.

    Raises
    ------
    ParamError
        If a rank runs several virtual shards.
    DataError
        If a batch has no rows.
    """
    names = {type(layer).__name__ for layer in module.modules()}
    param = "trainer_args: sync_batchnorm" if is_converted and _batch_norms(module) else "model"
    if "SyncBatchNorm" in names or param != "model":
        data.require_one_shard_per_rank(param, "over which SyncBatchNorm takes no statistics")
        data.require_rows_in_batches(f"{param}: SyncBatchNorm")


def _batch(tensors: TensorSpec, columns: Columns) -> Batch:
    try:
        return tensors.batch(columns)
    except RuntimeError as error:
        raise ShapeError(
            f"input_shapes, label_shapes: the columns {described(columns)} cannot be reshaped to "
            f"input_shapes={tensors.input_shapes}, label_shapes={tensors.label_shapes} ({error})."
        ) from error


def _check_loss(objective: RankObjective, raw: Any, batch: Batch) -> None:
    """Try a loss, if there is one, on what a model returned."""

    def failed(error: Exception) -> str:
        return (
            f"The loss cannot take outputs and labels: {type(error).__name__}: {error}. The model "
            f"returned {_shapes_of(raw)}, for a batch of {_tensors_of(batch, objective.tensors)}. "
            "Labels get the shape of their outputs if they have as many numbers. Set label_cols "
            "and the model's outputs to the same shapes, label_shapes, or column_dtypes (such as "
            "{'label': 'int64'} for class numbers)."
        )

    if objective.loss is not None:
        with _trying(failed):
            # Training on labels that only broadcast to the output is almost always a mistake.
            warnings.filterwarnings("error", message="Using a target size")
            float(objective.evaluated(raw, objective.weighted(batch)).loss)


def _shapes_of(raw: Any) -> str:
    """Return the shapes of a module's return value as text."""
    if isinstance(raw, torch.Tensor):
        return f"{tuple(raw.shape)}"
    if isinstance(raw, dict):
        return f"{{{', '.join(f'{name!r}: {_shapes_of(value)}' for name, value in raw.items())}}}"
    if isinstance(raw, (list, tuple)):
        return f"({', '.join(map(_shapes_of, raw))})"
    return type(raw).__name__


def _check_metrics(metrics: Metrics, evaluation: Evaluation) -> None:
    """Try metrics, which this changes."""
    given = "; ".join(
        f"output {tuple(output.shape)}, label {tuple(label.shape)}"
        for output, label in zip(evaluation.outputs, evaluation.labels, strict=False)
    )
    for name, metric in metrics.each():

        def failed(error: Exception, name: str = name) -> str:
            return (
                f"metrics: {name} failed ({given}) with {report_error(error).headline}. Set "
                "another metric, or column_dtypes (such as {'label': 'int64'}) to what it expects."
            )

        with _trying(failed):
            try:
                metric(evaluation)
                EpochMetricStates(metric).update(evaluation)
            except ParamError:
                raise
            except (ValueError, ArithmeticError) as error:
                # The values of a few rows can cause it, such as labels of one class.
                logger.info("metrics: %s cannot take the first rows (%s)", name, error)


def _check_reduction(objective: RankObjective, batch: Batch, module: torch.nn.Module) -> None:
    """Compare each loss that counts as a mean over rows with the losses of both halves.

    Raises
    ------
    ParamError
        If a loss is the sum of the losses of the halves.
    """
    tensors = objective.tensors

    def losses_of(rows: slice) -> list[float | None]:
        weights = None if batch.weights is None else batch.weights[rows]
        inputs = Inputs({name: x[rows] for name, x in tensors.named(batch.inputs).items()})
        some = Batch(inputs, [y[rows] for y in batch.labels], weights)
        given = objective.arranged(tensors.call(module, some.inputs), some.labels)
        parts = objective.parts(*given, weights, some)
        return [float(part.value) if part.kind == "rows" else None for part in parts]

    names = [f"label {name!r}" for name in tensors.label_cols]
    remedy = (
        "give a loss of torch with reduction='sum', such as functools.partial("
        "torch.nn.functional.mse_loss, reduction='sum')"
    )
    if isinstance(objective.loss, JointLoss):
        names, remedy = ["the joint loss"], "set its attribute reduction='sum' if it is a module"
    with torch_traceless():
        module.eval()
        of_rows = compare_halves(losses_of, batch.rows)
        if not of_rows:  # The model may return losses in training mode only.
            module.train()
        found = of_rows or compare_halves(losses_of, batch.rows)
    for name, reduction in zip(names, found, strict=False):
        if reduction == "sum":
            raise ParamError(
                f"loss: expected a mean over rows for {name}, found a sum. Return a mean, or "
                f"{remedy}."
            )
        if reduction == "other" and of_rows:
            logger.warning(NO_MEAN, f"loss: for {name} the loss")


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return an uncompiled copy for evaluation; compiling takes longer than running a few rows."""
    return copied(plain_module(module))


def _tensors_of(batch: Batch, tensors: TensorSpec) -> str:
    """Return a batch's tensors by column, as text."""
    labels = dict(zip(tensors.label_cols, batch.labels, strict=True))
    return described({**tensors.named(batch.inputs), **labels})
