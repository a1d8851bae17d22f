"""Early checks on the driver: settings of virtual shards, and a module on a few rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.trial import Trial, leave_to_ranks, log_untried
from hvd_estimators.inference.errors import described
from hvd_estimators.lightning.package import flavor_of
from hvd_estimators.lightning.trainer_args import precision_of
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.torch.dry_run import (
    check_sync_batch_norm,
    output_shapes,
    takes_one_row,
    torch_traceless,
)
from hvd_estimators.torch.loss_weights import as_stated
from hvd_estimators.torch.serialization import copied
from hvd_estimators.torch.tensors import TensorSpec
from hvd_estimators.training.row_weights import NO_MEAN, compare_halves

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

logger = logging.getLogger(__name__)

_COUNTED_BATCHES = ("fast_dev_run", "limit_val_batches")
"""Arguments that count batches of validation, of which a rank with several shards has more."""

# Hooks that may create attributes that a step needs. They have not run without a trainer.
_PREPARING_HOOKS = (
    "configure_model",
    "on_fit_start",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "on_train_epoch_start",
    "on_train_start",
    "prepare_data",
    "setup",
    "transfer_batch_to_device",
)


def check_shards_of_module(
    module: torch.nn.Module, data: DataSpec, trainer_args: Mapping[str, Any]
) -> None:
    """Reject settings that cannot run several virtual shards on a rank. Runs on the driver.

    Parameters
    ----------
    module : torch.nn.Module
        The model, a LightningModule or not.
    data : DataSpec
        The planned data.
    trainer_args : mapping
        The user's Trainer arguments.

    Raises
    ------
    ParamError
        If there are fewer ranks than shards, and the model or an argument controls steps or counts
        batches.
    """
    if not getattr(module, "automatic_optimization", True):
        data.require_one_shard_per_rank("model", "and manual optimization steps by each")
    step = getattr(module, "training_step", None)
    if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
        data.require_one_shard_per_rank("model", "and its training_step takes them from a loader")
    check_sync_batch_norm(module, data, trainer_args.get("sync_batchnorm", False))
    for name in _COUNTED_BATCHES:
        value = trainer_args.get(name)
        if value and not (isinstance(value, float) and value == 1.0):
            param = f"trainer_args: {name}"
            data.require_one_shard_per_rank(param, "which this setting counts as several")


@dataclass(frozen=True)
class LightningTrial(Trial):
    """Result of a dry run of a LightningModule.

    Attributes
    ----------
    loss_of_halves : str
        ``"sum"`` or ``"other"`` if the loss is not the mean over rows; ``"mean"`` if it is, if it
        states its denominator, or if the step needs a Trainer.
    """

    loss_of_halves: str = "mean"


def check_loss(loss_of_halves: str) -> None:
    """Reject a loss that sums over the rows, and warn if it is another mean; see `LightningTrial`.

    Raises
    ------
    ParamError
        If the loss is a sum, of which several processes would take the mean of their parts.
    """
    if loss_of_halves == "sum":
        raise ParamError(
            "model: expected that training_step returns a mean over the rows of its batch, found a "
            "sum. Several processes would train on the mean of their sums. Divide the loss by the "
            "number of rows, as in loss / len(batch['label']), and set a learning rate for it."
        )
    if loss_of_halves == "other":
        logger.warning(NO_MEAN, "model: the loss that training_step returns")


def try_step(
    module: LightningModule,
    rows: int,
    batch_of: Callable[[slice], Any],
    trainer_args: Mapping[str, Any] | None = None,
) -> LightningTrial:
    """Run training steps on a copy with a few rows, if the step needs no Trainer.

    Parameters
    ----------
    module : LightningModule
        The model; not modified.
    rows : int
        Number of rows.
    batch_of : callable
        Returns the batch of some of the rows.
    trainer_args : mapping, optional
        The user's Trainer arguments, whose precision the step has.

    Raises
    ------
    ShapeError
        If the step fails for a reason unrelated to the Trainer.
    """
    flavor = flavor_of(module)
    assert flavor is not None
    is_overridden = flavor.get("utilities.model_helpers.is_overridden")
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        return LightningTrial()
    try:
        precision = precision_of(trainer_args or {}, flavor)
        batch = precision.convert_input(batch_of(slice(None)))
        trial = copied(module)
    except Exception as error:  # Only the ranks may have the packages and devices.
        log_untried(error)
        return LightningTrial()

    def run(module: Any, given: Any) -> Any:
        arguments = [given, 0][: max(len(parameters), 1)]
        with torch.enable_grad(), precision.train_step_context():
            return precision.convert_module(module).training_step(*arguments)

    try:
        with torch_traceless():
            output = run(trial, batch)
    except Exception as error:
        needs_hooks = any(is_overridden(hook, module) for hook in _PREPARING_HOOKS)
        if needs_hooks or any(word in str(error) for word in ("Trainer", "trainer")):
            return LightningTrial()
        # Who unpacks a dict, as in ``x, y = batch``, calls methods of tensors on names of columns.
        is_of_names = isinstance(error, AttributeError) and "'str' object" in str(error)
        if not is_of_names and leave_to_ranks(error):
            return LightningTrial()
        advice = (
            "Set feature_cols and label_cols to the columns that it reads, or column_dtypes (such "
            "as {'label': 'int64'}) if it expects other dtypes."
        )
        if isinstance(batch, dict):
            first, *_, last = [*batch, *batch]
            advice += (
                " The batch is a dict of column name to tensor, and no tuple: x, y = "
                f"batch[{first!r}], batch[{last!r}]."
            )
        raise ShapeError(
            f"The module's training_step failed on a batch of {_described(batch)} with "
            f"{type(error).__name__}: {error}. {advice}"
        ) from error

    is_known = isinstance(output, Mapping) and module.automatic_optimization
    if is_known and not output.keys() & {"loss", "denominator"}:
        raise ParamError(
            f"model: expected a loss, or a dict with the key 'loss', from training_step, found the "
            f"keys {', '.join(map(repr, output))}. Return the loss under 'loss'."
        )

    def losses_of(part: slice) -> list[float | None]:
        output = run(trial, precision.convert_input(batch_of(part)))
        loss, stated = as_stated(output, "training_step")
        loss = loss["loss"] if isinstance(loss, Mapping) else loss
        return [None if loss is None or stated is not None else float(loss)]

    def on(count: int) -> Callable[[Any], Any]:
        first = precision.convert_input(batch_of(slice(count)))
        return lambda module: run(module, first)

    one_row = takes_one_row(module, on(1), [on(2), on(3)])
    trial.eval()
    with torch_traceless():
        halves = compare_halves(losses_of, rows)
    return LightningTrial(takes_one_row=one_row, loss_of_halves=halves[0] if halves else "mean")


def _named(batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by name, or by position."""
    if isinstance(batch, torch.Tensor):
        batch = [batch]
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {str(name): each for name, each in entries if isinstance(each, torch.Tensor)}


def _described(batch: Any) -> str:
    return described(_named(batch)) or type(batch).__name__


def row_shapes(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], spec: TensorSpec
) -> list[tuple[int, ...]] | None:
    """Return the shape of one row of each output; None if the module rejects the inputs.

    ``spec`` defines the form of the module's inputs, and its outputs if they have names.

    A LightningModule can train without a ``forward`` that takes its features.
    """
    try:
        return output_shapes(module, spec, inputs)
    except ShapeError as error:
        logger.info("forward() does not take the feature columns (%s)", error)
        return None
