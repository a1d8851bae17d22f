"""Frozen weights that stay in the files of ``init_weights``, for ``only_trainable``.

Ranks read them once. Checkpoints, broadcasts and the fitted model have the other weights, and the
fitted model names the files.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.collectives import current, exchange
from hvd_estimators.torch.sharding import is_sharded, local_part, stored_part
from hvd_estimators.torch.stored_weights import StoredWeights, refer_to_base, stored_weights


class FrozenBase:
    """Lets a module's ``state_dict()`` leave frozen weights out, and loading need none.

    Runs on the ranks. Callbacks see a ``state_dict()`` of the other weights, too.

    Parameters
    ----------
    module : torch.nn.Module
        The module, not compiled.
    weights : StoredWeights
        The files.
    """

    def __init__(self, module: torch.nn.Module, weights: StoredWeights) -> None:
        self._weights = weights
        named = module.named_parameters()
        self._names = frozenset(
            name for name, value in named if name in weights.names and not value.requires_grad
        )
        leave_out: Any = functools.partial(_leave_out, self._names)
        ignore_missing: Any = functools.partial(_ignore_missing, self._names)
        self._hooks = [
            module.register_state_dict_post_hook(leave_out),
            module.register_load_state_dict_post_hook(ignore_missing),
        ]

    def check(self, module: torch.nn.Module) -> None:
        """Compare the frozen weights, or the ranks' parts of them, with the files.

        Called by all ranks, so that none waits for one that has failed.

        Raises
        ------
        ParamError
            If training has changed one.
        """
        for name in exchange.gather(self._changed(module), "frozen_weights"):
            if name is not None:
                raise ParamError(
                    f"training has changed {name!r}, which requires no gradient, and the fitted "
                    "model would not have the change. Leave only_trainable out.",
                    param="only_trainable",
                )

    def _changed(self, module: torch.nn.Module) -> str | None:
        """Return the name of a frozen weight that differs from the files; None if none does."""
        parameters = {n: p for n, p in module.named_parameters() if n in self._names}
        if current().rank and not any(map(is_sharded, parameters.values())):
            return None  # rank 0 has the same
        reader = self._weights.reader(mapped=True)
        for name, value in parameters.items():
            stored: Any = reader.stored(self._weights.names[name])
            begun = stored_part(stored, value) if is_sharded(value) else stored.whole()
            if not _are_same(local_part(value), local_part(begun)):
                return name
        return None

    def remove(self, module: torch.nn.Module) -> None:
        """Drop the frozen weights, and let the module refer to the files."""
        for hook in self._hooks:
            hook.remove()
        refer_to_base(module, self._weights)


def _leave_out(
    names: frozenset[str],
    module: torch.nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
) -> None:
    for name, value in module.named_parameters():
        if name in names and value.requires_grad:
            raise ParamError(
                f"the parameter {name!r} was frozen when the function made the model, and now "
                "requires gradients. Let the function make it trainable, or leave it frozen.",
                param="only_trainable",
            )
    for name in names:
        state.pop(prefix + name, None)


def _ignore_missing(names: frozenset[str], module: torch.nn.Module, keys: Any) -> None:
    # A compiled module's names have a prefix.
    missing = [name for name in keys.missing_keys if name.removeprefix("_orig_mod.") not in names]
    keys.missing_keys[:] = missing


def _are_same(value: torch.Tensor, begun: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, after a conversion to the type of one."""
    found, expected = (
        each.detach().to(value.dtype).cpu().contiguous().reshape(-1).view(torch.uint8)
        for each in (value, begun)
    )
    return torch.equal(found, expected)


def frozen_base(module: torch.nn.Module) -> FrozenBase | None:
    """Return the base of a module that a rank has received, before it reads the weights.

    None without ``only_trainable``.
    """
    weights = stored_weights(module)
    return FrozenBase(module, weights) if weights is not None and weights.is_base else None
