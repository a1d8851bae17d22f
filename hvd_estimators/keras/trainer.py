"""Training on one rank: what runs in each process that a backend starts."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.keras.averaging import GradientAverager, broadcast_variables
from hvd_estimators.keras.backend import model_optimizers, require_tensorflow
from hvd_estimators.keras.callback_rules import for_rank, writes_files
from hvd_estimators.keras.callbacks import MetricAverageCallback, turn_off_jit_compile
from hvd_estimators.keras.checkpoint import save_file
from hvd_estimators.keras.dataset import ColumnDatasets
from hvd_estimators.keras.devices import choose_devices
from hvd_estimators.keras.files import load_weights
from hvd_estimators.keras.kept_model import KeptModel
from hvd_estimators.keras.learning_rate import LearningRateWarmupCallback
from hvd_estimators.keras.lost_peers import naming_lost_peers
from hvd_estimators.keras.objects import exchange
from hvd_estimators.keras.optimizer import distribute
from hvd_estimators.keras.randomness import RandomStreams
from hvd_estimators.keras.serialization import ModelDocument
from hvd_estimators.keras.session import (
    EpochEnd,
    ProgressReports,
    RankCallbacks,
    StatisticsCallback,
    StreamsCallback,
)
from hvd_estimators.keras.shards import Turns
from hvd_estimators.keras.synchronized import SynchronizedMoments
from hvd_estimators.keras.tensors import TensorSpec
from hvd_estimators.loading.readers import DataModule, open_data_module
from hvd_estimators.loading.readers.planned import PlannedDataModule
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.store.run_directory import RunDirectory
from hvd_estimators.temporary import LocalFile
from hvd_estimators.training.checkpoints import CheckpointWriter, restore
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.randomness import captured, of_shards
from hvd_estimators.training.rank import horovod_session
from hvd_estimators.training.spec import EpochMetrics, TrainResult, TrainSpec
from hvd_estimators.training.state import RunState
from hvd_estimators.training.stopping import heeding_stop, stopped_before
from hvd_estimators.training.tensorboard import EventWriter

__all__ = ["KerasTrainSpec", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KerasTrainSpec(TrainSpec):
    """What a Keras rank is told.

    Attributes
    ----------
    model : ModelDocument
        The compiled model.
    tensors : TensorSpec
        How columns become tensors.
    weight_by_samples : bool
        Whether a batch counts for the sum of its sample weights instead of for its rows.
    checkpoint_callback : keras.callbacks.ModelCheckpoint or None
        Decides which model is returned; None for the last one.
    floatx : str
        Keras's float type.
    dtype_policy : object
        Keras's global dtype policy, serialized.
    prefetch : int
        Batches that are ready beforehand, besides some MiB that are to be cut into batches.
    """

    model: ModelDocument
    tensors: TensorSpec
    weight_by_samples: bool
    checkpoint_callback: keras.callbacks.ModelCheckpoint | None
    floatx: str
    dtype_policy: Any
    prefetch: int


def train(spec: KerasTrainSpec) -> TrainResult:
    """Train for the epochs that are left. Runs on every rank.

    Returns
    -------
    TrainResult
        The trained state, from rank 0: a ``.keras`` file, or what the checkpoint callback wrote.
    """
    require_tensorflow()
    with naming_lost_peers(), horovod_session(hvd, spec.mp_start_method, spec.data.num_ranks):
        choose_devices(spec.use_gpu, spec.verbose)
        keras.config.set_floatx(spec.floatx)
        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(spec.dtype_policy))
        if spec.random_seed is not None:
            keras.utils.set_random_seed(spec.random_seed)
        with tempfile.TemporaryDirectory() as directory:
            return _Trainer(spec, directory).run()


class _Trainer:
    def __init__(self, spec: KerasTrainSpec, directory: str) -> None:
        self.spec = spec
        self.rank, self.size = hvd.rank(), hvd.size()
        self.model = spec.model.load()
        self.kept: KeptModel | None = None
        logs = spec.run.logs_path if self.rank == 0 else None
        self.logs = RunDirectory(spec.store, logs)
        if spec.checkpoint_callback is not None and self.rank == 0:
            self.kept = KeptModel(
                spec.checkpoint_callback, directory, spec.run.checkpoints_path, spec.store
            )
        self.checkpoints = CheckpointWriter(spec.store, spec.run, spec.checkpoints)
        self.restored = self._restore()
        self.spec = spec = heeding_stop(spec, self.restored)
        optimizers = model_optimizers(self.model)
        broadcast_variables(
            [*self.model.variables, *(v for entry in optimizers for v in entry.variables)]
        )
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
            )
        self._weight_batches()

    def run(self) -> TrainResult:
        spec, state = self.spec, self.restored
        done = 0 if state is None else state.epoch
        history = () if state is None else state.history
        states = () if state is None else state.parts["callbacks"]
        data = open_data_module(
            spec.data, self.rank, self.size, epoch=done, epochs=spec.epochs - done
        )
        progress = Progress(spec, self.rank)
        with (
            data,
            self.logs,
            EventWriter(self.logs.path, done) as writer,
            progress,
            self.checkpoints,
        ):
            checkpoint = spec.checkpoint_callback
            stateful = [*spec.callbacks, *([] if checkpoint is None else [checkpoint])]
            end = EpochEnd(stateful, history, states, writer, progress, self._save)
            end.stopped = stopped_before(spec, state)
            if done < spec.epochs:
                self._fit(data, done, end, progress)
            else:
                self._end_again(end)
        return TrainResult(
            _digest(self.model), self._final_state(), tuple(end.history), stopped=end.stopped
        )

    def _end_again(self, end: EpochEnd) -> None:
        """Let callbacks do what they have done when training ended: restore the best weights.

        The checkpoint is of the newest epoch, before that.
        """
        spec = self.spec
        chosen = for_rank(spec.callbacks, self.rank, self.logs.path)
        ending = [callback for callback in chosen if not writes_files(callback)]
        callbacks = keras.callbacks.CallbackList([*ending, end], model=self.model)
        callbacks.on_train_begin()
        callbacks.on_train_end()

    def _fit(self, data: DataModule, done: int, end: EpochEnd, progress: Progress) -> None:
        spec = self.spec
        turn_off_jit_compile(self.model)
        datasets = ColumnDatasets(
            data,
            _equal_rows(spec.data, data),
            spec.prefetch,
            spec.tensors.tensors,
            spec.tensors.for_validation().tensors,
        )
        steps, passes = spec.data.train_steps_per_epoch, spec.data.passes_per_batch
        if steps % self.model.steps_per_execution:
            # Several batches at a time would end an epoch within the next.
            self.model.steps_per_execution = 1
        streams = self.streams = RandomStreams(self.model, spec.data.random_seed, self.rank, done)
        turns = self.turns = Turns(
            self.model,
            spec.data.num_shards,
            self.rank,
            self.size,
            streams,
            self.model.steps_per_execution,
        )
        if passes > 1:
            # The shard changes between two batches.
            self.model.steps_per_execution = 1
        has_validation = spec.data.val_plan is not None
        validation = datasets.validation(spec.data.validation_steps_per_epoch * passes)
        chosen: list[Any] = [
            StreamsCallback(streams, turns.shards),
            StatisticsCallback(turns.shards),
            MetricAverageCallback(),
        ]
        for callback in spec.callbacks:
            if isinstance(callback, LearningRateWarmupCallback):
                callback.ranks = spec.data.num_shards
        chosen += for_rank(spec.callbacks, self.rank, self.logs.path)
        if self.rank == 0:
            chosen += [spec.checkpoint_callback] if self.kept is not None else []
            chosen += [ProgressReports(progress)] if spec.verbose else []
        self.model.fit(
            datasets.train(),
            epochs=spec.epochs,
            initial_epoch=done,
            steps_per_epoch=steps * passes,
            validation_data=validation if has_validation else None,
            # The data module shuffles.
            shuffle=False,
            callbacks=RankCallbacks(chosen, end, self.model, spec.epochs, steps, turns),
            verbose=0,
        )

    def _weight_batches(self) -> None:
        """Tell the averagers, from within the training step, what the batch counts for."""
        step, averagers = self.model.train_step, self.averagers
        by_samples, full = self.spec.weight_by_samples, self.spec.data.batch_size
        synchronized = SynchronizedMoments(self.model, averagers[0])

        def train_step(data: Any) -> Any:
            x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            if by_samples:
                weight = tf.reduce_sum(tf.cast(sample_weight, tf.float32))
            else:
                weight = tf.cast(tf.shape(keras.tree.flatten(x)[0])[0], tf.float32)
            for averager in averagers:
                averager.weight = weight / full
            with synchronized.in_step():
                return step(data)

        self.model.train_step = train_step

    def _restore(self) -> RunState | None:
        """Load the newest checkpoint of the run on all ranks, where there is one."""
        run, store = self.spec.run, self.spec.store

        def load(file: IO[bytes]) -> None:
            load_weights(self.model, file)

        state = restore(store, run, exchange, self.rank, load)
        if state is not None:
            if self.kept is not None:
                self.kept.fetch()
            if self.rank == 0:
                logger.info("Resuming run %s after %d epochs", run.run_id, state.epoch)
        return state

    def _save(
        self,
        history: tuple[EpochMetrics, ...],
        callbacks: Callable[[], Sequence[Any]],
        stopped: bool,
    ) -> None:
        """Save the run after its newest epoch. Called by all ranks."""
        self.logs.sync()
        kept = None
        if self.kept is not None:
            self.checkpoints.finish()
            kept = self.kept.upload()
        data = self.spec.data
        if self.spec.run.checkpoints_path is None:
            return
        own = captured(self.turns.shards, self.streams.capture)
        streams = exchange.gather(own, "checkpoint.streams")
        if self.rank == 0:
            random = of_shards(streams, data.num_shards)
            parts = {"callbacks": list(callbacks())}
            state = RunState(len(history), 0, data.num_shards, history, random, parts, stopped)
            self.checkpoints.save(state, lambda file: save_file(self.model, file), kept)

    def _final_state(self) -> LocalFile | None:
        if self.rank != 0:
            return None
        state = LocalFile()
        kept = self.kept.path() if self.kept is not None else None
        if kept is not None:
            shutil.move(kept, state.path)
        else:
            save_file(self.model, state.path)
        return state


def _equal_rows(spec: DataSpec, data: DataModule) -> int | None:
    """Return the rows of every training batch of this rank, if all have the same."""
    if not isinstance(data, PlannedDataModule):
        return None
    sizes = set(spec.train_plan.batch_sizes(data.cur_shard, spec.batch_size))
    return sizes.pop() if len(sizes) == 1 else None


def _digest(model: keras.Model) -> str:
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        # As bytes, since NumPy gives no buffer of bfloat16.
        digest.update(variable.numpy().reshape(-1).view(np.uint8))
    return digest.hexdigest()
