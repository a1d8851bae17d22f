"""Training on one rank, in a process that a backend starts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.loading.spec import open_data_module
from hvd_estimators.store import Store
from hvd_estimators.torch.checkpoint import RunCheckpoints
from hvd_estimators.torch.collectives import (
    broadcast_tensors,
    check_same_weights,
    choose_device,
    current,
    exchange,
    not_finite,
    session,
    sum_over_ranks,
    weight_digests,
)
from hvd_estimators.torch.frozen_base import FrozenBase, frozen_base
from hvd_estimators.torch.gradients import GradientAverager
from hvd_estimators.torch.loss_weights import StepBatches
from hvd_estimators.torch.metrics import MetricSums
from hvd_estimators.torch.objective import Objective
from hvd_estimators.torch.optimizer_step import (
    OptimizerStep,
    StepOptions,
    StepRate,
    set_optimizer_mode,
)
from hvd_estimators.torch.serialization import (
    load_module,
    load_optimizer_state,
    module_file,
    plain_module,
    trained_file,
)
from hvd_estimators.torch.shard_files import as_trained, write_trained
from hvd_estimators.torch.sharding import ShardingOptions, shard
from hvd_estimators.torch.stored_weights import find_weights_in, load_weights
from hvd_estimators.torch.tensors import Batch, gpu_memory, require_tensors, tensor_batches
from hvd_estimators.training.horovod_session import seed_rank
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.spec import (
    EpochMetrics,
    TrainResult,
    TrainSpec,
    combined_digest,
    shown_values,
)
from hvd_estimators.training.step_control import StepControl, stopped_before, without_further_epochs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedObjects:
    """The user's objects, which are pickled together because they refer to each other.

    Attributes
    ----------
    module, optimizer
        The module, and its optimizer.
    callbacks, stateful : tuple of object
        Values of the params.
    objective : Objective
        Losses and metrics.
    options : StepOptions
        Settings of the steps.
    learning_rate : float or None
        Replaces the optimizer's rates.
    returned : dict
        Params of the fitted model that may refer to the module, by name.
    """

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    callbacks: tuple[Any, ...]
    stateful: tuple[Any, ...]
    objective: Objective
    options: StepOptions
    learning_rate: float | None
    returned: dict[str, Any]


def load_objects(
    file: LocalFile, store: Store, device: torch.device | None
) -> tuple[TrainedObjects, FrozenBase | None]:
    """Load `TrainedObjects`, with the module and its optimizer on a device, and the frozen base.

    Without a device, they stay on the CPU, and weights that are in files stay there.

    Raises
    ------
    ParamError
        If an object pickles, and cannot be loaded.
    """
    try:
        # Ranks that share the parameters need no memory for the whole ones.
        objects: TrainedObjects = load_module(file, mapped=device is None)
    except ParamError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise ParamError(
            "model, optimizer, loss, metrics, callbacks or stateful: an object was pickled on the "
            f"driver, and a rank cannot load it ({type(error).__name__}: {error}). Create the "
            "object on the ranks, such as in a callback's on_train_begin(), or give its class a "
            "__reduce__() that recreates it."
        ) from error
    find_weights_in(objects.module, store)
    base = frozen_base(objects.module)
    if objects.learning_rate is not None:
        for group in objects.optimizer.param_groups:
            group["lr"] = objects.learning_rate
            # A scheduler of an earlier fit has set it, and others would begin from it.
            group.pop("initial_lr", None)
    if device is None:
        return objects, base
    load_weights(objects.module)
    for buffer in objects.module.buffers():
        # Unlike Module.to(), this keeps the tensor, which other objects may refer to.
        buffer.data = buffer.data.to(device)
    objects.module.to(device)
    # Loading moves the optimizer's state to the device of its parameters.
    load_optimizer_state(objects.optimizer, objects.optimizer.state_dict())
    return objects, base


def move_stateful(stateful: Sequence[Any], device: torch.device) -> None:
    """Move further networks and their optimizers, which the user trains or calls, to a device."""
    for network in stateful:
        if isinstance(network, torch.nn.Module):
            network.to(device)
    for optimizer in stateful:
        if isinstance(optimizer, torch.optim.Optimizer):
            load_optimizer_state(optimizer, optimizer.state_dict())


@dataclass(frozen=True)
class TorchTrainSpec(TrainSpec):
    """Job specification for a torch rank.

    Attributes
    ----------
    collectives : str
        ``"horovod"`` or ``"torch"``, see `choose_collectives`.
    objects : LocalFile
        `TrainedObjects`, see `module_file`.
    sharding : ShardingOptions
        Whether and how the ranks share the parameters.
    """

    collectives: str
    objects: LocalFile
    sharding: ShardingOptions


def train(spec: TorchTrainSpec) -> TrainResult:
    """Train for the remaining epochs. Runs on every rank.

    Returns
    -------
    TrainResult
        The trained state, from rank 0.
    """
    with session(spec.collectives, spec.mp_start_method, spec.data.num_ranks, spec.use_gpu):
        # Loss constructors then create the same weights on all ranks.
        torch.manual_seed(spec.data.random_seed)
        trainer = _Trainer(spec)
        try:
            return trainer.run()
        finally:
            trainer.averager.remove()


class _Trainer:
    def __init__(self, spec: TorchTrainSpec) -> None:
        self.spec = spec
        self.rank, self.size = current().rank, current().size
        # Micro-batches of a step on this rank: one per virtual shard in each backward pass.
        self.num_micro_batches = spec.backward_passes_per_step * spec.data.passes_per_batch
        self.device = choose_device(spec.use_gpu, spec.verbose)
        self.is_sharded = spec.sharding.applies_to(self.size)
        # A GPU may have memory for the parts only.
        loaded_on = None if self.is_sharded else self.device
        objects, self.base = load_objects(spec.objects, spec.store, loaded_on)
        self.module = objects.module
        if self.is_sharded:
            shard(self.module, [objects.optimizer], spec.sharding, self.device)
        move_stateful(objects.stateful, self.device)
        # For a compiled module, the trained original with the names that the user knows.
        self.original_module = plain_module(self.module)
        self.optimizer = objects.optimizer
        self.callbacks, self.given_objective = objects.callbacks, objects.objective
        self.returned = objects.returned
        # The optimizer has its state from before training, from which schedulers start.
        self.step = OptimizerStep(self.optimizer, objects.options, self.device)
        self.objective = self.given_objective.on_rank(
            self.device,
            model=self.module,
            optimizer=self.optimizer,
            rank=self.rank,
            size=self.size,
            spec=spec,
        )
        self.checkpoints = RunCheckpoints(
            spec, self.rank, self.size, self.original_module, self.optimizer, self.device
        )
        self.checkpoints.add_stateful(
            {
                "callbacks": self.callbacks,
                "stateful": objects.stateful,
                **self.step.objects,
                **self.objective.users_objects,
            }
        )
        self.shards = self.checkpoints.shards
        self.history: list[EpochMetrics] = []
        self.output_shapes: list[list[int]] | None = None
        self.restored = self.checkpoints.state
        if self.restored is not None:
            self.history = list(self.restored.history)
            self.output_shapes = self.restored.parts["output_shapes"]
        self.stopped = stopped_before(spec, self.restored)
        self.spec = spec = without_further_epochs(spec, self.restored)
        broadcast_tensors(self.original_module.state_dict())
        if spec.scale_learning_rate:
            StepRate(self.optimizer, spec.data.num_shards)
        self.averager = GradientAverager(
            self.original_module,
            [self.optimizer],
            spec.gradient_compression,
            losses=self.objective.users_objects["loss"],
            every_parameter=self.objective.has_own_step,
            loss_in_step=self.objective.loss_in_step,
        )
        # Validation batches of the rank that has most, if all ranks need to compute equally often.
        self.val_passes = 0
        self.last_batch: Batch | None = None
        self.progress = Progress(spec, self.rank)
        self.control = StepControl(spec, self.size, sum_over_ranks, exchange)
        self.progress.when_asked_to_stop(self.control.request_stop)

    def run(self) -> TrainResult:
        spec = self.spec
        done = self.first_epoch = len(self.history)
        rows = 0 if self.restored is None else self.restored.rows
        data = open_data_module(
            spec.data,
            self.rank,
            self.size,
            epoch=done,
            rows=rows,
            epochs=spec.epochs - done,
            memory=gpu_memory(self.device),
        )
        with (
            # A process that is asked to end gets time until the checkpoint is written.
            self.control,
            data,
            self.progress,
            self.checkpoints.writer,
        ):
            batches = StepBatches(
                tensor_batches(data.train_chunks(), self.device, data.num_train_batches()),
                data.global_train_sizes(),
                sum_over_ranks,
            )
            if self.is_sharded and spec.data.val_plan is not None:
                count = data.num_val_batches() or 0
                most = spec.data.validation_steps_per_epoch * spec.data.passes_per_batch
                self.val_passes = max(exchange.gather(min(count, most), "validation_batches"))
            self._start_training()
            for epoch in range(done, spec.epochs):
                record = self._run_epoch(epoch, batches, data)
                self.history.append(record)
                self.progress.record(record, self.step.learning_rates)
                self.step.epoch_ended(record)
                self.stopped = self._is_stopped_by_callbacks(epoch, record)
                self._save_checkpoint()
                if self.stopped:
                    break
                if epoch + 1 < spec.epochs:
                    self.control.after_epoch(epoch + 1)
            self._callbacks("on_train_end")
        state = None
        digests = weight_digests(self.original_module)
        if self.base is not None:
            self.base.check(self.original_module)
        if self.is_sharded:
            state = self._sharded_result()
        elif self.rank == 0:
            # A handle in the module refers to all hooks of its parameter.
            self.averager.remove()
            if self.base is not None:
                self.base.remove(self.original_module.cpu())
            state = trained_file(
                self.module,
                lambda: load_module(spec.objects, mapped=True).module,
                (self.optimizer, self.returned),
            )
        shapes = tuple(map(tuple, self.output_shapes or ())) or None
        return TrainResult(
            combined_digest(digests),
            state,
            tuple(self.history),
            output_shapes=shapes,
            stopped=self.stopped,
            weight_digests=digests,
        )

    def _sharded_result(self) -> LocalFile | None:
        """Return the driver's objects after training, on rank 0. Called by all ranks.

        The weights of the module are in the store. With ``only_trainable``, the object has them.
        The optimizer has no state.
        """
        trained = self.original_module
        found = write_trained(self.spec.store, self.spec.run, trained, self.base is not None)
        if self.rank:
            return None
        objects: TrainedObjects = load_module(self.spec.objects, mapped=True)
        as_trained(objects.module, trained, *found)
        objects.optimizer.state.clear()
        groups = objects.optimizer.param_groups, self.optimizer.param_groups
        for group, options in zip(*groups, strict=False):
            params = group["params"]
            group.clear()
            group.update({**options, "params": params})
        return module_file({"objects": (objects.module, objects.optimizer, objects.returned)})

    def _run_epoch(self, epoch: int, batches: StepBatches, data: DataModule) -> EpochMetrics:
        train, done = self._start_epoch(epoch)
        self.progress.start_epoch(epoch, done)
        set_optimizer_mode(self.optimizer, training=True)
        self._train_epoch(epoch, batches, train, done)
        # Validation, callbacks and checkpoints between epochs use the optimizer's evaluation
        # weights.
        set_optimizer_mode(self.optimizer, training=False)
        if epoch == self.first_epoch:
            outside = self.averager.outside
            check_same_weights(self.original_module, epoch, self.spec.run, outside)
        self.checkpoints.buffers.reduce()
        record = EpochMetrics(epoch, train.as_record(train.reduced("train")))
        self.progress.end_training()
        if self.spec.data.val_plan is not None:
            validation = self._validate(data)
            values = validation.reduced("validation")
            record = EpochMetrics(epoch, record.train, validation.as_record(values))
        self.progress.end_epoch(shown_values(record))
        return record

    def _start_training(self) -> None:
        """Notify callbacks that training begins, and restore the state of a resumed run."""
        self._callbacks("on_train_begin", module=self.module, optimizer=self.optimizer)
        state = self.restored
        if state is not None and self._is_within(state.epoch):
            # Repeats changes of callbacks at the start of the epoch that are not part of a saved
            # state.
            self._begin_epoch(state.epoch)
        self.checkpoints.restore()
        self.step.check_length(self.spec)
        # Callbacks may have created some of them.
        self.averager.follow(self.checkpoints.stateful().values())
        broadcast_tensors(self.averager.outside)
        self.averager.restore_gradients(self.checkpoints.gradients)

    def _is_within(self, epoch: int) -> bool:
        """Return whether this part of the run begins within an epoch."""
        state = self.restored
        return state is not None and state.rows > 0 and state.epoch == epoch < self.spec.epochs

    def _start_epoch(self, epoch: int) -> tuple[MetricSums, int]:
        """Return an epoch's metric sums so far, and the number of finished batches."""
        parts = 1 if self.objective.has_own_step else self.objective.loss_parts
        metric_sums = MetricSums(self.objective.metrics, parts)
        if not self._is_within(epoch):
            self._begin_epoch(epoch)
            # Callbacks may reset a buffer.
            self.checkpoints.buffers.start()
            return metric_sums, 0
        metric_sums.restore(self.checkpoints.measured())
        self.checkpoints.restore_streams()
        assert self.restored is not None
        return metric_sums, self.spec.data.batches_before(epoch, self.restored.rows)

    def _begin_epoch(self, epoch: int) -> None:
        seed = self.spec.data.random_seed
        self.shards.for_each(lambda shard: torch.manual_seed(seed_rank(seed, shard, epoch)))
        # Callbacks may then set layers to evaluation, such as frozen batch normalization.
        self.module.train()
        self._callbacks("on_epoch_begin", epoch=epoch)

    def _train_epoch(
        self, epoch: int, batches: StepBatches, metric_sums: MetricSums, done: int
    ) -> None:
        if not self.objective.has_own_step:
            # A parameter that was added to the optimizer since the last epoch may have a gradient.
            self.optimizer.zero_grad()
        batch_passes = self.spec.data.passes_per_batch
        steps = self.spec.data.train_steps_per_epoch * batch_passes
        for first in range(done * batch_passes, steps, self.num_micro_batches):
            window, rows = batches.next_step(min(self.num_micro_batches, steps - first))
            parts = list(_parts(window, first))
            if self.is_sharded and self.last_batch is None:
                self.last_batch = self._any_batch(columns for _, columns in parts)
            totals = self.objective.totals([columns for _, columns in parts])
            losses = []
            end = first + len(window)
            # The last batch of an epoch gets a number after which the user's function steps.
            skipped = self.num_micro_batches - len(window)
            if self.objective.has_own_step and skipped:
                self.averager.drop_used_gradients()
            self.shards.begin_step()
            for number, (index, columns) in enumerate(parts, start=1):
                self.shards.enter(index % batch_passes)
                batch = self.given_objective.tensors.batch(columns, self.device)
                is_last = number == len(parts)
                self.averager.weights.start(
                    batch.rows,
                    rows,
                    self.num_micro_batches,
                    ranks=self.size,
                    totals=totals,
                    is_last=is_last,
                )
                with self.averager.averaging(accumulate=not is_last):
                    losses.append(self._minibatch(batch, index + skipped, metric_sums))
            if totals is not None:
                totals()  # needed if this rank had no rows
            self.shards.enter(0)
            ends_epoch = end >= steps
            if not self.objective.has_own_step:
                self.step.step()
            done = end // batch_passes
            if self.progress.count_step():
                self.progress.step(done, metric_sums.means())
            step = self.spec.steps_done(epoch, done)
            if self.spec.terminate_on_nan:
                self.control.check_finite(step, epoch, *not_finite(self.original_module, losses))
            if not ends_epoch:
                save = functools.partial(self._save_checkpoint, done, metric_sums)
                self.control.after_step(epoch, done, [step], save)

    def _minibatch(self, batch: Batch, index: int, metric_sums: MetricSums) -> torch.Tensor | None:
        """Compute and backpropagate the loss of one batch, and return the loss of it alone."""
        weights = self.averager.weights
        if not batch.rows:
            self._pass_without_rows()
            return None
        self.last_batch = batch
        if self.objective.has_own_step:
            evaluation = self.objective.run_minibatch(
                self.module, self.optimizer, batch, weights, index
            )
        else:
            with self.step.autocast():
                evaluation = self.objective.evaluate(self.module, batch, weights)
        loss = evaluation.step_loss
        if loss is not None:
            self.step.scaled(loss if weights.passes == 1 else loss / weights.passes).backward()
        metric_sums.add(evaluation)
        if self.output_shapes is None:
            self.output_shapes = self._shapes_of(evaluation.outputs, batch)
        return evaluation.loss.detach()

    def _any_batch(self, own: Iterable[Any]) -> Batch:
        """Return a batch with rows, of another rank if this one has none. Called by all ranks."""
        tensors = self.given_objective.tensors
        first = next((c for c in own if tensors.batch(c, self.device).rows), None)
        lacks = exchange.gather(first is None, "lacks_batch")
        columns: Any = first
        if any(lacks):
            shared = exchange.broadcast(first, "first_batch", root=lacks.index(False))
            columns = shared if first is None else first
        return tensors.batch(columns, self.device)

    def _pass_without_rows(self) -> None:
        """Take part in a pass in which only other ranks have rows."""
        outputs: Sequence[torch.Tensor] = ()
        if self.is_sharded:
            # All ranks gather the layers, so this one computes with earlier rows.
            assert self.last_batch is not None
            with self.step.autocast():
                tensors = self.given_objective.tensors
                raw = tensors.call(self.module, self.last_batch.inputs)
                outputs = require_tensors(tensors.select(raw), raw)
        self.averager.weights.without_rows()
        if outputs:
            torch.stack([output.sum() * 0.0 for output in outputs]).sum().backward()

    def _shapes_of(self, outputs: Sequence[Any], batch: Batch) -> list[list[int]] | None:
        """Return the shape of one row of each output.

        A module may return losses in training mode, and predictions in evaluation mode.
        """
        tensors = self.given_objective.tensors
        if not outputs or not _are_rows(outputs, batch.rows):
            modes = [(part, part.training) for part in self.module.modules()]
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    self.module.eval()
                    outputs = tensors.select(tensors.call(self.module, batch.inputs))
            except Exception as error:
                logger.info("The model has no outputs in evaluation mode (%s)", error)
            # Layers may change their weights when the mode changes.
            self.module.train()
            for part, mode in modes:
                part.training = mode
            if not _are_rows(outputs, batch.rows):
                return []
        return [list(output.shape[1:]) for output in outputs]

    def _validate(self, data: DataModule) -> MetricSums:
        self.module.eval()
        metric_sums = MetricSums(self.objective.metrics, self.objective.loss_parts)
        steps = self.spec.data.validation_steps_per_epoch * self.spec.data.passes_per_batch
        batches = tensor_batches(data.val_chunks(), self.device)
        passes = 0
        with torch.no_grad(), contextlib.closing(batches):
            for _, columns in _parts(itertools.islice(batches, steps)):
                batch = self.given_objective.tensors.batch(columns, self.device)
                if not batch.rows:
                    continue
                with self.step.autocast():
                    evaluation = self.objective.evaluate(self.module, batch)
                metric_sums.add(evaluation)
                passes, self.last_batch = passes + 1, batch
            for _ in range(passes, self.val_passes):
                # Ranks with more batches need this one to gather the layers.
                assert self.last_batch is not None
                with self.step.autocast():
                    self.objective.evaluate(self.module, self.last_batch)
        # Checkpoints hold the weights that training continues with; layers may merge others into
        # them for evaluation.
        self.module.train()
        return metric_sums

    def _save_checkpoint(self, batches: int = 0, metric_sums: MetricSums | None = None) -> bool:
        """Save the run, and return whether it was saved. Called by all ranks."""
        return self.checkpoints.save(
            batches,
            tuple(self.history),
            self.output_shapes,
            None if metric_sums is None else metric_sums.state(),
            self.averager.unused_gradients(),
            self.stopped,
        )

    def _is_stopped_by_callbacks(self, epoch: int, record: EpochMetrics) -> bool:
        """End an epoch for callbacks; return whether one raised StopIteration on any rank."""
        stops = False
        for callback in self.callbacks:
            method = getattr(callback, "on_epoch_end", None)
            if method is not None:
                try:
                    method(epoch=epoch, logs=record.as_dict())
                except StopIteration:
                    stops = True
        return bool(self.callbacks) and sum_over_ranks(float(stops), "stop_training") > 0

    def _callbacks(self, moment: str, **arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, moment, None)
            if method is not None:
                method(**arguments)


def _parts(batches: Iterable[Any], first: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield the parts of some batches, each with its batch's number, of which one is ``first``."""
    for index, columns in enumerate(batches, start=first):
        for part in columns.passes if isinstance(columns, CollatedBatch) else [columns]:
            yield index, part


def _are_rows(outputs: Sequence[Any], rows: int) -> bool:
    """Return whether all outputs are tensors with one entry per row."""
    return all(isinstance(o, torch.Tensor) and o.dim() and len(o) == rows for o in outputs)
