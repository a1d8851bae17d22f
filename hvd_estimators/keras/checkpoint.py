"""Checkpoints of a Keras run after and within epochs, and its best model: contents and resuming.

``Model.fit`` can start an epoch only at its first batch. To resume within an epoch, the rank starts
the epoch as usual and notifies the callbacks. Then the rank restores the state of the partial
epoch. The batches that were trained on before are counted but not run.

Runs on the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import is_keras, on_tensorflow, traced
from hvd_estimators.keras.collectives import exchange
from hvd_estimators.keras.metrics import capture_metrics, merge_captured, scalars
from hvd_estimators.keras.model_file import ModelValues, load_values, save_values
from hvd_estimators.keras.shard_state import MicroBatches, RandomStreams
from hvd_estimators.keras.user_callbacks import CallbackStates, check_selection
from hvd_estimators.store import Store
from hvd_estimators.store.files import CHUNK_BYTES
from hvd_estimators.store.synced_directory import SyncedDirectory
from hvd_estimators.training.checkpoint_writer import CheckpointWriter, gather_state, restore
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.shard_state import capture_by_shard, merge_by_shard
from hvd_estimators.training.spec import EpochMetrics, TrainSpec, array_digest

logger = logging.getLogger(__name__)


class PartialEpoch:
    """Resume within the epoch of a checkpoint.

    Parameters
    ----------
    model : keras.Model
        The restored model.
    state : RunState
        The restored state of the run.
    micro_batches : MicroBatches
        The rank's virtual shards and micro-batches.
    batches : int
        Batches of this rank that are done.
    restore_random : callable
        Sets the random streams of the shard that the rank currently runs.
    """

    def __init__(
        self,
        model: keras.Model,
        state: RunState,
        micro_batches: MicroBatches,
        batches: int,
        restore_random: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.batches = batches
        self._model = model
        self._state = state
        self._micro_batches = micro_batches
        self._restore_random = restore_random
        # Captured before callbacks change any of the variables.
        self._variables = micro_batches.variables.capture()

    def build(self, batch: Any) -> None:
        """Create the variables of the metrics, given a batch."""
        build_metrics(self._model, batch, len(self._state.parts["partial"]["metrics"][0]))

    def restore(self) -> tuple[list[bytes], bool]:
        """Restore the variables, random streams and metrics, after the epoch has started.

        Returns
        -------
        digests : list of bytes
            Digests of the statistics at the start of the epoch.
        stop : bool
            Whether a callback has requested a stop.
        """
        partial, random = self._state.parts["partial"], self._state.random

        def restore_shard(shard: int) -> None:
            own = partial["variables"][shard]
            values = [own.get(index, value) for index, value in enumerate(self._variables)]
            self._micro_batches.variables.restore(values)
            self._restore_random(random[shard])

        self._micro_batches.shards.for_each(restore_shard)
        shards = self._micro_batches.shards
        _restore_metrics(self._model, partial["metrics"], shards.rank, shards.size)
        return list(partial["digests"]), partial["stop"]

    def skip(self) -> None:
        """Make the model's training function skip the batches that are done.

        Call this method after ``fit`` has created the training function.
        """
        model, train = self._model, self._model.train_function
        left = self.batches

        def skipping(iterator: Any) -> Any:
            nonlocal left
            if left:
                left -= 1
                return {}
            model.train_function = train
            return train(iterator)

        model.train_function = skipping


def build_metrics(model: keras.Model, batch: Any, count: int | None = None) -> None:
    """Create the variables of a model's metrics, which Keras otherwise does in the first step.

    Parameters
    ----------
    model : keras.Model
        The compiled model.
    batch : structure
        A batch, with which the model takes a test step.
    count : int, optional
        The expected number of variables, with which nothing is left to do.
    """
    if len(model.metrics_variables) != count:
        step = model.test_step if on_tensorflow() else traced(model.test_step)
        # Without a loss, Keras's step cannot run, and creates no metrics.
        with contextlib.suppress(ValueError):
            step(batch)
        model.reset_metrics()


def _restore_metrics(
    model: keras.Model, of_ranks: Sequence[Sequence[Array]], rank: int, size: int
) -> None:
    """Restore the states of the ranks' metrics, also for another number of ranks.

    With fewer ranks than before, each rank merges the states of several. With more ranks, some
    start without a state.
    """
    expected, found = len(of_ranks[0]), len(model.metrics_variables)
    if expected != found:
        logger.warning(
            "metrics: what was measured in the epoch before it was interrupted is left out, since "
            "the model's metrics have other variables now: expected %d, found %d.",
            *(expected, found),
        )
    elif own := of_ranks[rank::size]:
        merge_captured(model, own)


def unequal_variables(micro_batches: MicroBatches) -> list[dict[int, Array]]:
    """Return the layer variables that differ between shards, by position. Called by all ranks.

    Each shard updates these variables from its own rows until the end of an epoch.
    """
    own = capture_by_shard(micro_batches.shards, micro_batches.variables.capture)
    digests = {shard: list(map(array_digest, values)) for shard, values in own.items()}
    gathered = _of_shards(digests, micro_batches, "checkpoint.digests")
    unequal = [
        position
        for position, of_shard in enumerate(zip(*gathered, strict=True))
        if len({*of_shard}) > 1
    ]
    if not unequal:
        return [{} for _ in gathered]
    needed = {shard: {p: values[p] for p in unequal} for shard, values in own.items()}
    return _of_shards(needed, micro_batches, "checkpoint.variables")


def _of_shards(own: Mapping[int, Any], micro_batches: MicroBatches, name: str) -> list[Any]:
    return list(merge_by_shard(exchange.gather(own, name), micro_batches.shards.num_shards))


def restore_run(
    spec: TrainSpec, model: keras.Model, rank: int, best_model: BestModel | None
) -> RunState | None:
    """Load the run's newest checkpoint on all ranks; return None without a checkpoint."""
    load = functools.partial(load_values, model)
    state = restore(spec.store, spec.run, exchange, rank, load)
    if state is not None and best_model is not None:
        best_model.fetch()
    return state


class BestModel:
    """File that the user's checkpoint callback saves its model to. Rank 0 only.

    Parameters
    ----------
    callback : keras.callbacks.ModelCheckpoint
        The user's callback, whose path and saving method are replaced.
    directory : str
        A local directory for the file.
    checkpoints_path : str or None
        The run's checkpoint directory, which receives a copy of the file. None if the run is not
        saved.
    store : Store
        The store that holds ``checkpoints_path``.
    """

    def __init__(
        self,
        callback: keras.callbacks.ModelCheckpoint,
        directory: str,
        checkpoints_path: str | None,
        store: Store,
    ) -> None:
        suffix = ".weights.h5" if callback.save_weights_only else ".keras"
        self._path = os.path.join(directory, f"kept{suffix}")
        callback.filepath = self._path
        name = "on_epoch_end" if callback.save_freq == "epoch" else "on_train_batch_end"
        vars(callback)[name] = self._saving_values(callback, getattr(callback, name))
        self._store = store
        self._stored_at: str | None = None
        self._written = 0
        if checkpoints_path is not None:
            self._stored_at = f"{checkpoints_path}/kept{suffix}"

    def _saving_values(
        self, callback: keras.callbacks.ModelCheckpoint, save: Callable[..., None]
    ) -> Callable[..., None]:
        """Return the callback's saving method, which writes the values of all optimizers, too."""

        def save_values_only(number: int, logs: Mapping[str, Any] | None = None) -> None:
            check_selection(callback, scalars(logs or {}))
            if is_keras(type(callback).on_epoch_end) and callback.monitor_op is None:
                callback._set_monitor_op()  # Keras does so at the end of an epoch only
            model = callback.model
            methods = dict.fromkeys(("save", "save_weights"), self._write_values(model))
            vars(model).update(methods)
            try:
                save(number, logs)
            finally:
                for method in methods:
                    del vars(model)[method]

        return save_values_only

    def _write_values(self, model: keras.Model) -> Callable[..., None]:
        return lambda filepath, *args, **options: save_values(model, filepath)

    def fetch(self) -> None:
        """Fetch the file that an earlier part of the run stored."""
        if self._stored_at is not None and self._store.exists(self._stored_at):
            with self._store.open(self._stored_at) as stored, open(self._path, "wb") as file:
                shutil.copyfileobj(stored, file, CHUNK_BYTES)
            self._written = os.stat(self._path).st_mtime_ns

    def upload(self) -> Callable[[], None] | None:
        """Return a function that uploads the current file; None if no upload is needed.

        The previously returned function must have finished before this call.
        """
        if self._stored_at is None or not os.path.exists(self._path):
            return None
        written = os.stat(self._path).st_mtime_ns
        if written == self._written:
            return None
        self._written = written
        # The callback may replace the file during the upload.
        copy = f"{self._path}.copy"
        shutil.copyfile(self._path, copy)
        return functools.partial(_upload, copy, self._store, self._stored_at)

    def path(self) -> str | None:
        """Return the path of the model file; None if the callback saved no model."""
        return self._path if os.path.exists(self._path) else None


def _upload(path: str, store: Store, target: str) -> None:
    with open(path, "rb") as file, store.open_atomic(target) as stored:
        shutil.copyfileobj(file, stored, CHUNK_BYTES)


@dataclass(frozen=True)
class RunSaver:
    """Checkpoint saver of a run. All ranks have a saver and call it together.

    Attributes
    ----------
    spec : TrainSpec
        The training job.
    model : keras.Model
        The model.
    rank : int
        This rank.
    checkpoints : CheckpointWriter
        Writes the checkpoints.
    best_model : BestModel or None
        The model file of the user's checkpoint callback.
    logs : SyncedDirectory
        The run's log directory.
    states : CallbackStates
        States of the user's callbacks.
    streams : RandomStreams
        The rank's random streams.
    micro_batches : MicroBatches
        The rank's virtual shards and micro-batches.
    """

    spec: TrainSpec
    model: keras.Model
    rank: int
    checkpoints: CheckpointWriter
    best_model: BestModel | None
    logs: SyncedDirectory
    states: CallbackStates
    streams: RandomStreams
    micro_batches: MicroBatches

    def save_epoch(self, history: Sequence[EpochMetrics], stopped: bool) -> None:
        """Save the run after the last epoch of its history."""
        self.logs.sync()
        self._save(history, stopped=stopped)

    def save_within(
        self, history: Sequence[EpochMetrics], batches: int, digests: list[bytes], stop: bool
    ) -> None:
        """Save the run within an epoch.

        Parameters
        ----------
        history : sequence of EpochMetrics
            The previous epochs.
        batches : int
            Batches of a shard that are done.
        digests : list of bytes
            Digests of the statistics at the start of the epoch, see `StatisticsAverager`.
        stop : bool
            Whether a callback of this rank has requested a stop.
        """
        partial = {"digests": digests, "metrics": capture_metrics(self.model), "stop": stop}
        self._save(history, batches, partial)

    def _save(
        self,
        history: Sequence[EpochMetrics],
        batches: int = 0,
        partial: dict[str, Any] | None = None,
        stopped: bool = False,
    ) -> None:
        upload = None
        if self.best_model is not None:
            self.checkpoints.finish()
            upload = self.best_model.upload()
        if self.spec.run.checkpoints_path is None:
            return
        model = self.model
        state, of_ranks = gather_state(
            self.spec,
            history,
            batches,
            self.micro_batches.shards,
            self.streams,
            exchange,
            partial,
            stopped=stopped,
        )
        variables = None if partial is None else unequal_variables(self.micro_batches)
        if self.rank != 0:
            return
        parts: dict[str, Any] = {"callbacks": self.states.capture()}
        if partial is None:
            state = replace(state, parts=parts)
            self.checkpoints.save(state, lambda file: save_values(model, file), upload)
            return
        # A thread writes the copies while training goes on.
        values = ModelValues.of(model, copied=True)
        # Only the values that callbacks returned can still change.
        parts = copy.deepcopy(parts)
        parts["partial"] = {
            "digests": partial["digests"],
            "metrics": [of_rank["metrics"] for of_rank in of_ranks],
            "stop": any(of_rank["stop"] for of_rank in of_ranks),
            "variables": variables,
        }
        state = replace(state, parts=parts)
        self.checkpoints.save(state, values.write, upload, is_copy=True)
