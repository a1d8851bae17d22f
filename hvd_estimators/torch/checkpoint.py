"""Checkpoints of a torch run: saving and restoring the state of the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import IO, Any

import torch

from hvd_estimators._util.documents import to_python
from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.checkpoints import TensorFile
from hvd_estimators.store.paths import Position
from hvd_estimators.torch.collectives import exchange
from hvd_estimators.torch.serialization import (
    load_optimizer_state,
    load_state,
    optimizer_content,
    restore_optimizer,
    save_state,
)
from hvd_estimators.torch.shard_files import with_tensors, write_parts
from hvd_estimators.torch.shard_state import (
    BufferReducer,
    BufferState,
    ShardBuffers,
    TorchStreams,
    TrainableState,
    non_persistent_buffers,
)
from hvd_estimators.torch.sharding import is_sharded, sharded_weights, stored_part
from hvd_estimators.torch.stateful import StatefulObjects, is_loadable
from hvd_estimators.torch.tensor_files import StoredTensor
from hvd_estimators.torch.tensors import snapshot
from hvd_estimators.training.checkpoint_writer import CheckpointWriter, gather_state, restore
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.shard_state import ShardStates
from hvd_estimators.training.spec import EpochMetrics, TrainSpec

logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Checkpoints of a torch run. Every rank creates one.

    Parameters
    ----------
    spec : TrainSpec
        Training job.
    rank, size : int
        This rank, and the number of ranks.
    module : torch.nn.Module
        Trained module.
    optimizer : torch.optim.Optimizer
        Optimizer of the module.
    device : torch.device
        Device of the module and the optimizer.

    Attributes
    ----------
    state : RunState or None
        State to resume from; None for a new run.
    gradients : mapping
        Gradients by parameter name that waited for a step when the run was saved.
    writer : CheckpointWriter
        Context in which `save` must be called.
    shards : ShardStates
        Shards that this rank runs.
    buffers : BufferReducer
        Reducer of the module's buffers.
    is_sharded : bool
        Whether this rank holds a part of the parameters.
    """

    def __init__(
        self,
        spec: TrainSpec,
        rank: int,
        size: int,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._rank, self._size = rank, size
        self._module = module
        self._optimizer = optimizer
        self._non_persistent = non_persistent_buffers(module)
        self._trainable = TrainableState(module)
        self._streams, self._buffers = TorchStreams(device), BufferState(module)
        parts = (self._streams, self._buffers)
        self.shards = ShardStates(spec.data.num_shards, rank, size, parts)
        self.buffers = BufferReducer(module, self.shards, spec.buffer_reduction)
        self._stateful = StatefulObjects({}, module, (optimizer,))
        self.is_sharded = any(map(is_sharded, module.parameters()))
        self._saved: dict[str, Any] = {}
        self._metric_states: list[Any] = []
        self._is_checked = False
        self.gradients: Mapping[str, torch.Tensor] = {}
        self.state = self._load()
        self.writer = CheckpointWriter(spec.store, spec.run, spec.checkpoints)

    def add_stateful(self, given: Mapping[str, Any]) -> None:
        """Also save the states of the user's objects, by param name."""
        self._stateful = StatefulObjects(given, self._module, (self._optimizer,))

    def stateful(self) -> dict[str, Any]:
        """Return the user's objects with a state, by name."""
        return dict(self._stateful.items())

    def restore(self) -> None:
        """Restore the saved state, overriding changes that callbacks made when training began."""
        saved, self._saved = self._saved, {}
        if not saved:
            return
        if "model" in saved:
            self._module.load_state_dict(sharded_weights(self._module, saved["model"]))
        # Training may have added groups and made parameters trainable.
        if "optimizer" in saved:
            restore_optimizer(self._optimizer, self._module, saved)
        self._trainable.restore(saved.get("requires_grad", {}))
        self.gradients = sharded_weights(self._module, saved.get("gradients", {}))
        self._stateful.restore(saved.get("held", {}))
        # Schedulers that are created when training begins set the learning rates of the first
        # epoch.
        groups = self._optimizer.param_groups
        for group, options in zip(groups, saved["options"], strict=False):
            group.update(options)
        buffers = saved["buffers"]
        if len(buffers) == self._spec.data.num_shards:
            self.shards.for_each(lambda shard: self._buffers.restore(buffers[shard]))
        self.buffers.start(saved.get("buffer_bases"))

    def restore_streams(self) -> None:
        """Restore each shard's random streams to their mid-epoch state."""
        assert self.state is not None
        random = self.state.random
        self.shards.for_each(lambda shard: self._streams.restore(random[shard]))

    def measured(self) -> list[dict[str, Any]]:
        """Return this rank's share of the interrupted epoch's metric sums and states.

        These are every ``size``-th of the saved ones: several if there are fewer ranks than before,
        and possibly none if there are more.
        """
        assert self.state is not None
        sums = self.state.parts["measures"]
        states = self._metric_states or [[] for _ in sums]
        partial = [{"sums": a, "metrics": b} for a, b in zip(sums, states, strict=True)]
        return partial[self._rank :: self._size]

    def save(
        self,
        batches: int,
        history: tuple[EpochMetrics, ...],
        output_shapes: Any,
        measured: Mapping[str, Any] | None,
        gradients: Mapping[str, torch.Tensor],
        stopped: bool = False,
    ) -> bool:
        """Save the run at a position in training. Called by all ranks.

        Parameters
        ----------
        batches : int
            Finished batches of the epoch after the history's.
        history : tuple of EpochMetrics
            Records of the finished epochs.
        output_shapes : list or None
            Shapes for `TrainResult.output_shapes`.
        measured : mapping or None
            This rank's metric sums and states of the epoch, see `MetricSums.state`.
        gradients : mapping
            Averaged gradients that wait for a step, by parameter name; equal on all ranks.
        stopped : bool
            Whether a callback has stopped training.

        Returns
        -------
        bool
            Whether the run was saved; the same on all ranks.
        """
        if self._spec.run.checkpoints_path is None:
            return False
        buffers = ShardBuffers(self._module, self.shards, self._non_persistent)
        own = measured, buffers.digests
        state, of_ranks = gather_state(
            self._spec, history, batches, self.shards, self._streams, exchange, own, stopped=stopped
        )
        of_measured, digests = zip(*of_ranks, strict=True)
        unequal = buffers.unequal(digests)
        position = Position(state.epoch, state.rows)
        content: dict[str, Any] = {}
        if self._rank == 0 or self.is_sharded:
            content = {
                "model": self._module.state_dict(),
                **optimizer_content(self._optimizer, self._module),
                "gradients": dict(gradients),
                "held": self._stateful.capture(),
            }
        files: tuple[TensorFile, ...] = ()
        if self.is_sharded:
            content, files = write_parts(self.writer, position, content)
        if self._rank != 0:
            return True
        self._check_optimizer(content["optimizer"])
        parts = {
            "output_shapes": output_shapes,
            "measures": [m["sums"] for m in of_measured if m is not None],
        }
        saved: Any = {**content, "buffers": unequal, "requires_grad": self._trainable.capture()}
        if batches:
            saved["metrics"] = [m["metrics"] for m in of_measured if m is not None]
            saved["buffer_bases"] = self.buffers.bases
            saved = snapshot(saved)
        state = replace(state, parts=parts)
        self.writer.save(
            *(state, lambda file: save_state(saved, file)), is_copy=batches > 0, files=files
        )
        return True

    def _check_optimizer(self, state: Any) -> None:
        """Check, at the first save, that a resumed run can load the optimizer's state."""
        if not self._is_checked and not is_loadable(to_python(state)):
            raise ParamError(
                f"optimizer: the state_dict() of {type(self._optimizer).__name__} holds more than "
                "tensors and plain values. Loading it from a checkpoint would run code from the "
                "file. Set an optimizer whose state_dict() holds tensors, numbers, strings, lists "
                "and dicts."
            )
        self._is_checked = True

    def _place(self, key: str, stored: StoredTensor) -> Any:
        """Return the replacement of a tensor in the ranks' files when a checkpoint is loaded."""
        if not self.is_sharded:
            return stored.whole()
        # Module and optimizer, which may not have all parameters yet, read their parts later.
        return stored_part(stored, next(self._module.parameters())) if key == "held" else stored

    def _load(self) -> RunState | None:
        """Load the run's newest checkpoint, if there is one. Called by all ranks."""
        spec, saved = self._spec, self._saved

        def load(file: IO[bytes]) -> None:
            folder = spec.run.checkpoints_path or ""
            saved.update(with_tensors(load_state(file), spec.store, folder, self._place))
            self._module.load_state_dict(sharded_weights(self._module, saved["model"]))
            self._metric_states = saved.pop("metrics", [])
            sizes = [len(group["params"]) for group in self._optimizer.param_groups]
            # Otherwise a callback may add the missing groups or parameters when training begins.
            if sizes == list(map(len, saved["groups"])):
                load_optimizer_state(self._optimizer, saved.pop("optimizer"))

        return restore(spec.store, spec.run, exchange, self._rank, load)
