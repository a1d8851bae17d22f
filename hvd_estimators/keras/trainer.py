"""Train a Keras model on one rank. Runs in each process that a backend starts."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.keras.backend import (
    configure,
    has_own_step,
    has_own_test_step,
    model_optimizers,
    set_random_seed,
)
from hvd_estimators.keras.callbacks import MetricAverageCallback, turn_off_jit_compile
from hvd_estimators.keras.checkpoint import (
    BestModel,
    PartialEpoch,
    RunSaver,
    build_metrics,
    restore_run,
)
from hvd_estimators.keras.collated import CollatedColumns
from hvd_estimators.keras.collectives import (
    GradientAverager,
    choose_devices,
    current,
    exchange,
    session,
    sum_number,
    sum_tensors,
)
from hvd_estimators.keras.dataset import ColumnDatasets, reading_first
from hvd_estimators.keras.denominators import LossDenominators
from hvd_estimators.keras.gradients import distribute
from hvd_estimators.keras.loop import RankCallbacks, StepEnd, separate_evaluation
from hvd_estimators.keras.model_file import save_values
from hvd_estimators.keras.serialization import ModelPayload
from hvd_estimators.keras.shard_state import MicroBatches, RandomStreams, seed_states
from hvd_estimators.keras.tensors import TensorSpec
from hvd_estimators.keras.user_callbacks import CallbackStates, ScalarState, for_rank, writes_files
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.loading.spec import open_data_module
from hvd_estimators.store.synced_directory import SyncedDirectory
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.spec import TrainResult, TrainSpec, combined_digest, weight_digest
from hvd_estimators.training.step_control import StepControl, stopped_before, without_further_epochs


@dataclass(frozen=True)
class KerasTrainSpec(TrainSpec):
    """Training specification for Keras ranks.

    Attributes
    ----------
    model : ModelPayload
        The compiled model.
    tensors : TensorSpec
        Conversion of columns to tensors.
    checkpoint_callback : keras.callbacks.ModelCheckpoint or None
        Decides which model is returned; None for the last model.
    config : dict
        Keras's settings on the driver, see `hvd_estimators.keras.backend.config`.
    dtype_policy : object
        Keras's global dtype policy, serialized.
    prefetch : int
        Batches to prepare in advance, besides some MiB of rows that are not split into batches yet.
    collectives : str
        ``"horovod"`` or ``"torch"``, see `choose_collectives`.
    collated : CollatedColumns or None
        Makes the columns of batches from a collate function or padding.
    """

    model: ModelPayload
    tensors: TensorSpec
    checkpoint_callback: keras.callbacks.ModelCheckpoint | None
    config: dict[str, Any]
    dtype_policy: Any
    prefetch: int
    collectives: str
    collated: CollatedColumns | None


def train(spec: KerasTrainSpec) -> TrainResult:
    """Train for the remaining epochs. Runs on every rank.

    Returns
    -------
    TrainResult
        The trained state, from rank 0, as a file of `save_values`.
    """
    with (
        session(spec.collectives, spec.mp_start_method, spec.data.num_ranks, spec.use_gpu),
        choose_devices(spec.use_gpu, spec.verbose),
    ):
        configure(spec.config)
        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(spec.dtype_policy))
        set_random_seed(spec.data.random_seed)
        with tempfile.TemporaryDirectory() as directory:
            return _Trainer(spec, directory).run()


class _Trainer:
    def __init__(self, spec: KerasTrainSpec, directory: str) -> None:
        self.spec = spec
        self.rank, self.size = current().rank, current().size
        self.model = spec.model.load()
        self.best_model: BestModel | None = None
        logs = spec.run.logs_path if self.rank == 0 else None
        self.logs = SyncedDirectory(spec.store, logs)
        if spec.checkpoint_callback is not None and self.rank == 0:
            self.best_model = BestModel(
                spec.checkpoint_callback, directory, spec.run.checkpoints_path, spec.store
            )
        self.checkpoints = CheckpointWriter(spec.store, spec.run, spec.checkpoints)
        self.seeds = [(state, state.numpy()) for state in seed_states(self.model)]
        self.restored = restore_run(spec, self.model, self.rank, self.best_model)
        self.spec = spec = without_further_epochs(spec, self.restored)
        optimizers = model_optimizers(self.model)
        # Completed epochs, and a shard's completed batches of the next epoch.
        self.done, self.batches = 0, 0
        if self.restored is not None:
            self.done = self.restored.epoch
            self.batches = spec.data.batches_before(self.done, self.restored.rows)
        self.averagers = []
        for number, optimizer in enumerate(optimizers):
            averager = GradientAverager(spec.gradient_compression, f"gradients.of{number}")
            self.averagers.append(averager)
            distribute(
                optimizer,
                averager,
                spec.backward_passes_per_step * spec.data.passes_per_batch,
                spec.data.train_steps_per_epoch * spec.data.passes_per_batch,
                spec.data.num_shards if spec.scale_learning_rate else 1,
                self.batches * spec.data.passes_per_batch,
            )
        self._weight_batches()

    def run(self) -> TrainResult:
        spec, state, done = self.spec, self.restored, self.done
        data = open_data_module(
            spec.data,
            self.rank,
            self.size,
            epoch=done,
            rows=0 if state is None else state.rows,
            epochs=spec.epochs - done,
        )
        progress = Progress(spec, self.rank)
        control = StepControl(spec, self.size, sum_number, exchange)
        progress.when_asked_to_stop(control.request_stop)
        with (
            # A rank that is asked to stop gets time to write the checkpoint.
            control,
            data,
            self.logs,
            progress,
            self.checkpoints,
        ):
            checkpoint = spec.checkpoint_callback
            stateful = [*spec.callbacks, *([] if checkpoint is None else [checkpoint])]
            states = CallbackStates(
                stateful,
                () if state is None else state.parts["callbacks"],
                None if state is None else ScalarState(self.model),
            )
            self.history = [] if state is None else list(state.history)
            self.stopped = stopped_before(spec, state)
            if done < spec.epochs:
                self._fit(data, states, StepEnd(spec, control), progress)
            else:
                self._end_again(states)
        digests = _digests(self.model)
        return TrainResult(
            combined_digest(digests),
            self._final_state(),
            tuple(self.history),
            stopped=self.stopped,
            weight_digests=digests,
        )

    def _end_again(self, states: CallbackStates) -> None:
        """Repeat the callbacks' work at the end of training, such as restoring the best weights.

        The checkpoint of the newest epoch was written before this work.
        """
        spec = self.spec
        chosen = for_rank(spec.callbacks, self.rank, self.logs.path)
        ending = [callback for callback in chosen if not writes_files(callback)]
        steps = spec.data.train_steps_per_epoch
        callbacks = keras.callbacks.CallbackList(
            ending, model=self.model, epochs=spec.epochs, steps=steps, verbose=0
        )
        callbacks.on_train_begin()
        states.restore()
        if self.model.optimizer is not None:
            # As fit() does: an optimizer may replace the weights with averages at the end.
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        callbacks.on_train_end()

    def _fit(
        self, data: DataModule, states: CallbackStates, step_end: StepEnd, progress: Progress
    ) -> None:
        spec, model, done = self.spec, self.model, self.done
        turn_off_jit_compile(model)
        datasets = ColumnDatasets(
            data,
            spec.prefetch,
            spec.tensors.tensors,
            spec.tensors.for_validation().tensors,
            spec.collated,
        )
        steps, passes = spec.data.train_steps_per_epoch, spec.data.passes_per_batch
        # A call runs one batch: several would hide the steps between them, and the end of an epoch.
        model.steps_per_execution = 1
        rows = 0 if self.restored is None else self.restored.rows
        # The numbers of an epoch depend on the states with which the run began.
        for seed, value in self.seeds:
            seed.assign(value)
        streams = RandomStreams(model, spec.data.random_seed, self.rank, done, rows)
        micro_batches = MicroBatches(model, spec.data.num_shards, self.rank, self.size, streams)
        saver = RunSaver(
            spec,
            model,
            self.rank,
            self.checkpoints,
            self.best_model,
            self.logs,
            states,
            streams,
            micro_batches,
        )
        if has_own_step(model) or has_own_test_step(model):
            # Keras would log 0 for a loss that the steps return without an update of its mean.
            vars(model)["_get_metrics_result_or_logs"] = lambda logs: logs
        model.test_step = reading_first(model.test_step)
        has_validation = spec.data.val_plan is not None
        if has_validation:
            counts = exchange.gather(data.num_val_batches(), "hvd_estimators.validation_batches")
            self.denominators.equal_validation = len(set(counts)) == 1
        validation = datasets.validation(spec.data.validation_steps_per_epoch * passes)
        resumed = None
        if self.restored is not None and rows:
            resumed = PartialEpoch(
                model, self.restored, micro_batches, self.batches * passes, streams.restore
            )
            resumed.build(datasets.batch)
        elif self.denominators.may_be_empty:
            build_metrics(model, datasets.batch)
        chosen: list[Any] = [MetricAverageCallback()]
        is_resumed = self.restored is not None
        chosen += for_rank(spec.callbacks, self.rank, self.logs.path, is_resumed=is_resumed)
        if self.best_model is not None:
            chosen.append(spec.checkpoint_callback)
        callbacks = RankCallbacks(
            chosen, model, spec.epochs, steps, saver, self.history, progress, step_end, resumed
        )
        # Keras warns on every validation that ends with its data.
        warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
        separate_evaluation(model, self.own_test_step)
        # Not a model's own fit(): keras-hub's prepares data, and takes no reader of torch.
        keras.Model.fit(
            model,
            datasets.train(0 if resumed is None else resumed.batches),
            epochs=spec.epochs,
            initial_epoch=done,
            steps_per_epoch=steps * passes,
            validation_data=validation if has_validation else None,
            # The data module shuffles.
            shuffle=False,
            callbacks=callbacks,
            verbose=0,
        )
        self.stopped = callbacks.stopped

    def _weight_batches(self) -> None:
        """Set the batch's weight in averagers and losses from within each step."""
        data = self.spec.data
        self.denominators = denominators = LossDenominators(
            self.model,
            self.averagers,
            self.spec.backward_passes_per_step * data.passes_per_batch,
            data.batch_size,
            sum_tensors,
            data.num_shards % data.num_ranks > 0 or 0 in data.train_batch_sizes(),
        )

        def weighted(step: Callable[[Any], Any], is_training: bool) -> Callable[[Any], Any]:
            def counted(batch: Any) -> Any:
                with denominators.in_step(batch, is_training):
                    return step(batch)

            return counted

        self.own_test_step = self.model.test_step
        self.model.train_step = weighted(self.model.train_step, True)
        self.model.test_step = weighted(self.model.test_step, False)

    def _final_state(self) -> LocalFile | None:
        if self.rank != 0:
            return None
        state = LocalFile()
        path = self.best_model.path() if self.best_model is not None else None
        if path is not None:
            shutil.move(path, state.path)
        else:
            save_values(self.model, state.path)
        return state


def _digests(model: keras.Model) -> dict[str, str]:
    """Return a digest of each trainable variable, by its path."""
    digests: dict[str, str] = {}
    for index, variable in enumerate(model.trainable_variables):
        name = variable.path
        key = name if name not in digests else f"{name} ({index})"
        digests[key] = weight_digest(variable.numpy())
    return digests
