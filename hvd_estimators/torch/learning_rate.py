"""The learning rate of a step: that of one rank, multiplied by the number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["StepRate"]


class StepRate:
    """Multiplies an optimizer's learning rates while it steps, and only then.

    Schedulers, callbacks, loggers and checkpoints see the rates that the user gave, whatever sets
    them, so that a run can be resumed with another number of ranks.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer.
    scale : int
        The factor, usually the number of ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scale: int) -> None:
        self._optimizer = optimizer
        self._scale = scale
        self._raised: list[tuple[dict[str, Any], Any, Any]] = []
        self._hooks: list[Any] = []
        if scale != 1:
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self._raise()),
                optimizer.register_step_post_hook(lambda *_: self._lower()),
            ]

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Show the rates as they were given, inside of a step: for its closure."""
        if not self._raised:
            yield
            return
        self._lower()
        yield
        self._raise()

    def remove(self) -> None:
        """Take the hooks off the optimizer, and leave it with the rates as they were given."""
        self._lower()
        for hook in self._hooks:
            hook.remove()

    def _raise(self) -> None:
        for group in self._optimizer.param_groups:
            if "lr" in group:
                given = group["lr"]
                group["lr"] = given * self._scale
                self._raised.append((group, given, group["lr"]))

    def _lower(self) -> None:
        for group, given, raised in self._raised:
            # Not divided where nobody changed it: (0.1 * 3) / 3 is not 0.1.
            group["lr"] = given if group["lr"] is raised else group["lr"] / self._scale
        self._raised.clear()
