"""What a torch rank adds to a run's checkpoint, and takes from it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from hvd_estimators._util.to_python import to_python
from hvd_estimators.torch.collectives import exchange
from hvd_estimators.torch.shard_state import BufferState
from hvd_estimators.training.shard_state import ShardStates, capture_by_shard, of_shards

__all__ = [
    "ShardBuffers",
    "load_file",
    "non_persistent_buffers",
    "save_file",
    "snapshot",
]


def save_file(saved: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write tensors and plain values as ``torch.save`` does, so that `load_file` takes them.

    An optimizer's options may be NumPy's scalars, which it would refuse.
    """
    torch.save(to_python(saved), file)


def load_file(file: IO[bytes]) -> dict[str, Any]:
    """Return what `save_file` wrote, on the CPU; runs no code from the file."""
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return saved


def snapshot(value: Any, memo: dict[Any, torch.Tensor] | None = None) -> Any:
    """Return a copy on the CPU of the tensors in a value, of its dicts, lists and tuples.

    Tensors that are one in memory, such as weights that layers share, are one in the copy.
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
        # With what is noted on it, as Module.state_dict() notes versions of layers.
        made = copy.copy(value)
        made.update((key, snapshot(entry, memo)) for key, entry in value.items())
        return made
    if type(value) in (list, tuple):
        return type(value)(snapshot(entry, memo) for entry in value)
    return value


def non_persistent_buffers(module: torch.nn.Module) -> dict[str, bytes]:
    """Return digests of the buffers that a module's ``state_dict()`` leaves out, by name."""
    saved = module.state_dict().keys()
    return {n: _digest(value) for n, value in module.named_buffers() if n not in saved}


class ShardBuffers:
    """The buffers of the shards that a rank plays, at one moment.

    Parameters
    ----------
    module : torch.nn.Module
        Has them.
    shards : ShardStates
        The shards.
    fleeting : mapping
        What `non_persistent_buffers` returned when training began: of those buffers, too, what has
        changed since is saved.

    Attributes
    ----------
    digests : mapping
        Shard to digests of its buffers by name; what `unequal` wants of all ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shards: ShardStates,
        fleeting: Mapping[str, bytes] | None = None,
    ) -> None:
        self._shards = shards
        self._fleeting = fleeting or {}
        # A rank that plays several has one module for them.
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
        """Return those that differ, by shard, given the digests of all ranks. Called by all."""
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
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()
