"""Writes and restores the checkpoints of a run on a Keras rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

import keras

from hvd_estimators.keras.checkpoint import CallbackStates, save_file
from hvd_estimators.keras.copies import copied
from hvd_estimators.keras.files import load_weights
from hvd_estimators.keras.kept_model import KeptModel
from hvd_estimators.keras.objects import exchange
from hvd_estimators.keras.partial import metric_states, unequal_variables
from hvd_estimators.keras.randomness import RandomStreams
from hvd_estimators.keras.session import StatisticsCallback
from hvd_estimators.keras.shards import Turns
from hvd_estimators.store.run_directory import RunDirectory
from hvd_estimators.training.checkpoints import CheckpointWriter, restore
from hvd_estimators.training.randomness import captured, of_shards
from hvd_estimators.training.spec import EpochMetrics, TrainSpec
from hvd_estimators.training.state import RunState

__all__ = ["RunSaver", "restore_run"]

logger = logging.getLogger(__name__)


def restore_run(
    spec: TrainSpec, model: keras.Model, rank: int, kept: KeptModel | None
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
    kept : KeptModel or None
        What the user's checkpoint callback keeps.
    logs : RunDirectory
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
        kept: KeptModel | None,
        logs: RunDirectory,
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
        own = captured(self._turns.shards, self._streams.capture)
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
        made = None if partial is None else copied(model)
        if made is None:
            self._checkpoints.save(state, lambda file: save_file(model, file), upload)
            return
        # Of the rest only callbacks may change what they have given.
        state = replace(state, parts={**parts, **copy.deepcopy(callback_parts)})
        self._checkpoints.save(state, made.save, upload, is_copy=True)
