"""Torch-specific contents of a run's checkpoint: files, copies, and buffers of shards."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from hvd_estimators._util.to_python import to_python
from hvd_estimators.torch.collectives import bits_of, exchange
from hvd_estimators.torch.shard_state import BufferState
from hvd_estimators.training.shard_state import ShardStates, capture_by_shard, of_shards
from hvd_estimators.training.spec import array_digest

__all__ = [
    "ShardBuffers",
    "load_file",
    "non_persistent_buffers",
    "save_file",
    "snapshot",
]


def save_file(saved: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write tensors and plain values with ``torch.save``, for `load_file`.

    NumPy scalars, which an optimizer's options may hold, are converted: `load_file` would reject
    them.
    """
    torch.save(to_python(saved), file)


def load_file(file: IO[bytes]) -> dict[str, Any]:
    """Load a file that `save_file` wrote, on the CPU. Runs no code from the file."""
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return saved


def snapshot(value: Any, memo: dict[Any, torch.Tensor] | None = None) -> Any:
    """Return a copy of a value's dicts, lists and tuples, with copies of its tensors on the CPU.

    Tensors that share memory, such as tied weights of layers, share memory in the copy.
    """
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return value.detach().to("cpu", copy=True)
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if place not in memo or not value.numel():
            memo[place] = value.detach().to("cpu", copy=True)
        return memo[place]
    if isinstance(value, dict):
        # copy.copy keeps attributes, such as the versions of layers on Module.state_dict().
        made = copy.copy(value)
        made.update((key, snapshot(entry, memo)) for key, entry in value.items())
        return made
    if type(value) in (list, tuple):
        return type(value)(snapshot(entry, memo) for entry in value)
    return value


def non_persistent_buffers(module: torch.nn.Module) -> dict[str, bytes]:
    """Return digests of the buffers that a module's ``state_dict()`` omits, by name."""
    saved = module.state_dict().keys()
    return {n: _digest(value) for n, value in module.named_buffers() if n not in saved}


class ShardBuffers:
    """Buffers of the shards that a rank runs, at one moment.

    Parameters
    ----------
    module : torch.nn.Module
        Module with the buffers.
    shards : ShardStates
        The shards.
    fleeting : mapping
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
        fleeting: Mapping[str, bytes] | None = None,
    ) -> None:
        self._shards = shards
        self._fleeting = fleeting or {}
        # A rank with several virtual shards has only one module.
        copies = BufferState(module).capture
        self._own = capture_by_shard(
            shards, copies if shards.passes > 1 else lambda: dict(module.named_buffers())
        )
        kept = module.state_dict().keys() | self._fleeting.keys()
        self.digests = {
            shard: {name: _digest(value) for name, value in buffers.items() if name in kept}
            for shard, buffers in self._own.items()
        }

    def unequal(
        self, gathered: Sequence[Mapping[int, Mapping[str, bytes]]]
    ) -> list[Mapping[str, torch.Tensor]]:
        """Return differing buffers by shard, from the digests of all ranks. Called by all ranks."""
        shards = self._shards
        found = of_shards(gathered, shards.num_shards)
        needed = [
            name
            for name, first in found[0].items()
            if any(of_shard[name] != self._fleeting.get(name, first) for of_shard in found)
        ]
        if not needed:
            return [{} for _ in found]
        own = {
            shard: {name: buffers[name].cpu() for name in needed}
            for shard, buffers in self._own.items()
        }
        return list(of_shards(exchange.gather(own, "checkpoint.buffers"), shards.num_shards))


def _digest(tensor: torch.Tensor) -> bytes:
    return array_digest(bits_of(tensor))
