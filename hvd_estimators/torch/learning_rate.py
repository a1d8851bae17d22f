"""Optimizers on ranks: learning rate scaling, optimizer modes, and the first-order check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError


class StepRate:
    """Scaling of an optimizer's learning rates that is active only while the optimizer steps.

    Schedulers, callbacks, loggers and checkpoints always see the unscaled rates. A run can
    therefore be resumed with another number of ranks.

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
        # A step() that calls the base class's step() is a step within a step.
        self._depth = 0
        self._hooks: list[Any] = []
        if scale != 1:
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self._enter()),
                optimizer.register_step_post_hook(lambda *_: self._leave()),
            ]

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Show the unscaled rates inside a step, for the step's closure."""
        if not self._raised:
            yield
            return
        self._lower()
        yield
        self._raise()

    def remove(self) -> None:
        """Remove the hooks from the optimizer, and restore the unscaled rates."""
        self._lower()
        for hook in self._hooks:
            hook.remove()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._raise()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._lower()

    def _raise(self) -> None:
        for group in self._optimizer.param_groups:
            if "lr" in group:
                given = group["lr"]
                group["lr"] = given * self._scale
                self._raised.append((group, given, group["lr"]))

    def _lower(self) -> None:
        for group, given, raised in self._raised:
            # Restore an unchanged rate instead of dividing: (0.1 * 3) / 3 is not 0.1.
            group["lr"] = given if group["lr"] is raised else group["lr"] / self._scale
        self._raised.clear()


def set_optimizer_mode(optimizer: torch.optim.Optimizer, training: bool) -> None:
    """Set an optimizer with two modes to training or evaluation.

    Schedule-free optimizers have ``train()`` and ``eval()``, which change the parameters. Other
    optimizers have neither and are not changed.
    """
    train, evaluate = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
    if callable(train) and callable(evaluate):
        (train if training else evaluate)()


def check_first_order(optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer that differentiates gradients: a mean over ranks has no graph.

    Raises
    ------
    ParamError
        If the optimizer has ``is_second_order`` set, as timm's Adahessian does.
    """
    if getattr(optimizer, "is_second_order", False):
        raise ParamError(
            f"optimizer: {type(optimizer).__name__} differentiates gradients, and gradients that "
            "were averaged over ranks cannot be differentiated. Set an optimizer that uses first "
            "derivatives only."
        )
