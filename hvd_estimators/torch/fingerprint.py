"""Fingerprints of torch modules and optimizers, without weights and state.

Runs on the driver.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvd_estimators.fitting.fingerprint import named
from hvd_estimators.torch.serialization import plain_module

__all__ = ["model_fingerprint"]


def model_fingerprint(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, other_rate: bool
) -> dict[str, Any]:
    """Return the fingerprint: layers, shapes of weights, and the optimizer's options.

    Parameters
    ----------
    module : torch.nn.Module
        The model. A compiled module has the fingerprint of the original module.
    optimizer : torch.optim.Optimizer or None
        None if the module creates the optimizer on the ranks.
    other_rate : bool
        Whether a param replaces the optimizer's learning rate.
    """
    module = plain_module(module)
    identity: dict[str, Any] = {
        "class": named(type(module)),
        # Remove memory addresses, which may appear for functions among a module's attributes.
        "layers": re.sub(r" at 0x[0-9a-f]+", "", repr(module)),
        "weights": [
            [name, None if is_lazy(value) else list(value.shape), str(value.dtype)]
            for name, value in module.state_dict().items()
            if isinstance(value, torch.Tensor)
        ],
    }
    if optimizer is not None:
        # The param that replaces the optimizer's rate is one of the run settings.
        left_out = {"params", "initial_lr"} | ({"lr"} if other_rate else set())
        identity["optimizer"] = named(type(optimizer))
        identity["options"] = {
            f"group {number}": {
                key: named(_number(value)) for key, value in group.items() if key not in left_out
            }
            for number, group in enumerate(optimizer.param_groups)
        }
    return identity


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
