"""Per-shard state of a torch rank: random streams and buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvd_estimators.torch.collectives import (
    batch_norm_statistics,
    bits_of,
    current,
    exchange,
    reduce_group,
)
from hvd_estimators.training.shard_state import (
    HostStreams,
    ShardStates,
    capture_by_shard,
    find_buffers,
    merge_by_shard,
)
from hvd_estimators.training.spec import array_digest, named_weights

logger = logging.getLogger(__name__)


class TorchStreams(HostStreams):
    """Global random generators of Python, NumPy and torch, including the rank's device.

    Parameters
    ----------
    device : torch.device
        The device that the rank trains on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self) -> dict[str, Any]:
        """Return the states as plain values, for a checkpoint."""
        state = {**super().capture(), "torch": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the states from `capture`, possibly on another kind of device."""
        super().restore(state)
        torch.set_rng_state(torch.from_numpy(state["torch"]))
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]), self._device)


class BufferState:
    """Buffers of a module: statistics of batch normalization, counts, averages.

    Parameters
    ----------
    module : torch.nn.Module
        The trained module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def capture(self) -> dict[str, torch.Tensor]:
        """Return copies of the buffers."""
        return {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def restore(self, state: Any) -> None:
        """Set the buffers, in place, to the values from `capture`."""
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in state and state[name].shape == buffer.shape:
                    buffer.copy_(state[name])

    def changed(self, state: Any) -> dict[Any, Any]:
        """Return copies of the buffers that differ from a state, by name."""
        return {
            name: buffer.detach().clone()
            for name, buffer in self._module.named_buffers()
            if name not in state or not _are_same(buffer, state[name])
        }


def _are_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors have the same shape and bits, on any devices."""
    bits = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (first, second)]
    return first.shape == second.shape and torch.equal(bits[0], bits[1].to(first.device))


def non_persistent_buffers(module: torch.nn.Module) -> dict[str, bytes]:
    """Return digests of the buffers that a module's ``state_dict()`` omits, by name."""
    saved = module.state_dict().keys()
    return {n: _digest(value) for n, value in module.named_buffers() if n not in saved}


class TrainableState:
    """Parameters whose ``requires_grad`` training has changed.

    Parameters
    ----------
    module : torch.nn.Module
        The module before training.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before = {name: p.requires_grad for name, p in module.named_parameters()}

    def capture(self) -> dict[str, bool]:
        """Return ``requires_grad`` of the parameters that training has added or changed."""
        return {
            name: p.requires_grad
            for name, p in self._module.named_parameters()
            if p.requires_grad is not self._before.get(name)
        }

    def restore(self, state: Mapping[str, bool]) -> None:
        """Set ``requires_grad`` as `capture` returned it."""
        for name, parameter in self._module.named_parameters():
            if name in state:
                parameter.requires_grad_(state[name])


class ShardBuffers:
    """Buffers of the shards that a rank runs, at one moment.

    Parameters
    ----------
    module : torch.nn.Module
        Module with the buffers.
    shards : ShardStates
        The shards.
    initial : mapping
        `non_persistent_buffers` result from the start of training. Of these buffers, too, changed
        ones are saved.

    Attributes
    ----------
    digests : mapping
        Shard to digests of its buffers by name. `unequal` needs the digests of all ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shards: ShardStates,
        initial: Mapping[str, bytes] | None = None,
    ) -> None:
        self._shards = shards
        self._initial = initial or {}
        # A rank with several virtual shards has only one module.
        copies = BufferState(module).capture
        self._own = capture_by_shard(
            shards, copies if shards.passes > 1 else lambda: dict(module.named_buffers())
        )
        saved = module.state_dict().keys() | self._initial.keys()
        self.digests = {
            shard: {name: _digest(value) for name, value in buffers.items() if name in saved}
            for shard, buffers in self._own.items()
        }

    def unequal(
        self, gathered: Sequence[Mapping[int, Mapping[str, bytes]]]
    ) -> list[Mapping[str, torch.Tensor]]:
        """Return differing buffers by shard, from the digests of all ranks. Called by all ranks."""
        shards = self._shards
        digests = merge_by_shard(gathered, shards.num_shards)
        needed = [
            name
            for name, first in digests[0].items()
            if any(of_shard[name] != self._initial.get(name, first) for of_shard in digests)
        ]
        if not needed:
            return [{} for _ in digests]
        own = {
            shard: {name: buffers[name].cpu() for name in needed}
            for shard, buffers in self._own.items()
        }
        return list(merge_by_shard(exchange.gather(own, "checkpoint.buffers"), shards.num_shards))


class BufferReducer:
    """Reduction of buffers over the shards, at the end of an epoch and before validation.

    Running statistics of batch normalization become their mean. Other buffers remain local to each
    rank. ``buffer_reduction`` sets another reduction for the buffers that it names. All ranks must
    call all methods.

    Parameters
    ----------
    module : torch.nn.Module
        The trained module.
    shards : ShardStates
        The shards that the rank runs.
    reductions : mapping
        The value of ``buffer_reduction``.

    Attributes
    ----------
    bases : dict
        Values of the summed buffers at their last reduction, by name. A sum counts the additions of
        each shard since then.
    """

    def __init__(
        self, module: torch.nn.Module, shards: ShardStates, reductions: Mapping[str, str]
    ) -> None:
        self._module = module
        self._shards = shards
        self._reductions = reductions
        self.bases: dict[str, torch.Tensor] = {}
        self._has_started = False
        self._compared = shards.num_shards == 1

    def start(self, bases: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start from the current buffers, or within an epoch from the saved bases."""
        self._has_started = True
        self.bases = {
            name: (bases or {}).get(name, buffer).detach().cpu().clone()
            for name, buffer, reduction in self._reduced()
            if reduction == "sum"
        }

    def reduce(self) -> None:
        """Set the buffers of all shards to the reduced values, once training has started."""
        if not self._has_started:
            return
        if not self._compared:
            self._compared = True
            self._warn_of_unequal()
        self._shards.enter(0)
        reductions = {name: reduction for name, _, reduction in self._reduced()}
        own: dict[str, torch.Tensor] = {}

        def combine(shard: int) -> None:
            for name, buffer, reduction in self._reduced():
                value = _in_64_bits(buffer)
                if name in self.bases:
                    value = value - _in_64_bits(self.bases[name])
                if reduction == "rank0" and shard:
                    value = torch.zeros_like(value)
                own[name] = _COMBINE[reduction](own[name], value) if name in own else value

        self._shards.for_each(combine)
        if current().size > 1:
            for operation in ("sum", "max", "min"):
                group = [own[name] for name in own if _operation(reductions[name]) == operation]
                reduce_group(group, operation, f"buffers.{operation}")
        for name, value in own.items():
            if name in self.bases:
                own[name] = value + _in_64_bits(self.bases[name])
            elif reductions[name] == "mean":
                own[name] = value / self._shards.num_shards

        def set_reduced(shard: int) -> None:
            for name, buffer, _ in self._reduced():
                value = own[name]
                if not (buffer.is_floating_point() or buffer.is_complex()):
                    value = value.round()
                buffer.copy_(torch.view_as_complex(value) if buffer.is_complex() else value)

        with torch.no_grad():
            self._shards.for_each(set_reduced)
        self.start()

    def _reduced(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield name, buffer and reduction of the buffers that are reduced."""
        statistics = set(map(id, batch_norm_statistics(self._module)))
        # Layers and their buffers may be made when training begins.
        given = reductions_of(self._module, self._reductions)
        for name, buffer in self._module.named_buffers():
            reduction = given.get(name, "mean" if id(buffer) in statistics else None)
            if reduction is not None and not is_lazy(buffer):
                yield name, buffer, reduction

    def _warn_of_unequal(self) -> None:
        """Warn, on rank 0, about buffers that differ between the shards and are not reduced."""
        own = ShardBuffers(self._module, self._shards).digests
        first, *others = merge_by_shard(exchange.gather(own, "buffers"), self._shards.num_shards)
        reduced = {name for name, _, _ in self._reduced()}
        unequal = [
            name
            for name in first.keys() - reduced
            # Batch normalization does not count the steps in which a rank has no rows.
            if not name.endswith("num_batches_tracked")
            and any(of_shard.get(name) != first[name] for of_shard in others)
        ]
        if unequal and current().rank == 0:
            logger.warning(
                "model: the ranks have different values of %s, because each computes them from its "
                "own rows. The model that fit() returns has rank 0's. Set "
                "buffer_reduction={%r: 'sum'}, or 'mean', 'max' or 'min', to combine them; 'rank0' "
                "gives all ranks the values of rank 0.",
                named_weights(sorted(unequal)),
                min(unequal),
            )


_COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "rank0": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reductions_of(module: torch.nn.Module, reductions: Mapping[str, str]) -> dict[str, str]:
    """Return the reduction of each buffer of a module by name, see `find_buffers`."""
    if not reductions:
        return {}
    kinds = {name: _kind(buffer) for name, buffer in module.named_buffers()}
    return find_buffers(reductions, kinds)


def _kind(buffer: torch.Tensor) -> str:
    if buffer.is_complex():
        return "complex"
    if buffer.dtype == torch.bool:
        return "bool"
    return "float" if buffer.is_floating_point() else "int"


def _in_64_bits(buffer: torch.Tensor) -> torch.Tensor:
    value = buffer.detach().cpu()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    # A copy, because the buffer gets the values of the rank's next shard.
    return value.to(torch.float64 if value.is_floating_point() else torch.int64, copy=True)


def _operation(reduction: str) -> str:
    return reduction if reduction in ("max", "min") else "sum"


def _digest(tensor: torch.Tensor) -> bytes:
    return array_digest(bits_of(tensor))
