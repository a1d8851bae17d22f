"""Early checks on the driver: settings of virtual shards, and a module on a few rows."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.trial import Trial, leave_to_ranks, log_untried
from hvd_estimators.inference.errors import described
from hvd_estimators.lightning.package import default_flavor, flavor_of
from hvd_estimators.lightning.trainer_args import precision_of
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.torch.dry_run import (
    check_sync_batch_norm,
    output_shapes,
    takes_one_row,
    torch_traceless,
)
from hvd_estimators.torch.lookups import failed_lookup
from hvd_estimators.torch.loss_weights import as_stated
from hvd_estimators.torch.serialization import copied
from hvd_estimators.torch.tensors import TensorSpec
from hvd_estimators.training.row_weights import reduction_of

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
    module: torch.nn.Module,
    data: DataSpec,
    trainer_args: Mapping[str, Any],
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
    check_sync_batch_norm(module, data)
    for name in _COUNTED_BATCHES:
        if trainer_args.get(name) is not None:
            param = f"trainer_args: {name}"
            data.require_one_shard_per_rank(param, "which this setting counts as several")


@dataclass(frozen=True)
class LightningTrial(Trial):
    """Result of a dry run of a LightningModule.

    Attributes
    ----------
    loss_of_halves : str
        See `compare_halves`.
    """

    loss_of_halves: str = "mean"


def compare_halves(
    module: LightningModule,
    rows: int,
    batch_of: Callable[[slice], Any],
    trainer_args: Mapping[str, Any],
) -> str:
    """Compare the loss of a few rows with the losses of both halves.

    Parameters
    ----------
    module : LightningModule
        The model; not modified.
    rows : int
        Number of rows.
    batch_of : callable
        Returns the batch of some of the rows.
    trainer_args : mapping
        The user's Trainer arguments.

    Returns
    -------
    str
        ``"sum"`` or ``"other"`` if the loss is not the mean over rows; ``"mean"`` if it is, if it
        states its denominator, or if the step needs a Trainer.
    """
    half, parts = rows // 2, (slice(None), slice(None), slice(rows // 2), slice(rows // 2, None))
    losses = []
    try:
        convert, step = _trial_step(module, trainer_args)
        trial = copied(module).eval()
        with torch_traceless():
            for part in parts:
                output = step(trial, convert(batch_of(part)))
                loss, stated = as_stated(output, "training_step")
                loss = loss["loss"] if isinstance(loss, Mapping) else loss
                if stated is not None or loss is None or not half:
                    return "mean"
                losses.append(float(loss))
    except Exception as error:
        logger.info("The loss of a few rows could not be compared with its halves: %s", error)
        return "mean"
    whole, again, *halves = losses
    # A step may draw random numbers.
    is_random = not math.isclose(whole, again, rel_tol=1e-6)
    tolerance = 0.25 if is_random else 1e-3
    reduction = reduction_of(whole, (halves[0], halves[1]), (half, rows - half), tolerance)
    return reduction or ("mean" if is_random else "other")


def _trial_step(
    module: LightningModule, trainer_args: Mapping[str, Any]
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """Return functions that convert a batch to the Trainer's precision, and that run a step."""
    precision = precision_of(trainer_args, flavor_of(module) or default_flavor())
    count = max(len(inspect.signature(module.training_step).parameters), 1)

    def step(trial: Any, batch: Any) -> Any:
        with precision.train_step_context():
            return precision.convert_module(trial).training_step(*[batch, 0][:count])

    return precision.convert_input, step


def check_loss(loss_of_halves: str) -> None:
    """Reject a loss that sums over the rows, and warn if it is another mean; see `compare_halves`.

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
        logger.warning(
            "model: the loss that training_step returns for a few rows is not the mean of the "
            "losses of both halves. Several processes then do not train as one. Return {'loss': "
            "..., 'denominator': ...} if it is a mean over something else than rows, such as class "
            "weights. If it compares rows with each other, see 'Contrastive losses over the rows "
            "of all ranks' in the page on torch."
        )


def check_step(
    module: LightningModule,
    batch_of: Callable[[slice], Any],
    feature_cols: Sequence[str] = (),
    label_cols: Sequence[str] = (),
    trainer_args: Mapping[str, Any] | None = None,
) -> bool | None:
    """Run a training step on a copy with a few rows, if the step needs no Trainer.

    Parameters
    ----------
    module : LightningModule
        The model; not modified.
    batch_of : callable
        Returns the batch of some of the rows.
    feature_cols, label_cols : sequence of str
        The columns, for messages.
    trainer_args : mapping, optional
        The user's Trainer arguments, whose precision the step has.

    Returns
    -------
    bool or None
        Whether a batch of one row can train, see `takes_one_row`.

    Raises
    ------
    ShapeError
        If the step fails for a reason unrelated to the Trainer.
    """
    flavor = flavor_of(module) or default_flavor()
    is_overridden = flavor.get("utilities.model_helpers.is_overridden")
    if any(is_overridden(hook, module) for hook in _PREPARING_HOOKS):
        return None
    trial = _trial_copy(module)
    if trial is None or "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return None

    try:
        convert, run = _trial_step(module, trainer_args or {})
        batch = convert(batch_of(slice(None)))
    except Exception as error:  # Only the ranks may have the packages and devices.
        log_untried(error)
        return None

    def step(module: Any, given: Mapping[str, Any]) -> None:
        with torch.enable_grad():
            run(module, given)

    watched = WatchedBatch(batch) if isinstance(batch, dict) else batch
    try:
        with torch_traceless():
            step(trial, watched)
    except Exception as error:
        if any(word in str(error) for word in ("Trainer", "trainer")):
            return None
        failed = (
            f"The module's training_step failed on a batch of {_described(batch)} with "
            f"{type(error).__name__}: {error}."
        )
        is_unpacked = isinstance(watched, WatchedBatch) and watched.is_taken_as_tuple
        if isinstance(batch, dict) and (
            takes_tuple(error) or (is_unpacked and not leave_to_ranks(error))
        ):
            raise ShapeError(f"{failed} {unpacking_hint(feature_cols, label_cols)}") from error
        if leave_to_ranks(error):
            return None
        reason = failed_lookup(lambda: step(trial, batch), _named(batch))
        if reason is not None:
            raise ShapeError(f"{failed} {reason}") from error
        raise ShapeError(
            f"{failed} Set feature_cols and label_cols to the columns that "
            "it reads, or column_dtypes (such as {'label': 'int64'}) if it expects other dtypes."
        ) from error

    def on(rows: int) -> Callable[[Any], None]:
        first = convert(batch_of(slice(rows)))
        return lambda module: step(module, first)

    return takes_one_row(module, on(1), [on(2), on(3)])


def _named(batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by name, or by position."""
    if isinstance(batch, torch.Tensor):
        batch = [batch]
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {str(name): each for name, each in entries if isinstance(each, torch.Tensor)}


def _described(batch: Any) -> str:
    return described(_named(batch)) or type(batch).__name__


class WatchedBatch(dict[str, Any]):
    """Batch that records whether it is unpacked, as in ``x, y = batch``."""

    is_taken_as_tuple = False

    def __iter__(self) -> Iterator[str]:
        self.is_taken_as_tuple = True
        return super().__iter__()


def takes_tuple(error: BaseException) -> bool:
    """Return whether an error looks like ``x, y = batch`` or ``batch[0]`` on a dict."""
    if isinstance(error, KeyError):
        return bool(error.args) and isinstance(error.args[0], int)
    signs = ("not str", "'str' object", "to unpack")
    return isinstance(error, (TypeError, ValueError, AttributeError)) and any(
        sign in str(error) for sign in signs
    )


def unpacking_hint(feature_cols: Sequence[str], label_cols: Sequence[str]) -> str:
    """Return a hint with the code to write instead of ``x, y = batch``."""
    features, labels = (
        ", ".join(f'batch["{name}"]' for name in names) for names in (feature_cols, label_cols)
    )
    x = f"({features})" if len(feature_cols) > 1 else features
    y = f"({labels})" if len(label_cols) > 1 else labels
    line = f"x, y = {x}, {y}" if labels else f"x = {x}"
    return (
        "The batch is a dict of column name to tensor, and no tuple. Instead of 'x, y = batch' "
        f"write: {line}"
    )


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


def _trial_copy(module: torch.nn.Module) -> Any:
    """Return a copy to try, or log a warning and return None if the copy fails."""
    try:
        return copied(module)
    except Exception as error:
        log_untried(error)
        return None
