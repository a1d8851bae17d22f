"""Checkpoints of a Keras run, also within an epoch: the state that ranks save and restore.

Runs on the worker. ``Model.fit`` begins epochs only at their first batch. So the one that a run
goes on in is begun as any other, its callbacks are told so, and then all that had happened in it is
put back; the batches that were trained on before are counted and not run.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.best_model import BestModel
from hvd_estimators.keras.callback_states import CallbackStates, save_file, snapshot
from hvd_estimators.keras.collectives import exchange
from hvd_estimators.keras.loop import RankCallbacks, StatisticsCallback
from hvd_estimators.keras.metrics import merge_states, metrics_with_merge_state, summed_variables
from hvd_estimators.keras.model_file import load_weights
from hvd_estimators.keras.shard_state import RandomStreams, Turns
from hvd_estimators.store.synced_directory import SyncedDirectory
from hvd_estimators.training.checkpoint_writer import CheckpointWriter, restore
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.shard_state import capture_by_shard, of_shards
from hvd_estimators.training.spec import EpochMetrics, TrainSpec

__all__ = [
    "PartialEpoch",
    "RunSaver",
    "build_metrics",
    "metric_states",
    "restore_run",
    "unequal_variables",
]

logger = logging.getLogger(__name__)


class PartialEpoch:
    """Goes on within the epoch that a checkpoint was written in.

    Parameters
    ----------
    model : keras.Model
        As it was restored.
    state : RunState
        What was restored.
    turns : Turns
        The rank's.
    batches : int
        Batches of this rank that are done.
    rank, size : int
        This rank, and the number of ranks.
    restore_random : callable
        Sets the random streams of the shard that the rank plays.
    """

    def __init__(
        self,
        model: keras.Model,
        state: RunState,
        turns: Turns,
        batches: int,
        rank: int,
        size: int,
        restore_random: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.batches = batches
        self._model = model
        self._state = state
        self._turns = turns
        self._rank, self._size = rank, size
        self._restore_random = restore_random
        # Before callbacks change any of it.
        self._variables = turns.variables.capture()

    def build(self, element: Any) -> None:
        """Make the metrics, of which batches have this ``element_spec``."""
        build_metrics(self._model, element, len(self._state.parts["partial"]["metrics"][0]))

    def restore(self, callbacks: RankCallbacks) -> None:
        """Put back what had happened in the epoch, now that callbacks know that it begins."""
        partial, random = self._state.parts["partial"], self._state.random

        def restore_shard(shard: int) -> None:
            own = partial["variables"][shard]
            values = [own.get(index, value) for index, value in enumerate(self._variables)]
            self._turns.variables.restore(values)
            self._restore_random(random[shard])

        self._turns.shards.for_each(restore_shard)
        _restore_metrics(self._model, partial["metrics"], self._rank, self._size)
        callbacks.put_back(partial["digests"], partial.get("bases", {}), partial["stop"])

    def skip(self, batches_per_call: int) -> None:
        """Let the model's training function do nothing for the batches that are done.

        Called when ``fit`` has made that function.
        """
        model, train = self._model, self._model.train_function
        left = self.batches // batches_per_call

        def skipping(iterator: Any) -> Any:
            nonlocal left
            if left:
                left -= 1
                return {}
            model.train_function = train
            return train(iterator)

        model.train_function = skipping


def metric_states(model: keras.Model) -> list[Array]:
    """Return what a rank's metrics have measured."""
    return [variable.numpy() for variable in model.metrics_variables]


def build_metrics(model: keras.Model, element: Any, count: int) -> None:
    """Make the variables of a model's metrics, which Keras itself does in the first step.

    Parameters
    ----------
    model : keras.Model
        Compiled.
    element : structure of tf.TensorSpec
        The batches.
    count : int
        How many variables there are to be.
    """
    if len(model.metrics_variables) != count:
        if model.run_eagerly:
            model.test_step(keras.tree.map_structure(_one_row, element))
        else:
            # Traced, and not run.
            tf.function(model.train_step).get_concrete_function(element)
        model.reset_metrics()


def _one_row(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([size or 1 for size in spec.shape], spec.dtype)


def _restore_metrics(
    model: keras.Model, of_ranks: Sequence[Sequence[Array]], rank: int, size: int
) -> None:
    """Go on with what ranks had measured: with fewer of them, each with that of several.

    With more than there were, some have nothing.
    """
    own = of_ranks[rank::size]
    variables = model.metrics_variables
    if any(len(state) != len(variables) for state in of_ranks):
        logger.warning(
            "metrics: what was measured in the epoch before it was interrupted is left out, since "
            "the model's metrics have other variables now: expected %d, found %d.",
            len(of_ranks[0]),
            len(variables),
        )
        return
    if not own:
        return
    places = {id(variable): place for place, variable in enumerate(variables)}
    for variable in summed_variables(model):
        values = [state[places[id(variable)]] for state in own]
        kind = getattr(variable, "aggregation", "sum")
        if len(values) == 1 and (kind != "mean" or size == len(of_ranks)):
            variable.assign(values[0])
        elif kind == "sum":
            variable.assign(np.add.reduce(values))
        elif kind == "mean":
            # So that the mean over all ranks stays what it was.
            variable.assign(np.add.reduce(values) * (size / len(of_ranks)))
        else:
            variable.assign(values[0])
    for metric in metrics_with_merge_state(model):
        merge_states(metric, [[state[places[id(v)]] for v in metric.variables] for state in own])


def unequal_variables(turns: Turns) -> list[dict[int, Array]]:
    """Return what layers count that is not the same for all shards, by place. Called by all ranks.

    Each shard counts its own rows, until an epoch is over.
    """
    own = capture_by_shard(turns.shards, turns.variables.capture)
    digests = {shard: list(map(_digest, values)) for shard, values in own.items()}
    gathered = _of_shards(digests, turns, "checkpoint.digests")
    unequal = [
        place for place, found in enumerate(zip(*gathered, strict=True)) if len({*found}) > 1
    ]
    if not unequal:
        return [{} for _ in gathered]
    needed = {shard: {p: values[p] for p in unequal} for shard, values in own.items()}
    return _of_shards(needed, turns, "checkpoint.variables")


def _of_shards(own: Mapping[int, Any], turns: Turns, name: str) -> list[Any]:
    return list(of_shards(exchange.gather(own, name), turns.shards.num_shards))


def _digest(value: Array) -> bytes:
    # As bytes, since NumPy gives no buffer of bfloat16.
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).digest()


def restore_run(
    spec: TrainSpec, model: keras.Model, rank: int, kept: BestModel | None
) -> RunState | None:
    """Load the newest checkpoint of the run on all ranks, where there is one."""

    def load(file: IO[bytes]) -> None:
        load_weights(model, file)

    state = restore(spec.store, spec.run, exchange, rank, load)
    if state is not None:
        if kept is not None:
            kept.fetch()
        if rank == 0:
            within = f" and {state.rows} rows of the next" if state.rows else ""
            logger.info("Resuming run %s after %d epochs%s", spec.run.run_id, state.epoch, within)
    return state


class RunSaver:
    """Saves a run. Every rank has one, and all call it together.

    Parameters
    ----------
    spec : TrainSpec
        The job.
    model : keras.Model
        The model.
    rank : int
        This rank.
    checkpoints : CheckpointWriter
        Writes.
    kept : BestModel or None
        What the user's checkpoint callback keeps.
    logs : SyncedDirectory
        The run's logs.
    states : CallbackStates
        Those of the user's callbacks.
    streams : RandomStreams
        The rank's.
    turns : Turns
        The shards that it plays.
    """

    def __init__(
        self,
        spec: TrainSpec,
        model: keras.Model,
        rank: int,
        checkpoints: CheckpointWriter,
        kept: BestModel | None,
        logs: SyncedDirectory,
        states: CallbackStates,
        streams: RandomStreams,
        turns: Turns,
    ) -> None:
        self._spec = spec
        self._model = model
        self._rank = rank
        self._checkpoints = checkpoints
        self._kept = kept
        self._logs = logs
        self._states = states
        self._streams = streams
        self._turns = turns

    def save_epoch(self, history: Sequence[EpochMetrics], stopped: bool) -> None:
        """Save the run after its newest epoch."""
        self._logs.sync()
        self._save(history, stopped=stopped)

    def save_within(
        self,
        history: Sequence[EpochMetrics],
        batches: int,
        statistics: StatisticsCallback,
        stop: bool,
    ) -> None:
        """Save the run within an epoch.

        Parameters
        ----------
        history : sequence of EpochMetrics
            The epochs before.
        batches : int
            Batches of a shard that are done.
        statistics : StatisticsCallback
            Has the statistics of the epoch's start.
        stop : bool
            Whether a callback of this rank has asked for a stop.
        """
        partial = {
            "digests": list(statistics.digests),
            "bases": statistics.bases,
            "metrics": metric_states(self._model),
            "stop": stop,
        }
        self._save(history, batches, partial)

    def _save(
        self,
        history: Sequence[EpochMetrics],
        batches: int = 0,
        partial: dict[str, Any] | None = None,
        stopped: bool = False,
    ) -> None:
        upload = None
        if self._kept is not None:
            self._checkpoints.finish()
            upload = self._kept.upload()
        if self._spec.run.checkpoints_path is None:
            return
        data, model = self._spec.data, self._model
        own = capture_by_shard(self._turns.shards, self._streams.capture)
        gathered = exchange.gather((own, self._states.own(), partial), "checkpoint.streams")
        variables = None if partial is None else unequal_variables(self._turns)
        if self._rank != 0:
            return
        streams, callbacks, partials = zip(*gathered, strict=True)
        callback_parts = self._states.parts(callbacks)
        parts = {**callback_parts}
        if partial is not None:
            parts["partial"] = {
                "digests": partial["digests"],
                "bases": partial["bases"],
                "metrics": [of_rank["metrics"] for of_rank in partials],
                "stop": any(of_rank["stop"] for of_rank in partials),
                "variables": variables,
            }
        state = RunState(
            len(history),
            data.rows_after(len(history), batches),
            data.num_shards,
            tuple(history),
            of_shards(streams, data.num_shards),
            parts,
            stopped,
        )
        made = None if partial is None else snapshot(model)
        if made is None:
            self._checkpoints.save(state, lambda file: save_file(model, file), upload)
            return
        # Of the rest only callbacks may change what they have given.
        state = replace(state, parts={**parts, **copy.deepcopy(callback_parts)})
        self._checkpoints.save(state, made.save, upload, is_copy=True)
