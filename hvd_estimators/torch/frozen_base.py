"""Modules whose frozen weights a function makes again, so files hold the other weights alone.

With ``only_trainable``, `remember_function` records the function that made a module. A pickled
module is then the function, with the weights and buffers that training may change. Loading it calls
the function, and compares the frozen weights by a digest. Used on the driver, on ranks and by
predictors. The modules here are plain ones, see `plain_module`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.training.horovod_session import seeded
from hvd_estimators.training.spec import combined_digest, weight_digest


@dataclass(frozen=True)
class FrozenBase:
    """Function that makes a module with its frozen weights.

    Attributes
    ----------
    function : callable
        Returns the module.
    arguments : mapping
        Keyword arguments of the function.
    seed : int or None
        Seed of its random numbers.
    digest : str
        Digest of the frozen weights.
    """

    function: Callable[..., torch.nn.Module]
    arguments: Mapping[str, Any]
    seed: int | None
    digest: str = ""

    def make(self) -> torch.nn.Module:
        """Return a new module."""
        with seeded(self.seed):
            return self.function(**self.arguments)


# Without a `FrozenBase`, the frozen weights are in files, see `stored_weights`.
_BASES: weakref.WeakKeyDictionary[torch.nn.Module, tuple[FrozenBase | None, frozenset[str]]]
_BASES = weakref.WeakKeyDictionary()


def remember_function(
    module: torch.nn.Module,
    function: Callable[..., torch.nn.Module],
    arguments: Mapping[str, Any],
    seed: int | None,
) -> FrozenBase:
    """Record the function that has just made a module, and return it with the digest."""
    named = module.named_parameters(remove_duplicate=False)
    frozen = frozenset(name for name, value in named if not value.requires_grad)
    base = FrozenBase(function, arguments, seed, _digest(module, frozen))
    _BASES[module] = base, frozen
    return base


def remember_files(module: torch.nn.Module, names: Collection[str]) -> None:
    """Record that files have some parameters of a module; the frozen ones are not kept."""
    named = module.named_parameters()
    frozen = frozenset(n for n, value in named if n in names and not value.requires_grad)
    _BASES[module] = None, frozen


def leaves_out_frozen(module: torch.nn.Module) -> bool:
    """Return whether the files of a module lack its frozen weights."""
    return module in _BASES


def _digest(module: torch.nn.Module, names: frozenset[str]) -> str:
    """Return the digest of some parameters."""
    return combined_digest(
        {
            name: weight_digest(
                value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            )
            for name, value in module.named_parameters()
            if name in names
        }
    )


def base_of(module: torch.nn.Module) -> FrozenBase | None:
    """Return the function that makes a module again; None for a module that is pickled whole."""
    return _BASES[module][0] if module in _BASES else None


def parts_of(module: torch.nn.Module) -> dict[int, tuple[torch.nn.Module, str]]:
    """Return module and name of each layer, parameter and buffer by id, if a function makes it."""
    if base_of(module) is None:
        return {}
    parts = (module.named_modules, module.named_parameters, module.named_buffers)
    return {id(part): (module, name) for named in parts for name, part in named()}


def pickled(module: torch.nn.Module) -> tuple[FrozenBase, dict[str, Any]]:
    """Return the function of a module and its `kept_weights`, from which `remade` makes it.

    Raises
    ------
    ParamError
        If a frozen weight has changed since the function made the module.
    """
    base, names = _BASES[module]
    assert base is not None
    if _digest(module, names) != base.digest:
        raise ParamError(
            "model: its frozen weights have changed since the function made it with "
            "only_trainable. Set copy.deepcopy(model), which is saved whole."
        )
    return base, kept_weights(module)


def kept_weights(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's ``state_dict()`` without the weights that a function makes again."""
    state: dict[str, Any] = module.state_dict()
    if module in _BASES:
        _leave_out_frozen(module, state)
    return state


def remade(base: FrozenBase, module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load `kept_weights` into a module that the function has made again, and remember this.

    Raises
    ------
    ParamError
        If the function has made other frozen weights, or another module.
    """
    found = remember_function(module, base.function, base.arguments, base.seed)
    if found.digest != base.digest or kept_weights(module).keys() != weights.keys():
        raise ParamError(
            "model: the function has made other frozen weights, or other layers, than for the fit. "
            "Let the function load them from a file that does not change, which every machine can "
            "read."
        )
    module.load_state_dict(weights, strict=False)


def keep_only_trainable(module: torch.nn.Module) -> None:
    """Let ``state_dict()`` leave the frozen weights out, and ``load_state_dict()`` need none.

    Runs on the ranks, so a checkpoint, a callback and a broadcast see the other weights only.
    """
    if module in _BASES:
        module.register_state_dict_post_hook(_leave_out_frozen)
        module.register_load_state_dict_post_hook(_ignore_frozen)


def _frozen(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of weights that files lack; none for a trained module on the driver."""
    return _BASES[module][1] if module in _BASES else frozenset()


def _leave_out_frozen(
    module: torch.nn.Module, state: dict[str, Any], prefix: str = "", metadata: Any = None
) -> None:
    names = _frozen(module)
    for name, value in module.named_parameters():
        if name in names and value.requires_grad:
            raise ParamError(
                f"only_trainable: the parameter {name!r} was frozen when the function made the "
                "model, and now requires gradients. Let the function make it trainable, or leave "
                "it frozen."
            )
    for name in names:
        state.pop(prefix + name, None)


def _ignore_frozen(module: torch.nn.Module, keys: Any) -> None:
    names = _frozen(module)
    # A compiled module's names have a prefix.
    missing = [name for name in keys.missing_keys if name.removeprefix("_orig_mod.") not in names]
    keys.missing_keys[:] = missing


def check_frozen(module: torch.nn.Module, digests: Mapping[str, str]) -> None:
    """Check that training has not changed the frozen weights, by the digests of all weights.

    Raises
    ------
    ParamError
        If training has changed one.
    """
    if module in _BASES:
        base, names = _BASES[module]
        frozen = {name: digest for name, digest in digests.items() if name in names}
        # Ranks that hold parts have no digests of whole weights.
        if base is not None and frozen and combined_digest(frozen) != base.digest:
            raise ParamError(
                "only_trainable: training has changed parameters that require no gradients, which "
                "the fitted model would not have. Leave only_trainable out."
            )
