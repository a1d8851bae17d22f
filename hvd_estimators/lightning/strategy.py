"""Lightning's Trainer on ranks of Horovod or ``torch.distributed``.

`HorovodStrategy` works in any Trainer. The estimator uses `WeightedStrategy`, with which ranks with
unequal batches train and measure as one process would.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.gpus import gpu_index
from hvd_estimators.launch.rendezvous.client import PROXY_ADDRESS_VARIABLE, PROXY_PORT_VARIABLE
from hvd_estimators.lightning.callbacks import agree_on_stopping
from hvd_estimators.lightning.dry_run import takes_tuple
from hvd_estimators.lightning.loaders import TrainLoader, ValidationLoader
from hvd_estimators.lightning.package import (
    FLAVORS,
    ClusterEnvironment,
    Flavor,
    ParallelStrategy,
    flavor_of,
    imported_flavors,
    of_any_flavor,
    of_flavor,
    one_flavor,
    patch_attribute,
)
from hvd_estimators.lightning.results import (
    RankResults,
    lists_with_lengths,
    reduce_results,
    without_effects,
)
from hvd_estimators.torch.collectives import (
    average_batch_norm,
    broadcast_tensors,
    connect,
    current,
    exchange,
    gather_tensor,
    reduce_tensor,
    sum_tensor,
)
from hvd_estimators.torch.gradients import GradientAverager
from hvd_estimators.torch.loss import StepWeights, as_stated
from hvd_estimators.torch.metrics import connect_metrics
from hvd_estimators.torch.optimizer_step import StepRate, set_optimizer_mode
from hvd_estimators.torch.serialization import restore_optimizer
from hvd_estimators.torch.shard_state import BufferReducer
from hvd_estimators.torch.sync_batch_norm import synchronized_layers
from hvd_estimators.training.shard_state import ShardStates

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

PARAMETER_GROUPS = "hvd_estimators.parameter_groups"
"""Checkpoint key of the parameter names in each group of each optimizer."""


class HorovodEnvironment(ClusterEnvironment):
    """Cluster environment for the ranks of a running Horovod job."""

    @property
    def creates_processes_externally(self) -> bool:
        """True, because Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """The rendezvous address of Horovod's ranks."""
        return os.environ.get(PROXY_ADDRESS_VARIABLE, "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The rendezvous port of Horovod's ranks; 0 if there is only one rank."""
        return int(os.environ.get(PROXY_PORT_VARIABLE, 0))

    @staticmethod
    def detect() -> bool:
        """Return whether this process was started as a Horovod rank."""
        return "HOROVOD_RANK" in os.environ

    def world_size(self) -> int:
        """Return the number of ranks."""
        return current().size

    def set_world_size(self, size: int) -> None:
        """Do nothing, because Horovod determines the number of ranks."""

    def global_rank(self) -> int:
        """Return this rank."""
        return current().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because Horovod determines the rank."""

    def local_rank(self) -> int:
        """Return this rank's number on its machine."""
        return current().local_rank

    def node_rank(self) -> int:
        """Return the machine's number."""
        return current().node_rank


class HorovodStrategy(ParallelStrategy):
    """Train one copy of a LightningModule per Horovod rank, with averaged gradients.

    Use ``Trainer(strategy=HorovodStrategy(), devices=1, accelerator=...)`` in processes that
    Horovod, or a backend of this package, has started. Each process trains on one device.

    Every backward pass ends with the mean of the gradients over the ranks, before clipping,
    callbacks and optimizers see them. This holds in automatic and in manual optimization
    (``manual_backward``), with any number of optimizers. While gradients accumulate, they stay on
    their rank until the last backward pass before the step. At the start, all ranks get the
    parameters and buffers of rank 0. The strategy replaces neither optimizers nor their classes.

    The strategy works in the Trainers of ``lightning.pytorch`` and of ``pytorch_lightning``. If
    both are imported, the strategy takes the class of the Trainer's package when it is passed to
    the Trainer.

    Runs on every rank.

    Parameters
    ----------
    compression : horovod compressor, optional
        Compresses gradients, for example ``horovod.torch.Compression.fp16``.
    scale_learning_rate : bool, default True
        Whether optimizers step with their learning rates multiplied by the number of ranks, as
        is usual with Horovod. Schedulers, callbacks and checkpoints see the unscaled rates.
    **kwargs
        ``accelerator``, ``checkpoint_io`` and ``precision_plugin``; see `ParallelStrategy`.

    Examples
    --------
    >>> trainer = Trainer(strategy=HorovodStrategy(), devices=1)    # doctest: +SKIP
    >>> trainer.fit(module, loader)                                 # doctest: +SKIP
    """

    strategy_name = "horovod"
    # Whether to reduce logged values without sync_dist, too.
    reduces_everything = False
    # Whether accumulated batches weigh equally, as in Lightning, and not by their denominators.
    weighs_by_batch = True
    lightning_flavor: Flavor | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> HorovodStrategy:
        """Create a strategy for the only possible package, or for either one."""
        if cls.lightning_flavor is not None:
            return super().__new__(cls)
        candidates = imported_flavors() or [f for f in FLAVORS if f.is_installed]
        given = [value for value in kwargs.values() if flavor_of(value) is not None]
        if given or len(candidates) < 2:
            return super().__new__(of_flavor(cls, one_flavor(("strategy", g) for g in given)))
        return super().__new__(of_any_flavor(cls))

    def __init__(
        self, compression: Any = None, scale_learning_rate: bool = True, **kwargs: Any
    ) -> None:
        assert self.lightning_flavor is not None
        environment = of_flavor(HorovodEnvironment, self.lightning_flavor)()
        super().__init__(cluster_environment=environment, **kwargs)
        self._compression = compression
        self._scale_learning_rate = scale_learning_rate
        self._averager: GradientAverager | None = None
        self._blocked = False
        self._stated: Any = None
        self._loss_scale: Any = 1.0
        self.outputs: list[tuple[Any, int]] = []
        self._rates: dict[int, StepRate] = {}
        # Removes changes to module, metrics, loops and optimizers.
        self._undo = contextlib.ExitStack()

    def set_world_ranks(self) -> None:
        """Connect to the other ranks before Lightning asks for the rank."""
        connect()
        rank_zero: Any = rank_zero_only
        rank_zero.rank = self.global_rank

    @property
    def is_distributed(self) -> bool:
        """True, because there may be other ranks."""
        return True

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

    def setup(self, trainer: Trainer) -> None:
        """Broadcast rank 0's parameters to all ranks, and prepare gradient averaging."""
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None and trainer.state.fn == "fit":
            self._undo.enter_context(synchronized_layers(module))
        super().setup(trainer)
        with torch.inference_mode(False):
            broadcast_tensors(module.state_dict())
        if self.world_size > 1:
            self._undo.callback(connect_metrics(module, _gather_states))
        assert self.lightning_flavor is not None
        self._undo.callback(
            reduce_results(
                trainer,
                self.lightning_flavor,
                self.reduces_everything,
                self._reach_epoch_end,
            )
        )
        if trainer.state.fn != "fit":
            return
        if self.world_size > 1:
            self._undo.callback(agree_on_stopping(trainer))
        self._averager = GradientAverager(
            module,
            self.optimizers,
            self._compression,
            every_parameter=not module.automatic_optimization,
            loss_in_step=self._loss_in_step,
        )
        for optimizer in self.optimizers:
            self._rate(optimizer)

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.model is not None
        if self.root_device.type == "cuda":
            torch.cuda.set_device(self.root_device)
        self.model.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, and store the denominator that its output states.

        The module may call ``loss.backward()``.
        """
        if self._averager is not None:
            self._averager.refresh()
            self.weights.start(is_last=not self._blocked and self._is_last_part)
        self._count_rows(args[0] if args else None)
        self._stated, self._loss_scale = None, 1.0
        output = super().training_step(*args, **kwargs)
        self._stated = as_stated(output, "training_step")[1]
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        self._count_rows(args[0] if args else None)
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step."""
        self._count_rows(args[0] if args else None)
        return super().test_step(*args, **kwargs)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients, and average them unless more gradients will accumulate.

        In manual optimization, ``manual_backward({"loss": ..., "denominator": ...})`` states the
        loss's denominator. All ranks must call it equally often.
        """
        module, averager = self.lightning_module, self._averager
        assert module is not None
        assert averager is not None
        closure_loss, is_counted = self._scaled(closure_loss, module)
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        with averager.averaging(accumulate=self._blocked):
            if is_counted:
                self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @property
    def _is_last_part(self) -> bool:
        """True if the current batch is of the last of the rank's shards."""
        return True

    @property
    def weights(self) -> StepWeights:
        """Weights of the losses of the current step, while the Trainer fits."""
        assert self._averager is not None
        return self._averager.weights

    @property
    def batch_weight(self) -> tuple[int, float]:
        """Rows of the current batch, and the factor of its loss; here batches weigh the same."""
        return 1, 1.0

    def _scaled(self, loss: Any, module: Any) -> tuple[torch.Tensor, bool]:
        """Return a loss for the backward pass, and whether its gradients count."""
        rows, factor = self.batch_weight
        stated = self._stated
        if not module.automatic_optimization:
            loss, stated = as_stated(loss, "manual_backward")
        if stated is None:
            if module.automatic_optimization:
                self.weights.step_factor(None, rows)
            self._loss_scale = factor
            return (loss if factor == 1.0 else loss * factor), True
        scale = self._loss_scale = self.weight_of(stated, loss.device)
        # The mean of an empty batch may be NaN.
        return loss * scale, bool(scale > 0 or torch.isfinite(loss).all())

    def weight_of(self, stated: Any, device: torch.device) -> torch.Tensor:
        """Return the factor of the current batch's mean with this denominator.

        All ranks must call it equally often.
        """
        module = self.lightning_module
        assert module is not None
        rows, factor = self.batch_weight
        stated = torch.as_tensor(stated, dtype=torch.float64, device=device)
        if not rows:
            stated = torch.zeros_like(stated)
        if module.automatic_optimization and not self.weighs_by_batch:
            return stated * (factor / max(rows, 1)) * self.weights.step_factor(stated, rows)
        (total,) = sum_tensor(stated.reshape(1), "denominators")
        return torch.where(total > 0, stated * (self.world_size / total), 0.0)

    def _loss_in_step(self, loss: Any) -> Any:
        """Return the contribution of a closure's loss to the step's loss, on this rank."""
        # The mean of an empty batch may be NaN.
        return loss * self._loss_scale if self._loss_scale else 0.0

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run an optimizer step; its closure, which trains, sees the unscaled learning rates."""
        rate = self._rate(optimizer)

        def with_given_rates() -> Any:
            assert rate is not None
            with rate.given():
                return closure()

        return super().optimizer_step(
            optimizer, closure if rate is None else with_given_rates, model, **kwargs
        )

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients on each rank without averaging them."""
        blocked, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = blocked

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, and return any other object unchanged.

        Parameters
        ----------
        tensor : torch.Tensor
            A tensor with the same shape on all ranks.
        group : object
            Not used: all ranks take part.
        reduce_op : str or torch.distributed.ReduceOp
            ``mean``, ``sum``, ``min`` or ``max``.
        """
        if not isinstance(tensor, torch.Tensor) or self.world_size == 1:
            return tensor
        op = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2]
        return reduce_tensor(tensor, (op or "mean").lower())

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Stack the ranks' tensors as ``(ranks, *shape)``; with one rank, return the tensor itself.

        With ``sync_grads``, the gradients of all ranks for a rank's tensor are summed, as in
        Lightning's other strategies. If each rank computes the loss of all gathered rows, the
        average over the ranks that follows equals the gradient of a single process.
        """
        if self.world_size == 1:
            return tensor
        if sync_grads:
            gathered = gather_tensor(tensor)
            if gathered.requires_grad:
                # The backward pass averages over the ranks.
                gathered.register_hook(lambda gradient: gradient * self.world_size)
            return gathered
        with torch.no_grad():
            return gather_tensor(tensor)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's object on all ranks."""
        return obj if self.world_size == 1 else exchange.broadcast(obj, "lightning.object", src)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            current().barrier()

    def load_checkpoint(  # type: ignore[override]  # Lightning 2.6 has added an option
        self, checkpoint_path: Any, **options: Any
    ) -> dict[str, Any]:
        """Read a checkpoint on rank 0 and return it on all ranks."""
        loaded = None
        if self.is_global_zero:
            loaded = super().load_checkpoint(checkpoint_path, **options)
        checkpoint: dict[str, Any] = self.broadcast(loaded)
        return checkpoint

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
        """Average batch-normalization statistics, so that all ranks validate with the same ones."""
        self.set_optimizer_modes(training=False)
        self.average_batch_norm()

    def on_train_end(self) -> None:
        """Average batch-normalization statistics, so that all ranks end with the same ones."""
        self.set_optimizer_modes(training=False)
        self.average_batch_norm()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint, which all ranks save together."""
        module = self.lightning_module
        # A rank that fails may save alone.
        if module is not None and not module.trainer.interrupted:
            self.average_batch_norm()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def teardown(self) -> None:
        """Remove the strategy's changes to module, metrics and optimizers."""
        if self._averager is not None:
            self._averager.remove()
            self._averager = None
        for rate in self._rates.values():
            rate.remove()
        self._rates = {}
        self._undo.close()
        super().teardown()

    def _rate(self, optimizer: torch.optim.Optimizer) -> StepRate | None:
        """Return an optimizer's learning-rate scaler; the optimizer may be newer than setup."""
        if self._averager is None or not self._scale_learning_rate:
            return None
        if id(optimizer) not in self._rates and self._learning_rate_scale > 1:
            self._rates[id(optimizer)] = StepRate(optimizer, self._learning_rate_scale)
        return self._rates.get(id(optimizer))

    def _count_rows(self, batch: Any) -> None:
        """Count the rows of a step. They are the weights of values of the epoch."""
        module = self.lightning_module
        results = None if module is None else module.trainer._results
        if isinstance(results, RankResults):
            results.rows_of_epoch += self._rows_of(batch)

    def _rows_of(self, batch: Any) -> int:
        assert self.lightning_flavor is not None
        utilities = self.lightning_flavor.get("utilities.data.extract_batch_size")
        try:
            rows: int = utilities(batch)
        except Exception:  # Lightning finds no tensor in the batch.
            return 1
        return rows

    def _reach_epoch_end(self) -> None:
        """Average statistics before the hooks of an epoch's end, which may save or read them."""
        module = self.lightning_module
        if module is not None and module.trainer.training:
            self.average_batch_norm()

    @property
    def _learning_rate_scale(self) -> int:
        return self.world_size

    def average_batch_norm(self) -> None:
        """Average statistics of the module, and of copies in callbacks. Called by all ranks."""
        module = self.lightning_module
        if module is None or self._averager is None or module.trainer.sanity_checking:
            return
        connected: Any = module.trainer
        attributes = [value for c in connected.callbacks for value in vars(c).values()]
        with torch.inference_mode(False):
            self._reduce_buffers(module)
            for copied in attributes:  # such as the mean of the weights
                if isinstance(copied, torch.nn.Module) and copied is not module:
                    average_batch_norm(copied)

    def _reduce_buffers(self, module: torch.nn.Module) -> None:
        average_batch_norm(module)


class WeightedStrategy(HorovodStrategy):
    """Weight gradients and logged values by the weight of each rank's batch.

    Each step uses the gradient of the mean over the global batch. Logged values are
    weighted by rows. A rank without rows in a step takes part without effect on results or state.

    Parameters
    ----------
    train, validation : loader, optional
        Provide the weights of their batches; without a loader, all batches weigh the same.
    shards : ShardStates
        The canonical shards, of which the rank runs one or several.
    batch_hint : str
        A hint for the error of a step that unpacks the batch as a tuple.
    buffers : BufferReducer
        Reduces the module's buffers.
    by_batch : bool
        See `TrainLoader`.
    **kwargs
        See `HorovodStrategy`.
    """

    reduces_everything = True

    def __init__(
        self,
        train: TrainLoader | None = None,
        validation: ValidationLoader | None = None,
        *,
        shards: ShardStates,
        batch_hint: str = "",
        buffers: BufferReducer,
        by_batch: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.weighs_by_batch = by_batch
        self.outputs = []
        self._step_args: tuple[Any, ...] = ()
        self._contributions: list[Any] = []
        self._batch_hint = batch_hint
        self._shards = shards
        self._buffers = buffers
        self._train = train
        self._validation = validation
        self._current: TrainLoader | ValidationLoader | None = None
        self._lists: list[tuple[list[Any], int]] = []

    @property
    def has_no_rows(self) -> bool:
        """True if the rank has no rows in the current batch, whose results are discarded."""
        return self._current is not None and not self._current.rows

    @property
    def batch_weight(self) -> tuple[int, float]:
        """Rows of the current batch, and the factor of its loss."""
        return (1, 1.0) if self._train is None else (self._train.rows, self._train.factor)

    @property
    def averager(self) -> GradientAverager:
        """The gradient averager, while the Trainer fits."""
        assert self._averager is not None
        return self._averager

    def setup(self, trainer: Trainer) -> None:
        """Prepare training without Lightning's exchange of signals for each batch."""
        super().setup(trainer)
        loop: Any = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # Lightning 2.6
            # The estimator's ranks agree on signals themselves.
            patch = patch_attribute(loop, "_broadcast_sigterm_tensor", _do_nothing)
            self._undo.enter_context(patch)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step on the batch of the rank's first shard."""
        self.outputs, self._contributions = [], []
        self._step_args = args[1:]
        if self._train is not None and self._shards.passes > 1:
            self._train.enter(0)  # an optimizer may call its closure repeatedly
        output = self._training_step(*args, **kwargs)
        module = self.lightning_module
        assert module is not None
        if module.trainer.fit_loop._skip_backward:
            for index in range(1, self._shards.passes):
                self._step_on(index)
            self._shards.enter(0)
        return output

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the batches of all of the rank's shards.

        So hooks, schedulers and counts see one batch, as on the ranks with which the run began.
        """
        loss, passes = closure_loss, self._shards.passes
        for index in range(1, passes):
            with self.block_backward_sync():
                super().backward(loss, optimizer, *args, **kwargs)
            self._contributions.append(super()._loss_in_step(loss.detach()))
            loss = self._step_on(index)
        returned = super().backward(loss, optimizer, *args, **kwargs)
        if passes > 1:
            self._contributions.append(super()._loss_in_step(loss.detach()))
            self._drop_placeholder_entries()
            # Hooks of the batch's end log values for all of its rows.
            assert self.lightning_module is not None
            results = self.lightning_module.trainer._results
            if results is not None and self._train is not None:
                results.batch_size = sum(rows for _, rows in self.outputs)
            self._shards.enter(0)
        return returned

    def weight_of(self, stated: Any, device: torch.device) -> torch.Tensor:
        """Return the factor of the current batch's mean with this denominator.

        Raises
        ------
        ParamError
            If the shards' batches would need a denominator for each of several passes.
        """
        if self.weighs_by_batch and self._shards.passes > 1:
            raise ParamError(
                "trainer_args: with accumulate_grad_batches, or GradientAccumulationScheduler, a "
                "loss that returns its denominator needs as many processes as the run began with: "
                f"{self._shards.num_shards}. Set num_proc to it, or set backward_passes_per_step "
                "instead and another run_id."
            )
        return super().weight_of(stated, device)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._counted(self._train) as count:
            output = count(super().training_step(*args, **kwargs))
        rows = 1 if self._train is None else self._train.rows
        named = {"loss": output} if isinstance(output, torch.Tensor) else output or {}
        self.outputs.append((named, rows))
        if self._shards.passes > 1 and named.get("loss") is None:
            raise RuntimeError(
                "training_step returned no loss, and this process has several batches in a step. "
                "Return a loss for each batch, such as 0.0 * loss."
            )
        return output

    @property
    def _is_last_part(self) -> bool:
        return len(self.outputs) + 1 >= self._shards.passes

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

    def _loss_in_step(self, loss: Any) -> Any:
        return sum(self._contributions) if self._contributions else super()._loss_in_step(loss)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        with self._counted(self._validation) as count:
            return count(super().validation_step(*args, **kwargs))

    @property
    def _learning_rate_scale(self) -> int:
        return self._shards.num_shards

    def _reduce_buffers(self, module: torch.nn.Module) -> None:
        self._buffers.reduce()

    def _reach_epoch_end(self) -> None:
        self._drop_placeholder_entries()
        super()._reach_epoch_end()

    def load_checkpoint(  # type: ignore[override]  # Lightning 2.6 has added an option
        self, checkpoint_path: Any, **options: Any
    ) -> dict[str, Any]:
        """Read a checkpoint on each rank, because all ranks can access the store."""
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, **options)
        return loaded

    @contextlib.contextmanager
    def _counted(
        self, loader: TrainLoader | ValidationLoader | None
    ) -> Iterator[Callable[[Any], Any]]:
        """Weight logged values by rows; yield a function that processes a step's output."""
        self._drop_placeholder_entries()
        self._current = loader
        module = self.lightning_module
        assert module is not None
        results = module.trainer._results
        is_placeholder = self.has_no_rows

        def count(output: Any) -> Any:
            loss, stated = as_stated(output, "the step of the LightningModule")
            if stated is not None and isinstance(results, RankResults) and not is_placeholder:
                results.count_by(loss.detach(), stated)
            return output

        if isinstance(results, RankResults):
            results.logged_in_step.clear()
        if loader is None:
            yield count
            return
        if results is not None:
            results.batch_size = loader.rows
        with contextlib.ExitStack() as stack:
            if is_placeholder:
                callbacks: Any = module.trainer
                self._lists = lists_with_lengths(module, callbacks.callbacks)
                stack.enter_context(without_effects(module, results))
            stack.enter_context(self._hinting())
            yield count

    @contextlib.contextmanager
    def _hinting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._batch_hint and takes_tuple(error):
                error.add_note(self._batch_hint)
            raise

    def _rows_of(self, batch: Any) -> int:
        return super()._rows_of(batch) if self._current is None else self._current.rows

    def _drop_placeholder_entries(self) -> None:
        """Remove list entries that steps and hooks added for a batch without rows.

        A rank without any rows in the epoch retains the entries. Hooks would fail on empty lists,
        and their logged values do not count.
        """
        module = self.lightning_module
        results = None if module is None else module.trainer._results
        if isinstance(results, RankResults) and results.rows_of_epoch:
            for entries, length in self._lists:
                del entries[length:]
        self._lists = []


def _do_nothing() -> None:
    pass


def _gather_states(states: Any) -> list[Any]:
    """Return the metric states of all ranks. A function, because metrics are copied and pickled."""
    return exchange.gather(states, "lightning.metric")
