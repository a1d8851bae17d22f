"""Training on one rank: what runs in each process that a backend starts."""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.loading.readers import DataModule, open_data_module
from hvd_estimators.spec import EpochMetrics, TrainResult, TrainSpec
from hvd_estimators.store.run_directory import RunDirectory
from hvd_estimators.torch.averaging import GradientAverager
from hvd_estimators.torch.learning_rate import StepRate
from hvd_estimators.torch.measures import Measures
from hvd_estimators.torch.objective import Objective
from hvd_estimators.torch.objects import exchange
from hvd_estimators.torch.randomness import TorchStreams
from hvd_estimators.torch.ranks import choose_device, sum_over_ranks, weights_digest
from hvd_estimators.torch.serialization import (
    load_module,
    load_optimizer,
    load_state,
    plain_module,
    save_state,
)
from hvd_estimators.torch.shards import BufferState, average_shards
from hvd_estimators.torch.tensors import Batch, tensor_batches
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.rank import horovod_session, seed_rank
from hvd_estimators.training.shards import ShardStates
from hvd_estimators.training.tensorboard import EventWriter, epoch_scalars
from hvd_estimators.training.weighted_batches import WeightedBatches

__all__ = ["TorchTrainSpec", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchTrainSpec(TrainSpec):
    """What a torch rank is told.

    Attributes
    ----------
    module, optimizer : bytes
        See `dump_module` and `dump_optimizer`.
    objective : Objective
        Losses, metrics, and how columns become the tensors that they take.
    """

    module: bytes
    optimizer: bytes
    objective: Objective


def train(spec: TorchTrainSpec) -> TrainResult:
    """Train for the epochs that are left. Runs on every rank.

    Returns
    -------
    TrainResult
        The trained state, from rank 0.
    """
    with horovod_session(hvd, spec.mp_start_method, spec.data.num_ranks):
        # What losses are made with here is the same on all ranks.
        torch.manual_seed(spec.data.random_seed)
        return _Trainer(spec).run()


class _Trainer:
    def __init__(self, spec: TorchTrainSpec) -> None:
        self.spec = spec
        self.rank, self.size = hvd.rank(), hvd.size()
        # Batches of a step on this rank: one of each shard that it plays, in each pass.
        self.passes = spec.backward_passes_per_step * spec.data.passes_per_batch
        self.device = choose_device(spec.use_gpu)
        self.module = load_module(spec.module).to(self.device)
        # Of a compiled module: what is trained, under the names that the user knows.
        self.plain = plain_module(self.module)
        self.optimizer = load_optimizer(spec.optimizer, self.module)
        # Loading moves what an optimizer remembers to its parameters' device.
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.objective = spec.objective.on_rank(
            self.device,
            model=self.module,
            optimizer=self.optimizer,
            rank=self.rank,
            size=self.size,
            spec=spec,
        )
        self.history: list[EpochMetrics] = []
        self.output_shapes: list[list[int]] | None = None
        self._restore()
        hvd.broadcast_parameters(self.plain.state_dict(), root_rank=0)
        if spec.scale_learning_rate:
            StepRate(self.optimizer, spec.data.num_shards)
        self.averager = GradientAverager(
            self.optimizer,
            self.plain,
            self.passes,
            spec.gradient_compression,
        )
        parts = (TorchStreams(self.device), BufferState(self.plain))
        self.shards = ShardStates(spec.data.num_shards, self.rank, self.size, parts)
        self.progress = Progress(spec, self.rank)

    def run(self) -> TrainResult:
        spec = self.spec
        done = len(self.history)
        data = open_data_module(
            spec.data, self.rank, self.size, epoch=done, epochs=spec.epochs - done
        )
        logs = RunDirectory(spec.store, spec.run.logs_path if self.rank == 0 else None)
        with data, logs, EventWriter(logs.path) as writer, self.progress:
            batches = WeightedBatches(
                tensor_batches(data.train_chunks()),
                data.global_train_sizes(),
                self.size,
                self.passes,
                sum_over_ranks,
            )
            self._callbacks("on_train_begin", module=self.module, optimizer=self.optimizer)
            for epoch in range(done, spec.epochs):
                record = self._run_epoch(epoch, batches, data)
                self.history.append(record)
                writer.scalars(epoch, epoch_scalars(record))
                self._callbacks("on_epoch_end", epoch=epoch, logs=record.as_dict())
                logs.sync()
                if self.rank == 0:
                    self._save_checkpoint()
            self._callbacks("on_train_end")
        state = save_state(self._state()) if self.rank == 0 else None
        shapes = None if self.output_shapes is None else tuple(map(tuple, self.output_shapes))
        return TrainResult(
            weights_digest(self.plain), state, tuple(self.history), output_shapes=shapes
        )

    def _run_epoch(self, epoch: int, batches: WeightedBatches, data: DataModule) -> EpochMetrics:
        self.progress.start_epoch(epoch)
        seed = self.spec.data.random_seed
        self.shards.for_each(lambda shard: torch.manual_seed(seed_rank(seed, shard, epoch)))
        self._callbacks("on_epoch_begin", epoch=epoch)
        train = self._train_epoch(batches)
        average_shards(self.plain, self.shards)
        means = train.reduced("train")
        record = EpochMetrics(epoch, train.as_record(means))
        if self.spec.data.val_plan is not None:
            validation = self._validate(data)
            val_means = validation.reduced("validation")
            record = EpochMetrics(epoch, record.train, validation.as_record(val_means))
            means = {**means, **{f"val_{name}": value for name, value in val_means.items()}}
        self.progress.end_epoch(means)
        return record

    def _train_epoch(self, batches: WeightedBatches) -> Measures:
        self.module.train()
        measures = Measures(self.objective.metrics)
        turns = self.spec.data.passes_per_batch
        steps = self.spec.data.train_steps_per_epoch * turns
        for first in range(0, steps, self.passes):
            window = batches.next_window(min(self.passes, steps - first))
            for index, (columns, factor) in enumerate(window, start=first):
                self.shards.enter(index % turns)
                batch = self.spec.objective.tensors.batch(columns, self.device)
                self._minibatch(batch, factor, index, measures)
            self.shards.enter(0)
            if not self.objective.has_own_step:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.progress.due:
                self.progress.step((first + len(window)) // turns, measures.means())
        if self.averager.pending:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return measures

    def _minibatch(self, batch: Batch, factor: float, index: int, measures: Measures) -> None:
        """Compute and back-propagate the loss of one batch.

        ``factor`` is what makes the mean of the ranks' gradients the gradient of the mean over
        all rows of the step: 1 where all batches of the step count for the same.
        """
        if not batch.rows:
            return
        if self.objective.has_own_step:
            evaluation = self.objective.run_minibatch(
                self.module,
                self.optimizer,
                batch,
                factor=factor,
                passes_per_step=self.passes,
                index=index,
            )
        else:
            evaluation = self.objective.evaluate(self.module, batch)
            scale = factor / self.passes
            (evaluation.loss if scale == 1.0 else evaluation.loss * scale).backward()
        measures.add(evaluation)
        if self.output_shapes is None:
            self.output_shapes = [list(output.shape[1:]) for output in evaluation.outputs]

    def _validate(self, data: DataModule) -> Measures:
        self.module.eval()
        measures = Measures(self.objective.metrics)
        steps = self.spec.data.validation_steps_per_epoch * self.spec.data.passes_per_batch
        with torch.no_grad(), contextlib.closing(tensor_batches(data.val_chunks())) as batches:
            for columns in itertools.islice(batches, steps):
                batch = self.spec.objective.tensors.batch(columns, self.device)
                if not batch.rows:
                    continue
                measures.add(self.objective.evaluate(self.module, batch))
        return measures

    def _restore(self) -> None:
        """Load the newest checkpoint of the run on all ranks, where there is one."""
        path = self.spec.run.checkpoint_path
        document = None
        if self.rank == 0 and path is not None and self.spec.store.exists(path):
            document = self.spec.store.read(path)
        document = exchange.broadcast(document, "checkpoint")
        if document is None:
            return
        state = load_state(document)
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.output_shapes = state.get("output_shapes")
        self.history = [EpochMetrics(**record) for record in state["history"]]
        if self.rank == 0:
            logger.info("Resuming run %s after %d epochs", self.spec.run.run_id, len(self.history))

    def _save_checkpoint(self) -> None:
        path = self.spec.run.checkpoint_path
        if path is not None:
            with self.spec.store.open_atomic(path) as file:
                file.write(save_state(self._state()))

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.plain.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "output_shapes": self.output_shapes,
            "history": [
                {"epoch": r.epoch, "train": dict(r.train), "validation": r.validation}
                for r in self.history
            ],
        }

    def _callbacks(self, moment: str, **arguments: Any) -> None:
        for callback in self.spec.callbacks:
            method = getattr(callback, moment, None)
            if method is not None:
                method(**arguments)
