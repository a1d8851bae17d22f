"""The learning rate of a run: the user's for one rank, multiplied by the number of ranks."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LearningRate"]


class LearningRate:
    """Scales an optimizer's learning rates, once, and gives back its state unscaled.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its rates are multiplied at once.
    scale : int
        The factor, usually the number of ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scale: int) -> None:
        self._optimizer = optimizer
        self._scale = scale
        self._given = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * scale
        self._scaled = [group["lr"] for group in optimizer.param_groups if "lr" in group]

    def unscaled_state(self) -> dict[str, Any]:
        """Return the optimizer's ``state_dict()`` with the learning rates of one rank."""
        state = self._optimizer.state_dict()
        groups = [group for group in state["param_groups"] if "lr" in group]
        for group, given, scaled in zip(groups, self._given, self._scaled, strict=True):
            # Not divided where nobody changed it: (0.1 * 3) / 3 is not 0.1.
            group["lr"] = given if group["lr"] == scaled else group["lr"] / self._scale
        return state
