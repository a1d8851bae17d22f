"""Checkpoints of a Lightning run, at the end of an epoch and within it.

Lightning's own checkpoint holds the module's parameters, optimizers, schedulers, and the states of
callbacks and loops. It lacks the states of torchmetrics objects and the settings of the current
epoch, which this module adds. Logged values of the epoch are not saved: a resumed epoch reports
the values of its second part.

`of_flavor` makes the callback for either Lightning package. Runs on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning.callbacks import EpochRecorder, steps_taken
from hvd_estimators.lightning.loaders import skip_batches
from hvd_estimators.lightning.package import (
    Callback,
    averages_weights,
    is_library,
    is_lightning,
    patch_attribute,
    patch_method,
)
from hvd_estimators.lightning.strategy import PARAMETER_GROUPS
from hvd_estimators.lightning.trainer_args import LightningTrainSpec
from hvd_estimators.store.base import Store
from hvd_estimators.store.checkpoints import TensorFile
from hvd_estimators.store.paths import Position
from hvd_estimators.store.synced_directory import SyncedDirectory
from hvd_estimators.torch.collectives import check_same_weights, exchange
from hvd_estimators.torch.gradients import GradientAverager
from hvd_estimators.torch.metrics import metric_states, restore_metrics
from hvd_estimators.torch.serialization import group_names
from hvd_estimators.torch.shard_files import write_parts
from hvd_estimators.torch.shard_state import (
    BufferReducer,
    BufferState,
    ShardBuffers,
    TorchStreams,
    TrainableState,
    non_persistent_buffers,
)
from hvd_estimators.torch.sharding import sharded_weights, with_parts
from hvd_estimators.torch.stateful import StatefulObjects
from hvd_estimators.torch.tensors import snapshot
from hvd_estimators.training.checkpoint_writer import CheckpointWriter, gather_state
from hvd_estimators.training.horovod_session import seed_rank
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.shard_state import ShardStates
from hvd_estimators.training.spec import EpochMetrics
from hvd_estimators.training.step_control import StepControl

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

logger = logging.getLogger(__name__)

# Keys of a checkpoint, in addition to Lightning's.
_BUFFERS = "hvd_estimators.buffers"
_BASES = "hvd_estimators.buffer_bases"
_STATEFUL = "hvd_estimators.stateful"
_GRADIENTS = "hvd_estimators.gradients"
_PARTIAL = "hvd_estimators.partial"
_REQUIRES_GRAD = "hvd_estimators.requires_grad"
_RETURNED = "hvd_estimators.returned"
_UNFINISHED = "hvd_estimators.unfinished"
_OWN_KEYS = (
    *(_BUFFERS, _BASES, _STATEFUL, _GRADIENTS, _PARTIAL, _REQUIRES_GRAD, _RETURNED),
    _UNFINISHED,
)

# The large parts of a checkpoint, which may share tensors.
_TENSORS = ("state_dict", "current_model_state", "optimizer_states", _BUFFERS, _BASES, _GRADIENTS)

# Hooks after the last step, which may replace the weights.
_END_HOOKS = ("on_train_end", "on_fit_end")

_NO_FOLDER = os.path.join(tempfile.gettempdir(), "hvd_estimators-no-folder")
"""Local folder that is never made."""


def _model_checkpoints(trainer: Trainer) -> list[Any]:
    """Return the user's ``ModelCheckpoint`` callbacks."""
    connected: Any = trainer
    return [c for c in connected.callbacks if is_lightning(c, "callbacks.ModelCheckpoint")]


def check_links(callbacks: Iterable[Any], store: Store, directory: str) -> None:
    """Check that ``ModelCheckpoint`` callbacks can write to a directory of the store.

    Raises
    ------
    ParamError
        If one makes links, and the directory is not local.
    """
    for callback in callbacks:
        makes_links = is_lightning(callback, "callbacks.ModelCheckpoint") and (
            callback.save_last == "link"
        )
        if makes_links and store.local_path(directory) is None:
            raise ParamError(
                f"callbacks: ModelCheckpoint(save_last='link') makes a link, and {directory!r} "
                "has none. Set save_last=True."
            )


@dataclass(frozen=True, eq=False, repr=False)
class _Prepared:
    """A checkpoint, ready to be saved; see `CheckpointWriter.save`."""

    state: RunState
    checkpoint: dict[str, Any]
    is_copy: bool = False
    files: tuple[TensorFile, ...] = ()


@dataclass(eq=False, repr=False)
class RunCheckpoint(Callback):
    """Save the run at the end of each epoch and within it, with all state needed to resume.

    Lightning's own hook, ``on_train_epoch_end``, runs before schedulers that follow a metric have
    stepped. Therefore this callback saves an epoch when the next one starts, before any other
    callback runs. It saves the last epoch when training ends. Hooks such as ``on_train_end`` may
    then replace the weights, for example by averages. A longer run resumes from the weights before
    that. A run without further epochs returns those after it, which the checkpoint holds, too.

    Within an epoch the run is saved between two batches. At that point the validation, schedulers
    and loggers of the first batch have run, and the loader has not provided the second. A longer
    run also resumes there if the run ends within an epoch, by ``max_steps`` or a stop. A run
    without further steps returns the epoch's record, too, which the checkpoint holds.

    Attributes
    ----------
    spec : LightningTrainSpec
        The training job.
    recorder : EpochRecorder
        Records the epochs.
    shards : ShardStates
        The virtual shards that the rank runs.
    buffers : BufferReducer
        Reduces the module's buffers.
    streams : TorchStreams
        The rank's random numbers.
    control : StepControl
        Decides when to save within an epoch, and when to stop; its context must have been entered.
    writer : CheckpointWriter
        Writes the checkpoints.
    logs : SyncedDirectory
        The run's logs.
    directory : str
        The directory for the files of the user's ``ModelCheckpoint``.
    restored : RunState or None
        The state from which the run resumes.
    """

    spec: LightningTrainSpec
    recorder: EpochRecorder
    shards: ShardStates
    buffers: BufferReducer
    streams: TorchStreams
    control: StepControl
    writer: CheckpointWriter
    logs: SyncedDirectory
    directory: str
    restored: RunState | None

    def __post_init__(self) -> None:
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        # Attributes that every LightningModule has.
        self._base_attributes = frozenset(vars(self.spec.flavor.get("LightningModule")()))
        self._has_started = False
        self._has_compared_ranks = False
        self._steps = 0
        self._trainable: TrainableState | None = None
        self._non_persistent: Mapping[str, bytes] = {}
        self._stateful: StatefulObjects | None = None
        self._gradients: Mapping[str, torch.Tensor] | None = None
        # The checkpoint after the last step, if hooks follow that may replace weights, or if the
        # step is within an epoch. Only rank 0 writes it.
        self._ended: _Prepared | None = None
        # Parts of a loaded checkpoint, until they are restored.
        self._loaded: dict[str, Any] = {}

    @property
    def is_sharded(self) -> bool:
        """True if this rank holds a part of the parameters."""
        return self.spec.sharding.applies_to(self.shards.size)

    @contextlib.contextmanager
    def within_epochs(self, trainer: Trainer) -> Iterator[None]:
        """Save and resume the run within epochs, for the duration of the block."""
        loop = trainer.fit_loop.epoch_loop
        resume = functools.partial(self._start_steps, trainer)
        save = functools.partial(self._end_step, trainer)
        with (
            patch_method(loop, "on_run_start", after=resume),
            patch_method(loop, "on_advance_end", after=save),
        ):
            yield

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Redirect checkpoints, including the ones from the module's ``configure_callbacks``."""
        # Callbacks of that hook were added at the end, but the recorder must be last.
        given: Any = trainer
        given.callbacks = sorted(given.callbacks, key=lambda c: isinstance(c, EpochRecorder))
        is_local = self.spec.store.local_path(self.directory) is not None
        check_links(_model_checkpoints(trainer), self.spec.store, self.directory)
        for callback in _model_checkpoints(trainer):
            # It opens its folder next, and without the store's options.
            callback.dirpath = self.directory if is_local else _NO_FOLDER

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Redirect checkpoints to a remote store."""
        self._redirect(trainer)

    def _redirect(self, trainer: Trainer) -> None:
        store = self.spec.store
        if store.local_path(self.directory) is None:
            for callback in _model_checkpoints(trainer):
                callback.dirpath, callback._fs = self.directory, store.fs

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the state that Lightning ignores; it is restored after rank 0's weights are sent."""
        # Before ModelCheckpoint compares its folder with the checkpoint's.
        self._redirect(trainer)
        self._loaded = {name: checkpoint[name] for name in _OWN_KEYS if name in checkpoint}
        partials: Sequence[dict[str, Any]] = checkpoint.get(_PARTIAL, ())
        if self.shards.rank < len(partials):
            # The position of the user's data module's loader, on this rank.
            position = partials[self.shards.rank]["loaders"]
            checkpoint["loops"]["fit_loop"]["state_dict"].update(position)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore this rank's buffers, and restore the package's SIGTERM handler."""
        with contextlib.suppress(ValueError):  # this is not the main thread
            # Lightning's handler would end this rank alone after a batch.
            signal.signal(signal.SIGTERM, self._on_sigterm)
        trainer._signal_connector.received_sigterm = False
        self._trainable = TrainableState(pl_module)
        self._trainable.restore(self._loaded.pop(_REQUIRES_GRAD, {}))
        library_objects = _known_objects(trainer)
        self._stateful = StatefulObjects({}, pl_module, library_objects, self._base_attributes)
        self._non_persistent = non_persistent_buffers(pl_module)
        self.restore_buffers(pl_module)
        self.buffers.start(self._loaded.pop(_BASES, {}))
        gradients = sharded_weights(pl_module, self._loaded.pop(_GRADIENTS, {}))
        _averager(trainer).restore_gradients(gradients)
        self._steps = steps_taken(trainer)
        if self.restored is not None and not self.restored.rows:
            # With max_steps Lightning would resume the completed epoch.
            _restarted(trainer.fit_loop)

    def load_returned(self, trainer: Trainer, module: LightningModule) -> None:
        """Load what a completed run returned: weights of hooks, results of an unfinished epoch."""
        records, best = self._loaded.pop(_UNFINISHED, ((), ()))
        self.recorder.history += [EpochMetrics(*record) for record in records]
        for callback, path in zip(_model_checkpoints(trainer), best, strict=False):
            callback.best_model_path = path
        returned = self._loaded.pop(_RETURNED, {})
        if returned:
            module.load_state_dict(returned, strict=False)

    def restore_buffers(self, module: torch.nn.Module) -> None:
        """Restore the buffers of each shard, once; also for a completed run."""
        own, buffers = BufferState(module), self._loaded.pop(_BUFFERS, ())
        if len(buffers) == self.shards.num_shards:
            self.shards.for_each(lambda shard: own.restore(buffers[shard]))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the previous epoch, and seed this one as a resumed run does."""
        if self._has_started:
            self.save(trainer)
            self.control.after_epoch(trainer.current_epoch)
        self._has_started = True
        self._ended = None  # a hook has withdrawn a stop
        self._seed_epoch(trainer.current_epoch)
        self._restore_stateful(pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        """Keep what hooks of the batch's transfer have set: they run for each shard."""
        self.shards.keep_own()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show other callbacks the evaluation weights, and compare ranks after the first epoch."""
        strategy: Any = trainer.strategy
        strategy.set_optimizer_modes(training=False)
        if not self._has_compared_ranks:
            self._has_compared_ranks = True
            check_same_weights(pl_module, trainer.current_epoch, self.spec.run)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what a longer run uses, before other hooks change it."""
        self._gradients = _averager(trainer).unused_gradients()
        is_saved = self.spec.run.checkpoints_path is not None and self._ended is None
        if is_saved and not self.is_sharded and _may_replace_weights(trainer):
            checkpoint = _after_epoch(self._checkpoint(trainer))
            state, _ = self._gather(checkpoint, stopped=trainer.should_stop)
            tensors = {}
            if self.shards.rank == 0:
                tensors = {n: snapshot(v) for n, v in checkpoint.items() if n in _TENSORS}
            self._ended = _Prepared(state, {**checkpoint, **tensors})

    def save_last(self, trainer: Trainer, *, stopped: bool) -> None:
        """Save the run after training. Called by all ranks.

        Parameters
        ----------
        trainer : Trainer
            The Trainer.
        stopped : bool
            Whether a callback has stopped training.
        """
        if self._ended is None:
            self.save(trainer, stopped=stopped)
            return
        self.logs.sync()
        # A hook of the epoch's end may have stopped training later.
        ended = replace(self._ended, state=replace(self._ended.state, stopped=stopped))
        state, checkpoint, self._ended = ended.state, ended.checkpoint, None
        if state.rows:
            records = self.recorder.history[state.epoch :]
            checkpoint[_UNFINISHED] = (
                [(each.epoch, each.train, each.validation) for each in records],
                [callback.best_model_path for callback in _model_checkpoints(trainer)],
            )
        if self.shards.rank != 0 or self.is_sharded:
            self._save(ended)
            return
        before = checkpoint.get("current_model_state", checkpoint["state_dict"])
        after = snapshot(trainer.lightning_module.state_dict())
        checkpoint[_RETURNED] = {
            name: value
            for name, value in after.items()
            if isinstance(value, torch.Tensor)
            and not (name in before and torch.equal(value, before[name]))
        }
        self._save(ended)

    def save(self, trainer: Trainer, *, stopped: bool = False) -> None:
        """Save the state after the newest epoch. Called by all ranks.

        Parameters
        ----------
        trainer : Trainer
            The Trainer.
        stopped : bool
            Whether a callback has stopped training.
        """
        self._write(_after_epoch(self._checkpoint(trainer)), stopped=stopped)

    def _checkpoint(self, trainer: Trainer) -> dict[str, Any]:
        checkpoint = _dump_checkpoint(trainer)
        checkpoint[_BUFFERS] = ShardBuffers(
            trainer.lightning_module, self.shards, self._non_persistent
        )
        assert self._stateful is not None
        checkpoint[_STATEFUL] = self._stateful.capture()
        module = trainer.lightning_module
        assert self._trainable is not None
        checkpoint[_REQUIRES_GRAD] = self._trainable.capture()
        checkpoint[PARAMETER_GROUPS] = [
            group_names(optimizer, module) for optimizer in trainer.optimizers
        ]
        gradients = self._gradients
        if gradients is None:
            gradients = _averager(trainer).unused_gradients()
        checkpoint[_GRADIENTS] = snapshot(gradients)
        return checkpoint

    def _write(
        self,
        checkpoint: dict[str, Any],
        batches: int = 0,
        partial: Mapping[str, Any] | None = None,
        *,
        stopped: bool = False,
    ) -> None:
        """Gather the state of all ranks, and save it on rank 0."""
        self.logs.sync()
        if self.spec.run.checkpoints_path is not None:
            self._save(self._prepared(checkpoint, batches, partial, stopped=stopped))

    def _prepared(
        self,
        checkpoint: dict[str, Any],
        batches: int = 0,
        partial: Mapping[str, Any] | None = None,
        *,
        stopped: bool = False,
    ) -> _Prepared:
        """Gather the state of all ranks; within an epoch, copy it on rank 0."""
        state, partials = self._gather(checkpoint, batches, partial, stopped=stopped)
        files: tuple[TensorFile, ...] = ()
        if self.is_sharded:
            position = Position(state.epoch, state.rows)
            checkpoint, files = write_parts(self.writer, position, checkpoint)
        is_copy = False
        if batches and self.shards.rank == 0:
            checkpoint, is_copy = _snapshot(checkpoint)
            checkpoint[_PARTIAL] = partials
        return _Prepared(state, checkpoint, is_copy, files)

    def _gather(
        self,
        checkpoint: dict[str, Any],
        batches: int = 0,
        partial: Mapping[str, Any] | None = None,
        *,
        stopped: bool = False,
    ) -> tuple[RunState, list[Any]]:
        """Return the run's state and the ranks' partial states. Sets a checkpoint's buffers."""
        buffers: ShardBuffers = checkpoint[_BUFFERS]
        state, of_ranks = gather_state(
            self.spec,
            self.recorder.history,
            batches,
            self.shards,
            self.streams,
            exchange,
            (partial, buffers.digests),
            stopped=stopped,
        )
        partials, digests = zip(*of_ranks, strict=True)
        checkpoint[_BUFFERS] = buffers.unequal(digests)
        return state, list(partials)

    def _save(self, given: _Prepared) -> None:
        if self.shards.rank == 0:
            self.writer.save(
                given.state,
                lambda file: torch.save(given.checkpoint, file),
                is_copy=given.is_copy,
                files=given.files,
            )

    def _start_steps(self, trainer: Trainer) -> None:
        """Resume within an epoch, once, or begin one, after all hooks of the epoch's start."""
        state, self.restored = self.restored, None
        if state is not None and state.rows:
            self._resume(trainer, state)
        else:
            # Hooks may have reset a buffer.
            self.buffers.start()

    def _resume(self, trainer: Trainer, state: RunState) -> None:
        self._has_started = True
        self._seed_epoch(trainer.current_epoch)
        repeat_epoch_start(trainer)
        self._restore_stateful(trainer.lightning_module)
        skip_batches(trainer, lambda: self._seed_epoch(trainer.current_epoch))
        self._restore_partial(trainer)
        # Otherwise Lightning would skip schedulers that follow a metric, and validate again.
        _restarted(trainer.fit_loop)
        self.shards.for_each(lambda shard: self.streams.restore(state.random[shard]))

    def _restore_stateful(self, module: LightningModule) -> None:
        assert self._stateful is not None
        states, like = self._loaded.pop(_STATEFUL, {}), next(module.parameters(), None)
        self._stateful.restore(with_parts(states, like) if self.is_sharded else states)

    def _end_step(self, trainer: Trainer) -> None:
        """Save the run if due, and stop if requested. Called by all ranks per batch."""
        before, self._steps = self._steps, steps_taken(trainer)
        loop = trainer.fit_loop.epoch_loop
        if loop._num_ready_batches_reached():
            return  # the end of the epoch is saved after its hooks
        batches = loop.batch_progress.current.completed
        if loop.done:
            self._end_within(trainer, batches)
            return
        if self._steps == before:
            return
        steps = range(before + 1, self._steps + 1)
        save = functools.partial(self._save_within, trainer, batches)
        self.control.after_step(trainer.current_epoch, batches, steps, save)

    def _save_within(self, trainer: Trainer, batches: int) -> bool:
        """Save the run within an epoch, and return whether that was possible."""
        if _averager(trainer).pending:
            return False  # these gradients exist on one rank only, and the next step uses them
        self._write(*self._within(trainer, batches))
        return True

    def _end_within(self, trainer: Trainer, batches: int) -> None:
        """Keep the state after the last step, before the hooks of the unfinished epoch's end."""
        if self.spec.run.checkpoints_path is None:
            return
        if _averager(trainer).pending:
            level = logging.WARNING if self.shards.rank == 0 else logging.DEBUG
            logger.log(
                level,
                "The run ends within epoch %d while gradients accumulate. If it is resumed, it "
                "begins with the next epoch.",
                trainer.current_epoch,
            )
        else:
            checkpoint, _, partial = self._within(trainer, batches)
            partial["should_stop"] = False  # a longer run goes on
            self._ended = self._prepared(checkpoint, batches, partial, stopped=trainer.should_stop)

    def _within(self, trainer: Trainer, batches: int) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """Return the state within an epoch: a checkpoint, the batches, and this rank's state."""
        checkpoint = self._checkpoint(trainer)
        checkpoint[_BASES] = self.buffers.bases
        loaders = checkpoint["loops"]["fit_loop"]["state_dict"]
        return checkpoint, batches, {**self._partial_state(trainer), "loaders": loaders}

    def _partial_state(self, trainer: Trainer) -> dict[str, Any]:
        """Return this rank's state within the epoch, as picklable values."""
        module = trainer.lightning_module
        return {
            "callback_metrics": snapshot(dict(trainer.callback_metrics)),
            "metrics": metric_states(module),
            "evaluating": [name for name, part in module.named_modules() if not part.training],
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "should_stop": trainer.should_stop,
        }

    def _restore_partial(self, trainer: Trainer) -> None:
        """Restore the state within the epoch, before the next batch.

        The earlier launch may have had more or fewer ranks.
        """
        partials: Sequence[dict[str, Any]] = self._loaded.pop(_PARTIAL)
        module, first = trainer.lightning_module, partials[0]
        # This rank replaces the earlier ranks whose shards it runs; there may be no such rank.
        own = partials[self.shards.rank :: self.shards.size]
        self.recorder.on_train_epoch_start(trainer, module)
        # A validation may have been earlier in the epoch; callbacks and schedulers monitor it.
        trainer.callback_metrics.update(first["callback_metrics"])
        restore_metrics(module, [partial["metrics"] for partial in own])
        for name, part in module.named_modules():
            part.training = name not in first["evaluating"]
        # A callback may have set the value in this epoch.
        trainer.accumulate_grad_batches = first["accumulate_grad_batches"]
        trainer.should_stop = first["should_stop"]

    def _seed_epoch(self, epoch: int) -> None:
        self.shards.for_each(
            lambda shard: torch.manual_seed(seed_rank(self.spec.data.random_seed, shard, epoch))
        )


def repeat_epoch_start(trainer: Trainer) -> None:
    """Repeat the user's ``on_train_epoch_start`` hooks, and undo their changes to restored state.

    Lightning does not call these hooks in a resumed epoch. The hooks create attributes that the
    steps use, such as lists of losses. Weights, buffers, learning rates, schedulers and callbacks
    keep the restored state.
    """
    connected: Any = trainer
    module, name = trainer.lightning_module, "on_train_epoch_start"
    callbacks = [c for c in connected.callbacks if not is_library(getattr(type(c), name))]
    hooks: list[Any] = [
        functools.partial(getattr(callback, name), trainer, module) for callback in callbacks
    ]
    if not is_library(getattr(type(module), name)):
        hooks.append(module.on_train_epoch_start)
    if not hooks:
        return
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    stateful: list[Any] = [module, *trainer.optimizers, *schedulers, *callbacks]
    states = [snapshot(each.state_dict()) for each in stateful]
    buffers, trained = BufferState(module), [(p, p.requires_grad) for p in module.parameters()]
    values = buffers.capture()
    # Hooks can only log under this name.
    with patch_attribute(module, "_current_fx_name", name):
        for hook in hooks:
            try:
                hook()
            except Exception as error:  # such as a parameter group that the checkpoint has added
                logger.warning("%s() failed in a resumed epoch, and is left out: %s", name, error)
    for each, state in zip(stateful, states, strict=True):
        if state:
            each.load_state_dict(state)
    buffers.restore(values)
    for parameter, requires_grad in trained:
        parameter.requires_grad_(requires_grad)


def _may_replace_weights(trainer: Trainer) -> bool:
    """Return whether a hook after the last step may replace the weights."""
    connected: Any = trainer
    # Lightning's other callbacks only write files and print.
    return any(
        averages_weights(each) or not is_library(getattr(type(each), hook))
        for each in (trainer.lightning_module, *connected.callbacks)
        for hook in _END_HOOKS
    )


def _after_epoch(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint, changed to one of a completed epoch.

    The next epoch may have started; Lightning would otherwise treat it as interrupted.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["ready"] = counts["completed"]
    return checkpoint


def _snapshot(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a copy of a checkpoint that can be written while training continues.

    Returns
    -------
    dict
        The copy. It holds user objects themselves if they cannot be copied.
    bool
        Whether all of it is a copy.
    """
    tensors = snapshot({name: checkpoint[name] for name in _TENSORS if name in checkpoint})
    try:
        rest = copy.deepcopy({n: value for n, value in checkpoint.items() if n not in tensors})
    except Exception as error:
        logger.debug("A checkpoint is written while training waits: %s", error)
        return {**checkpoint, **tensors}, False
    return {name: tensors.get(name, rest.get(name)) for name in checkpoint}, True


def _known_objects(trainer: Trainer) -> list[Any]:
    """Return the objects whose state Lightning's own checkpoint holds."""
    given: Any = trainer
    wrappers: Any = trainer.lightning_module.optimizers()
    return [
        trainer,
        trainer.strategy,
        trainer.precision_plugin,
        given.datamodule,
        *given.callbacks,
        *trainer.loggers,
        *trainer.optimizers,
        *(wrappers if isinstance(wrappers, list) else [wrappers]),
        *(config.scheduler for config in trainer.lr_scheduler_configs),
    ]


def _averager(trainer: Trainer) -> GradientAverager:
    strategy: Any = trainer.strategy
    averager: GradientAverager = strategy.averager
    return averager


def _restarted(loop: Any) -> None:
    """Make the loop of a fit, and its nested loops, continue as if they were not interrupted."""
    # The outer loop's own setter ignores False with max_steps. Nested loops have the inherited one.
    type(loop.epoch_loop).restarting.fset(loop, False)


def _dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that Lightning would write."""
    checkpoint: dict[str, Any] = {}

    def save(content: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        checkpoint.update(content)

    with (
        patch_attribute(trainer.strategy, "keeps_parts", True),
        patch_attribute(trainer.strategy, "save_checkpoint", save),
        patch_attribute(trainer.strategy, "barrier", lambda *args, **kwargs: None),
        # The run's checkpoint has the statistics of each shard.
        patch_attribute(trainer.strategy, "average_batch_norm", lambda: None),
    ):
        trainer.save_checkpoint("", weights_only=False)
    return checkpoint
