"""What a torch rank adds to a run's checkpoint, and takes from it."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from hvd_estimators.plain import plain
from hvd_estimators.torch.objects import exchange
from hvd_estimators.torch.shards import BufferState
from hvd_estimators.training.randomness import captured, of_shards
from hvd_estimators.training.shards import ShardStates

__all__ = [
    "callback_states",
    "load_file",
    "restore_callbacks",
    "save_file",
    "unequal_buffers",
]

logger = logging.getLogger(__name__)


def save_file(saved: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write tensors and plain values as ``torch.save`` does, so that `load_file` takes them.

    An optimizer's options may be NumPy's scalars, which it would refuse.
    """
    torch.save(plain(saved), file)


def load_file(file: IO[bytes]) -> dict[str, Any]:
    """Return what `save_file` wrote, on the CPU; runs no code from the file."""
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return saved


def unequal_buffers(
    module: torch.nn.Module, shards: ShardStates
) -> list[Mapping[str, torch.Tensor]]:
    """Return the buffers of each shard that are not the same for all of them. Called by all ranks.

    Each counts its own rows in them: batch normalization does, until an epoch is over.

    Parameters
    ----------
    module : torch.nn.Module
        Tells which buffers are saved.
    shards : ShardStates
        The shards that this rank plays.
    """
    # A rank that plays several has one module for them.
    copies = BufferState(module).capture
    own = captured(shards, copies if shards.passes > 1 else lambda: dict(module.named_buffers()))
    saved = module.state_dict().keys()
    digests = {
        shard: {name: _digest(value) for name, value in buffers.items() if name in saved}
        for shard, buffers in own.items()
    }
    gathered = of_shards(exchange.gather(digests, "checkpoint.digests"), shards.num_shards)
    unequal = [name for name in gathered[0] if len({found[name] for found in gathered}) > 1]
    if not unequal:
        return [{} for _ in gathered]
    needed = {
        shard: {name: buffers[name].cpu() for name in unequal} for shard, buffers in own.items()
    }
    return list(of_shards(exchange.gather(needed, "checkpoint.buffers"), shards.num_shards))


def callback_states(callbacks: Sequence[Any]) -> list[Any]:
    """Return what the ``state_dict()`` of each callback gives; None for one that has none.

    What is neither tensors nor plain values is left out with a warning: nobody would load it.
    """
    states: list[Any] = []
    for callback in callbacks:
        state = callback.state_dict() if _has_state(callback) else None
        if state is not None and not _loads(state):
            logger.warning(
                "callbacks: what %s.state_dict() returns holds more than tensors and plain values. "
                "It is not kept: a resumed run begins without it.",
                type(callback).__name__,
            )
            state = None
        states.append(state)
    return states


def restore_callbacks(callbacks: Sequence[Any], states: Sequence[Any]) -> None:
    """Give each callback the state back that it had."""
    for callback, state in zip(callbacks, states, strict=False):
        if state is not None and _has_state(callback):
            callback.load_state_dict(state)


def _has_state(callback: Any) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _loads(state: Any) -> bool:
    file = io.BytesIO()
    try:
        save_file({"state": state}, file)
        file.seek(0)
        load_file(file)
    except Exception as error:
        logger.debug("A callback's state cannot be loaded", exc_info=error)
        return False
    return True


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()
