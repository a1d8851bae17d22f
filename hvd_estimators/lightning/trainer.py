"""Training on one rank with Lightning. Runs in each process that a backend starts."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import torch

from hvd_estimators._util.temp_files import LocalFile, folder_prefix
from hvd_estimators.lightning.callbacks import EpochRecorder, TerminateOnNaN, ValueReducer
from hvd_estimators.lightning.checkpoint import RunCheckpoint
from hvd_estimators.lightning.loaders import (
    TrainLoader,
    ValidationLoader,
    check_validation_batches,
    is_lightning_data,
    open_lightning_data,
)
from hvd_estimators.lightning.loggers import StoreCheckpointIO, make_loggers, make_profiler, quiet
from hvd_estimators.lightning.package import is_lightning, of_flavor
from hvd_estimators.lightning.strategy import WeightedStrategy
from hvd_estimators.lightning.trainer_args import LightningTrainSpec, TrainerObjects
from hvd_estimators.loading.spec import open_data_module
from hvd_estimators.store.checkpoints import checkpoint_path
from hvd_estimators.store.paths import Position
from hvd_estimators.store.synced_directory import SyncedDirectory
from hvd_estimators.torch.collectives import (
    choose_device,
    current,
    exchange,
    session,
    sum_over_ranks,
    weight_digests,
)
from hvd_estimators.torch.frozen_base import FrozenBase, frozen_base
from hvd_estimators.torch.loss_weights import StepBatches
from hvd_estimators.torch.optimizer_step import has_modes, set_optimizer_mode
from hvd_estimators.torch.serialization import load_module, module_file, trained_file
from hvd_estimators.torch.shard_files import as_trained, with_tensors, write_trained
from hvd_estimators.torch.shard_state import BufferReducer, BufferState, TorchStreams
from hvd_estimators.torch.sharding import sharded_weights
from hvd_estimators.torch.stored_weights import find_weights_in, load_weights, without_weights
from hvd_estimators.torch.tensor_files import StoredTensor
from hvd_estimators.torch.tensors import gpu_memory, tensor_batches
from hvd_estimators.training.checkpoint_writer import CheckpointWriter, restore
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.shard_state import ShardStates
from hvd_estimators.training.spec import TrainResult, combined_digest
from hvd_estimators.training.step_control import StepControl, stopped_before, without_further_epochs

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# These hooks get batches that are on the CPU.
_MOVING_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


def train(spec: LightningTrainSpec) -> TrainResult:
    """Train for the remaining epochs. Runs on every rank.

    Returns
    -------
    TrainResult
        The trained module, from rank 0.
    """
    ranks = spec.data.num_ranks
    connected = session(spec.collectives, spec.mp_start_method, ranks, spec.use_gpu)
    with connected, quiet(spec.verbose):
        seed = spec.data.random_seed
        spec.flavor.get("seed_everything")(seed, workers=True, verbose=False)
        return _Trainer(spec).train()


class _Trainer:
    def __init__(self, spec: LightningTrainSpec) -> None:
        self.spec = spec
        self.rank, self.size = current().rank, current().size
        self.device = choose_device(spec.use_gpu, spec.verbose)
        self.sharding = spec.sharding if spec.sharding.applies_to(self.size) else None
        self.objects: TrainerObjects = load_module(spec.objects)
        self.module: LightningModule = self.objects.module
        self.base = self._load_weights()
        self.checkpoint_io = of_flavor(StoreCheckpointIO, spec.flavor)(spec.store)
        has_validation = spec.data.val_plan is not None or is_lightning_data(spec.data.data_module)
        # Of Lightning's check_val_every_n_epoch.
        self.checkpoints = CheckpointWriter(
            spec.store, spec.run, spec.checkpoints, validates=has_validation
        )
        self.control = StepControl(spec, self.size, sum_over_ranks, exchange)
        self.restored_path: str | None = None
        self.logged_steps: int | None = None
        self.restored = self._restore()
        self.stopped = stopped_before(spec, self.restored)
        self.spec = spec = without_further_epochs(spec, self.restored)
        # On every rank, because profilers write files on each rank.
        self.logs = SyncedDirectory(spec.store, spec.run.logs_path, fetch=self.rank == 0)
        self.streams = TorchStreams(self.device)
        parts = (self.streams, BufferState(self.module))
        self.shards = ShardStates(spec.data.num_shards, self.rank, self.size, parts)
        self.buffers = BufferReducer(self.module, self.shards, spec.buffer_reduction)

    def train(self) -> TrainResult:
        with contextlib.ExitStack() as stack:
            # A rank that is asked to stop gets time until the checkpoint is written.
            stack.enter_context(self.control)
            progress = stack.enter_context(Progress(self.spec, self.rank))
            progress.when_asked_to_stop(self.control.request_stop)
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=folder_prefix()))
            stack.enter_context(self.logs)
            stack.enter_context(self.checkpoints)
            return self._train(stack, progress, scratch)

    def _train(self, stack: contextlib.ExitStack, progress: Progress, scratch: str) -> TrainResult:
        spec = self.spec
        done, rows = (0, 0) if self.restored is None else (self.restored.epoch, self.restored.rows)
        data, train_loader, validation_loader = self._open_data(stack, done, rows)
        strategy = of_flavor(WeightedStrategy, spec.flavor)(
            train_loader,
            validation_loader,
            compression=spec.gradient_compression,
            scale_learning_rate=spec.scale_learning_rate,
            checkpoint_io=self.checkpoint_io,
            shards=self.shards,
            buffers=self.buffers,
            batches_between_stops=self._batches_between_stops,
            sharding=self.sharding,
        )
        callbacks = [*self.objects.callbacks]
        if spec.terminate_on_nan:
            callbacks.append(of_flavor(TerminateOnNaN, spec.flavor)(self.control))
        arguments = self._arguments(strategy, callbacks, done)
        arguments = {"default_root_dir": scratch, **arguments, **self.objects.arguments}
        if self.stopped:
            arguments["max_epochs"] = done
        self.trainer = trainer = spec.flavor.get("Trainer")(**arguments)
        recorder = of_flavor(EpochRecorder, spec.flavor)(progress, validation_loader)
        if self.restored is not None:
            recorder.history[:] = self.restored.history
        run_checkpoint = of_flavor(RunCheckpoint, spec.flavor)(
            spec,
            recorder,
            self.shards,
            self.buffers,
            self.streams,
            self.control,
            self.checkpoints,
            self.logs,
            spec.run.checkpoints_path or scratch,
            self.restored,
        )
        # Two callbacks must run before all others, and one after all others.
        connected: Any = trainer
        reducer = of_flavor(ValueReducer, spec.flavor)()
        connected.callbacks = [run_checkpoint, reducer, *connected.callbacks, recorder]
        with run_checkpoint.within_epochs(trainer):
            if "weights_only" in inspect.signature(trainer.fit).parameters:  # Lightning 2.6
                data["weights_only"] = False
            trainer.fit(self.module, ckpt_path=self.restored_path, **data)
        run_checkpoint.restore_buffers(self.module)
        if len(recorder.history) > done:
            self.stopped = trainer.should_stop
            run_checkpoint.save_last(trainer, stopped=self.stopped)
        elif trainer.num_training_batches == 0:
            raise RuntimeError(
                f"The training loader of rank {self.rank} has no batches: nothing was trained. "
                "Each rank's loader must have as many, at least one; see cur_shard and shard_count."
            )
        else:
            run_checkpoint.load_returned(trainer, self.module)
        return self._result(recorder)

    def _arguments(
        self, strategy: WeightedStrategy, callbacks: Sequence[Any], done: int
    ) -> dict[str, Any]:
        """Return the Trainer's default arguments, which the user's arguments replace."""
        spec, logs_path = self.spec, self.logs.path
        passes = 1
        if self.module.automatic_optimization:
            passes = spec.backward_passes_per_step
        arguments: dict[str, Any] = {
            "accelerator": "gpu" if self.device.type == "cuda" else "cpu",
            "devices": 1,
            "strategy": strategy,
            # A run that already has more epochs is only loaded.
            "max_epochs": max(spec.epochs, done),
            "callbacks": list(callbacks),
            "logger": make_loggers(
                self.objects.logger, logs_path, self.rank, spec.flavor, self.logged_steps
            ),
            "log_every_n_steps": spec.log_every_n_steps,
            "profiler": make_profiler(self.objects.profiler, logs_path, spec.flavor),
            "accumulate_grad_batches": passes,
            "enable_checkpointing": any(is_lightning(c, "callbacks.Checkpoint") for c in callbacks),
            # Lightning rejects callbacks of a kind that is disabled.
            "enable_progress_bar": any(is_lightning(c, "callbacks.ProgressBar") for c in callbacks),
            "enable_model_summary": spec.verbose > 1,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
        }
        if is_lightning_data(spec.data.data_module):
            arguments["limit_train_batches"] = spec.data.train_steps_per_epoch
            arguments["limit_val_batches"] = spec.data.validation_steps_per_epoch
        return arguments

    def _open_data(
        self, stack: contextlib.ExitStack, done: int, rows: int
    ) -> tuple[dict[str, Any], TrainLoader | None, ValidationLoader | None]:
        """Return the data arguments of ``Trainer.fit``, and the loaders of a built-in reader."""
        spec = self.spec
        if is_lightning_data(spec.data.data_module):
            module = open_lightning_data(spec, spec.users_data, self.rank, self.size)
            return {"datamodule": module}, None, None
        reader = open_data_module(
            spec.data,
            self.rank,
            self.size,
            epoch=done,
            rows=rows,
            epochs=spec.epochs - done,
            memory=gpu_memory(self._loader_device),
        )
        stack.enter_context(reader)
        device = self._loader_device
        batches = tensor_batches(reader.train_chunks(), device, reader.num_train_batches())
        train = TrainLoader(
            StepBatches(batches, reader.global_train_sizes(), sum_over_ranks),
            spec.form,
            spec.data.train_steps_per_epoch,
            self._passes_per_step,
            self.shards,
            done=spec.data.batches_before(done, rows),
            limit=lambda: self.trainer.num_training_batches,
        )
        validation = None
        if spec.data.val_plan is not None:
            steps = spec.data.validation_steps_per_epoch * spec.data.passes_per_batch
            validation = ValidationLoader(reader, spec.form, steps, device)
            if self.sharding is not None:
                check_validation_batches(validation.counts, self.sharding.mode)
        return {"train_dataloaders": train, "val_dataloaders": validation}, train, validation

    @property
    def _loader_device(self) -> torch.device:
        """The loaders' device: the GPU, unless the module itself moves batches there."""
        is_overridden = self.spec.flavor.get("utilities.model_helpers.is_overridden")
        moves = any(is_overridden(hook, self.module) for hook in _MOVING_HOOKS)
        return torch.device("cpu") if moves else self.device

    def _passes_per_step(self) -> int:
        """Return the batches of the next step; callbacks may change it between epochs."""
        trainer = self.trainer
        # Weight averaging updates batch normalization without a backward pass: nothing accumulates.
        if trainer.fit_loop._skip_backward:
            return 1
        if not self.module.automatic_optimization:
            return 1
        return trainer.accumulate_grad_batches

    @property
    def _batches_between_stops(self) -> int:
        arguments, callbacks = self.objects.arguments, self.objects.callbacks
        is_timed = any(is_lightning(callback, "callbacks.Timer") for callback in callbacks)
        if arguments.get("max_time") or is_timed:
            return 1
        return int(arguments.get("log_every_n_steps") or self.spec.log_every_n_steps)

    def _restore(self) -> RunState | None:
        """Return the state of the run's checkpoint, if any; the Trainer loads the checkpoint."""
        run = self.spec.run
        checkpoint: dict[str, Any] = {}

        def place(key: str, stored: StoredTensor) -> Any:
            return stored.whole() if self.sharding is None else stored  # read where it is loaded

        def load(file: IO[bytes]) -> None:
            content = torch.load(file, map_location="cpu", weights_only=False)
            folder = run.checkpoints_path or ""
            checkpoint.update(with_tensors(content, self.spec.store, folder, place))

        state = restore(self.spec.store, run, exchange, self.rank, load)
        if state is not None:
            self.restored_path = checkpoint_path(run, Position(state.epoch, state.rows))
            self.checkpoint_io.add_loaded(self.restored_path, checkpoint)
            loop = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]
            self.logged_steps = loop["_batches_that_stepped"]
        return state

    def _load_weights(self) -> FrozenBase | None:
        """Load the weights of ``init_weights``, and return the module's frozen base.

        If the ranks share the module, its layers read their weights later, one after another.
        """
        find_weights_in(self.module, self.spec.store)
        base = frozen_base(self.module)
        if self.sharding is None:
            load_weights(self.module)
        return base

    def _result(self, recorder: EpochRecorder) -> TrainResult:
        digests = weight_digests(self.module)
        state: LocalFile | None = None
        if self.base is not None:
            self.base.check(self.module)
        if self.sharding is not None:
            state = self._sharded_result()
        elif self.rank == 0:
            _load_best(self.trainer, self.module, self.checkpoint_io)
            if self.base is not None:
                self.base.remove(self.module.cpu())
            state = trained_file(self.module, self._given_module)
        return TrainResult(
            combined_digest(digests),
            state,
            tuple(recorder.history),
            stopped=self.stopped,
            weight_digests=digests,
        )

    def _given_module(self) -> LightningModule:
        objects: TrainerObjects = load_module(self.spec.objects, mapped=True)
        module: LightningModule = objects.module
        return module

    def _sharded_result(self) -> LocalFile | None:
        """Return the driver's module after training, on rank 0. Called by all ranks."""
        _load_best(self.trainer, self.module, self.checkpoint_io)
        has_base = self.base is not None
        found = write_trained(self.spec.store, self.spec.run, self.module, has_base)
        if self.rank:
            return None
        begun = self._given_module()
        with without_weights():
            begun.configure_model()
        as_trained(begun, self.module, *found)
        return module_file({"objects": (begun,)})


def _load_best(trainer: Trainer, module: LightningModule, checkpoints: StoreCheckpointIO) -> None:
    """Load the best weights, if the user's ModelCheckpoint monitors a value."""
    connected: Any = trainer
    for callback in connected.callbacks:
        if (
            is_lightning(callback, "callbacks.ModelCheckpoint")
            and callback.monitor is not None
            and callback.best_model_path
        ):
            checkpoint = checkpoints.load_checkpoint(callback.best_model_path)
            module.load_state_dict(sharded_weights(module, checkpoint["state_dict"]))
            # One that was saved between two steps has a schedule-free optimizer's training weights.
            states = checkpoint.get("optimizer_states", ())
            for optimizer, state in zip(trainer.optimizers, states, strict=False):
                if has_modes(optimizer):
                    optimizer.load_state_dict(state)
                    set_optimizer_mode(optimizer, training=False)
            return
