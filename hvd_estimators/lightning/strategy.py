"""Lightning's strategy for the ranks of a fit: ranks with unequal batches train as one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.gpus import gpu_index
from hvd_estimators.lightning.callbacks import agree_on_stopping
from hvd_estimators.lightning.loaders import TrainLoader, ValidationLoader
from hvd_estimators.lightning.package import (
    DDPStrategy,
    Flavor,
    LightningEnvironment,
    of_flavor,
    patch_attribute,
    patch_method,
)
from hvd_estimators.lightning.results import reduce_logged
from hvd_estimators.torch.collectives import (
    average_batch_norm,
    broadcast_tensors,
    current,
    exchange,
)
from hvd_estimators.torch.gradients import GradientAverager
from hvd_estimators.torch.loss_weights import WeightedLoss, as_stated
from hvd_estimators.torch.metrics import connect_metrics
from hvd_estimators.torch.optimizer_step import StepRate, set_optimizer_mode
from hvd_estimators.torch.serialization import restore_optimizer
from hvd_estimators.torch.shard_state import BufferReducer
from hvd_estimators.torch.sharding import ShardingOptions, gathered, shard, sharded_weights
from hvd_estimators.training.shard_state import ShardStates

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

PARAMETER_GROUPS = "hvd_estimators.parameter_groups"
"""Checkpoint key of the parameter names in each group of each optimizer."""


class RankEnvironment(LightningEnvironment):
    """Cluster environment for the ranks of a running job."""

    @property
    def creates_processes_externally(self) -> bool:
        """True, because Lightning starts no processes."""
        return True

    def world_size(self) -> int:
        """Return the number of ranks."""
        return current().size

    def global_rank(self) -> int:
        """Return this rank."""
        return current().rank

    def local_rank(self) -> int:
        """Return this rank's number on its machine."""
        return current().local_rank

    def node_rank(self) -> int:
        """Return the machine's number."""
        return current().node_rank

    def teardown(self) -> None:
        """Keep the rank's environment variables, which Lightning would delete."""


class WeightedStrategy(DDPStrategy):
    """Train one copy of a LightningModule per rank, and weight each rank's batch by its rows.

    Every backward pass ends with the gradient of the mean over the global batch, before clipping,
    callbacks and optimizers see it. This holds in automatic and in manual optimization
    (``manual_backward``), with any number of optimizers. While gradients accumulate, they stay on
    their rank until the last backward pass before the step. At the start, all ranks get the
    parameters and buffers of rank 0. The strategy replaces neither optimizers nor their classes,
    and does not wrap the module. Logged values are weighted by rows.

    Runs on every rank, in a session of `hvd_estimators.torch.collectives`.

    Parameters
    ----------
    train, validation : loader, optional
        Provide the weights of their batches; without a loader, all batches weigh the same.
    shards : ShardStates
        The canonical shards, of which the rank runs one or several.
    buffers : BufferReducer
        Reduces the module's buffers.
    batches_between_stops : int
        See `agree_on_stopping`.
    sharding : ShardingOptions or None
        How the ranks share the parameters; None: each rank has them all.
    compression : horovod compressor, optional
        Compresses gradients, for example ``horovod.torch.Compression.fp16``.
    scale_learning_rate : bool
        Whether optimizers step with their learning rates multiplied by the number of shards.
        Schedulers, callbacks and checkpoints see the unscaled rates.
    **kwargs
        ``checkpoint_io`` and others of `DDPStrategy`.

    Attributes
    ----------
    keeps_parts : bool
        Whether states have this rank's parts, and not whole tensors on rank 0.
    """

    strategy_name = "horovod"
    # Whether all ranks run the current step.
    _communicates = True
    lightning_flavor: Flavor

    def __init__(
        self,
        train: TrainLoader | None = None,
        validation: ValidationLoader | None = None,
        *,
        shards: ShardStates,
        buffers: BufferReducer,
        batches_between_stops: int = 1,
        sharding: ShardingOptions | None = None,
        compression: Any = None,
        scale_learning_rate: bool = True,
        **kwargs: Any,
    ) -> None:
        environment = of_flavor(RankEnvironment, self.lightning_flavor)()
        super().__init__(cluster_environment=environment, **kwargs)
        self._compression = compression
        self._scale_learning_rate = scale_learning_rate
        self._averager: GradientAverager | None = None
        self._blocked = False
        self._stated: Any = None
        self._loss_scale: Any = 1.0
        self._rates: dict[int, StepRate] = {}
        # Removes changes to module, metrics, loops and optimizers.
        self._undo = contextlib.ExitStack()
        self._sharding = sharding
        self.keeps_parts = False
        self.outputs: list[tuple[Any, int]] = []
        # Rows of this rank in the running epoch, of validation and of training.
        self._rows = {False: 0, True: 0}
        self._batches_between_stops = batches_between_stops
        self._step_args: tuple[Any, ...] = ()
        self._contributions: list[Any] = []
        self._shards = shards
        self._buffers = buffers
        self._train = train
        self._validation = validation

    def _configure_launcher(self) -> None:
        """Launch nothing, because the processes exist."""

    def setup_distributed(self) -> None:
        """Find the ranks, whose default process group exists."""
        self.set_world_ranks()

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type != "cuda":
            return devices[0]
        return torch.device("cuda", gpu_index(torch.cuda.device_count(), self.local_rank) or 0)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a ``DistributedSampler``."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def averager(self) -> GradientAverager:
        """The gradient averager, while the Trainer fits."""
        assert self._averager is not None
        return self._averager

    def setup(self, trainer: Trainer) -> None:
        """Prepare training, and let the ranks agree on values, stops and signals."""
        super().setup(trainer)
        self._averager = GradientAverager(
            trainer.lightning_module,
            self.optimizers,
            self._compression,
            every_parameter=not trainer.lightning_module.automatic_optimization,
            loss_in_step=self._loss_in_step,
        )
        for optimizer in self.optimizers:
            self._scale_rates(optimizer)
        if self.world_size > 1:
            self._undo.callback(connect_metrics(trainer.lightning_module, _gather_states))
            self._undo.callback(agree_on_stopping(trainer, self._batches_between_stops))
        connector = trainer._logger_connector
        for name, function in (
            ("epoch_end_reached", self._reach_epoch_end),
            ("on_epoch_end", self._leave_epoch),
        ):
            self._undo.enter_context(patch_method(connector, name, before=function))
        loop: Any = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # Lightning 2.6
            # The estimator's ranks agree on signals themselves.
            patch = patch_attribute(loop, "_broadcast_sigterm_tensor", _do_nothing)
            self._undo.enter_context(patch)

    def model_to_device(self) -> None:
        """Move the module to the device, unless the ranks share it: a GPU may hold a part only."""
        if self._sharding is None:
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Give all ranks the weights of rank 0, and each rank its part, if they share them."""
        assert self.model is not None
        broadcast_tensors(self.model.state_dict())
        module = self.lightning_module
        if self._sharding is None or module is None:
            return
        shard(module, [], self._sharding, self.root_device)
        # A step may use parameters outside of layers after it has called the module.
        root: Any = module
        root.set_reshard_after_forward(False, recurse=False)
        for name in ("training_step", "validation_step"):
            step = _called_as_forward(module, getattr(module, name))
            self._undo.enter_context(patch_attribute(module, name, step))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True if the ranks share the parameters, so that each reads its parts of them."""
        return self._sharding is not None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], *args: Any, **kw: Any) -> None:
        """Load the module's state, of which this rank takes its parts."""
        module = self.lightning_module
        assert module is not None
        weights = sharded_weights(module, checkpoint["state_dict"])
        super().load_model_state_dict({**checkpoint, "state_dict": weights}, *args, **kw)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint, which all ranks save together.

        It is whole on rank 0, or parts for a checkpoint of the run.
        """
        module = self.lightning_module
        # A rank that fails may save alone.
        if module is not None and not module.trainer.interrupted:
            self.average_batch_norm()
        return self._whole(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, or parts for a checkpoint of the run."""
        return self._whole(super().optimizer_state(optimizer))

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._sharding is None or self.keeps_parts:
            return state
        whole: dict[str, Any] = gathered(state, keep=self.is_global_zero)
        return whole

    def teardown(self) -> None:
        """Remove the strategy's changes. Parts stay on their device, where they are gathered."""
        if self._averager is not None:
            self._averager.remove()
            self._averager = None
        for rate in self._rates.values():
            rate.remove()
        self._rates = {}
        self._undo.close()
        if self._sharding is None or self.lightning_module is None:
            super().teardown()
            return
        optimizers, self.optimizers = self.optimizers, []
        with patch_attribute(self.lightning_module, "cpu", _do_nothing):
            super().teardown()
        self.optimizers = optimizers

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step on the batch of the rank's first shard.

        The module may call ``loss.backward()``.
        """
        self.outputs, self._contributions = [], []
        self._step_args = args[1:]
        if self._train is not None and self._shards.passes > 1:
            self._shards.begin_step()
            self._train.enter(0)  # an optimizer may call its closure repeatedly
        output = self._training_step(*args, **kwargs)
        module = self.lightning_module
        assert module is not None
        if module.trainer.fit_loop._skip_backward:
            for index in range(1, len(self._shards.shards)):
                self._step_on(index)
            self._shards.enter(0)
        return output

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the batches of all of the rank's shards.

        So hooks, schedulers and counts see one batch, as on the ranks with which the run began. In
        manual optimization, ``manual_backward({"loss": ..., "denominator": ...})`` states the
        loss's denominator. All ranks must call it equally often.
        """
        loss, passes = closure_loss, len(self._shards.shards)
        for index in range(1, passes):
            with self.block_backward_sync():
                self._backward(loss, optimizer, *args, **kwargs)
            self._contributions.append(self._contribution(loss.detach()))
            loss = self._step_on(index)
        returned = self._backward(loss, optimizer, *args, **kwargs)
        if passes > 1:
            self._contributions.append(self._contribution(loss.detach()))
            # Hooks of the batch's end log values for all of its rows.
            assert self.lightning_module is not None
            results = self.lightning_module.trainer._results
            if results is not None and self._train is not None:
                results.batch_size = sum(rows for _, rows in self.outputs)
            self._shards.enter(0)
        return returned

    def _backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients, and average them unless more gradients will accumulate."""
        module = self.lightning_module
        assert module is not None
        closure_loss, is_counted = self._scaled(closure_loss, module)
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self.averager.averaging(accumulate=self._blocked):
            if is_counted:
                self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            elif self._sharding is not None:
                raise ParamError(
                    "model: the loss of a batch without counted elements is not a number. With "
                    "sharding, all processes compute gradients together: return 0.0 times a sum "
                    "of the outputs as the loss of such a batch."
                )
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, and store the denominator that its output states."""
        self.averager.refresh()
        train, weights = self._train, self.averager.weights
        batch: tuple[int, float, int] = 1, self.world_size, 1
        if train is not None:
            batch = train.rows, train.step_rows, train.passes
        weights.start(*batch, ranks=self.world_size, is_last=self._is_last_part)
        self._stated, self._loss_scale = None, 1.0
        with self._counted(train):
            output = super().training_step(*args, **kwargs)
        self._stated = as_stated(output, "training_step")[1]
        rows = 1 if train is None else train.rows
        named = {"loss": output} if isinstance(output, torch.Tensor) else output or {}
        self.outputs.append((named, rows))
        is_one_of_several = self._shards.passes > 1 or self._sharding is not None
        if is_one_of_several and named.get("loss") is None:
            raise RuntimeError(
                "training_step returned no loss, and a step has several batches in this process, "
                "or the processes share the parameters. "
                "Return a loss for each batch, such as 0.0 * loss."
            )
        return output

    @property
    def _is_last_part(self) -> bool:
        """True if the current batch is of the last of the rank's shards, and ends a step."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return True  # the module calls optimizers when it likes
        return not self._blocked and len(self.outputs) + 1 >= len(self._shards.shards)

    def _step_on(self, index: int) -> torch.Tensor:
        """Run the training step on the batch of another shard, and return its loss."""
        module: Any = self.lightning_module
        assert self._train is not None
        batch = self.precision_plugin.convert_input(self._train.enter(index))
        batch = self.batch_to_device(module.on_before_batch_transfer(batch, 0), dataloader_idx=0)
        # Otherwise hooks between the first batches would reset the step's logged values.
        module.trainer._logger_connector.on_batch_start(batch)
        # Modules can log only within hooks that log.
        before, module._current_fx_name = module._current_fx_name, "training_step"
        self._training_step(batch, *self._step_args)
        module._current_fx_name = before
        loss: torch.Tensor = self.outputs[-1][0]["loss"]
        return loss / module.trainer.accumulate_grad_batches

    def _scaled(self, loss: Any, module: Any) -> tuple[torch.Tensor, bool]:
        """Return a loss for the backward pass, and whether its gradients count."""
        weights, stated = self.averager.weights, self._stated
        factors = weights.of_step
        if not module.automatic_optimization:
            loss, stated = as_stated(loss, "manual_backward")
            factors = weights.of_call
        part = WeightedLoss(loss, weights.rows)
        if stated is not None:
            part = WeightedLoss(loss, stated, "stated")
        (factor,) = factors([part])
        self._loss_scale = factor
        if stated is None:
            return (loss if factor == 1.0 else loss * factor), True
        # The mean over no tokens may be NaN.
        return loss * factor, bool(factor > 0 or torch.isfinite(loss).all())

    def _contribution(self, loss: Any) -> Any:
        """Return the contribution of a batch's loss to the step's loss, on this rank."""
        # The mean over no tokens may be NaN.
        return loss * self._loss_scale if self._loss_scale else 0.0

    def _loss_in_step(self, loss: Any) -> Any:
        return sum(self._contributions) if self._contributions else self._contribution(loss)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        with self._counted(self._validation):
            return super().validation_step(*args, **kwargs)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run an optimizer step with scaled learning rates, which its closure does not see."""
        self._scale_rates(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients on each rank without averaging them."""
        blocked, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = blocked

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's reduction over the ranks, and any other object unchanged.

        Lightning's own overwrites the tensor, and cuts the mean of integers.
        """
        if not self._communicates:
            return tensor
        if isinstance(tensor, torch.Tensor):
            is_cut = reduce_op in ("mean", "avg") and not tensor.is_floating_point()
            tensor = tensor.double() if is_cut else tensor.clone()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Stack the ranks' tensors as ``(ranks, *shape)``; with one rank, return the tensor itself.

        With ``sync_grads``, the gradients of all ranks for a rank's tensor are summed. If each rank
        computes the loss of all gathered rows, the average over the ranks that follows equals the
        gradient of a single process.
        """
        if not self._communicates:
            raise RuntimeError(
                "self.all_gather: other processes have no rows in this step. The run began with "
                "more processes: set num_proc to their number, or to a divisor."
            )
        return tensor if self.world_size == 1 else super().all_gather(tensor, group, sync_grads)

    def _scale_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale an optimizer's rates in its steps; the optimizer may be newer than `setup`."""
        is_new = id(optimizer) not in self._rates
        if self._scale_learning_rate and is_new and self._shards.num_shards > 1:
            self._rates[id(optimizer)] = StepRate(optimizer, self._shards.num_shards)

    def average_batch_norm(self) -> None:
        """Reduce the module's buffers, and average statistics of copies in callbacks.

        Called by all ranks.
        """
        module = self.lightning_module
        if module is None or self._averager is None or module.trainer.sanity_checking:
            return
        connected: Any = module.trainer
        attributes = [value for c in connected.callbacks for value in vars(c).values()]
        own = {*module.modules()}
        with torch.inference_mode(False):
            self._buffers.reduce()
            for copied in attributes:  # such as the mean of the weights
                if isinstance(copied, torch.nn.Module) and copied not in own:
                    average_batch_norm(copied)

    def reduce_logged(self) -> None:
        """Reduce the values that the epoch has logged. Called by all ranks."""
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        assert trainer._results is not None
        step_rows = sum(rows for _, rows in self.outputs)
        reduce_logged(trainer, self._rows[trainer._results.training], step_rows)
        # A validation's values of the same names are newer than the step's.
        self.outputs = []

    def _reach_epoch_end(self) -> None:
        """Average statistics and values before the hooks of an epoch's end, which read them."""
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        assert trainer._results is not None
        if trainer.training:
            self.average_batch_norm()
        self.reduce_logged()
        # Hooks log values for all rows of the rank.
        trainer._results.batch_size = self._rows[trainer._results.training]

    def _leave_epoch(self) -> None:
        """Reduce the values that hooks of the epoch's end have logged."""
        self.reduce_logged()
        results = self.lightning_module.trainer._results  # type: ignore[union-attr]
        assert results is not None
        results.batch_size, self._rows[results.training] = None, 0

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, including parameter groups that were added during training."""
        module = self.lightning_module
        groups = checkpoint.get(PARAMETER_GROUPS)
        if groups is None or module is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state, names in zip(
            self.optimizers, checkpoint["optimizer_states"], groups, strict=True
        ):
            restore_optimizer(optimizer, module, {"optimizer": state, "groups": names})

    def set_optimizer_modes(self, training: bool) -> None:
        """Switch schedule-free optimizers to training, or to the weights for evaluation."""
        for optimizer in self.optimizers:
            set_optimizer_mode(optimizer, training)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Switch schedule-free optimizers to training."""
        self.set_optimizer_modes(training=True)

    def on_validation_start(self) -> None:
        """Let all ranks validate with equal statistics, and the weights for evaluation."""
        self.set_optimizer_modes(training=False)
        self.average_batch_norm()

    def on_train_end(self) -> None:
        """Let all ranks end with equal statistics, and the weights for evaluation."""
        self.on_validation_start()

    @contextlib.contextmanager
    def _counted(self, loader: TrainLoader | ValidationLoader | None) -> Iterator[None]:
        """Weight logged values by rows."""
        module = self.lightning_module
        assert module is not None
        results = module.trainer._results
        rows = 1 if loader is None else loader.rows
        self._rows[module.trainer.training] += rows
        if loader is not None and results is not None:
            results.batch_size = rows
        self._communicates = loader is None or loader.is_shared
        try:
            yield
        finally:
            self._communicates = True


def _do_nothing() -> None:
    pass


def _called_as_forward(module: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that the module runs as its forward pass, whose hooks gather parameters."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        module.forward = forward  # for the step's own calls
        return step(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        module.forward = run
        try:
            return module(*args, **kwargs)
        finally:
            module.forward = forward

    return call


def _gather_states(states: Any) -> list[Any]:
    """Return the metric states of all ranks. A function, because metrics are copied and pickled."""
    return exchange.gather(states, "lightning.metric")
