"""Callbacks of the torch trainer: their methods, the check of these, and early stopping.

The driver checks callbacks, and each rank calls its own copies.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.sharding import sharded_weights
from hvd_estimators.training.spec import EpochMetrics, check_monitor, measured, mode_of, monitored

MONITOR = "monitor of EarlyStopping"
"""Name of the setting in messages."""

_HOOKS: dict[str, tuple[str, ...]] = {
    "on_train_begin": ("module", "optimizer"),
    "on_epoch_begin": ("epoch",),
    "on_epoch_end": ("epoch", "logs"),
    "on_train_end": (),
}
"""Callback methods, and the keyword arguments of their calls."""


class EarlyStopping:
    """Callback that ends training when a metric has stopped improving.

    All ranks see the same metrics, so they stop together. A resumed run continues to count where it
    was interrupted, and a run that was stopped trains no further.

    Parameters
    ----------
    monitor : str, optional
        Name of the metric, such as ``"val_loss"``. Default: ``val_loss``, or ``loss`` without
        validation.
    patience : int
        Number of epochs without improvement after which training ends, at least 1.
    min_delta : float
        Minimum change that counts as an improvement.
    mode : {"auto", "min", "max"}
        Whether lower or higher values are better. ``"auto"`` infers it from the metric's name.
    restore_best : bool
        Whether the trained model gets the weights of the best epoch. Its optimizer keeps its state.
        The weights are kept in memory and in each checkpoint.

    Attributes
    ----------
    best : float or None
        Best value so far.
    best_epoch : int or None
        Epoch of the best value, from 0.
    stopped_epoch : int or None
        Epoch after which training was stopped.

    Raises
    ------
    ParamError
        If an argument is invalid, or if the metric is not measured.
    """

    def __init__(
        self,
        monitor: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "auto",
        restore_best: bool = False,
    ) -> None:
        epochs: Any = patience
        delta: Any = min_delta
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ParamError(f"patience: expected 1 or more epochs, found {patience!r}.")
        if not isinstance(delta, (int, float)) or not 0 <= delta < math.inf:
            raise ParamError(f"min_delta: expected 0 or more, found {min_delta!r}.")
        if mode not in ("auto", "min", "max"):
            raise ParamError(f"mode: expected 'auto', 'min' or 'max', found {mode!r}.")
        if mode == "auto" and monitor is not None:
            mode_of(monitor, mode, "mode")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.restore_best = restore_best
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.stopped_epoch: int | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._module: torch.nn.Module | None = None

    def on_train_begin(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep a reference to the module."""
        self._module = module

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Compare the epoch with the best one; raise StopIteration to end training."""
        values = measured(EpochMetrics(epoch, logs["train"], logs.get("validation")))
        check_monitor(self.monitor or "loss", values, MONITOR)
        name = monitored(self.monitor, values)
        assert name is not None
        if self._improves(values[name], mode_of(name, self.mode, "mode")):
            self.best, self.best_epoch = values[name], epoch
            if self.restore_best and self._module is not None:
                state = self._module.state_dict()
                self._weights = {
                    key: value.detach().to("cpu", copy=True)
                    for key, value in state.items()
                    if isinstance(value, torch.Tensor)
                }
        elif epoch - (-1 if self.best_epoch is None else self.best_epoch) >= self.patience:
            self.stopped_epoch = epoch
            raise StopIteration

    def on_train_end(self) -> None:
        """Load the weights of the best epoch, if they are wanted."""
        if self._weights and self._module is not None:
            weights = sharded_weights(self._module, self._weights)
            self._module.load_state_dict(weights, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        names = ("best", "best_epoch", "stopped_epoch")
        return {**{name: getattr(self, name) for name in names}, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        for name in ("best", "best_epoch", "stopped_epoch"):
            setattr(self, name, state[name])
        self._weights = dict(state["weights"])

    def _improves(self, value: float, mode: str) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if mode == "min" else value - self.best
        return gain > self.min_delta


def check_callback(callback: Any) -> None:
    """Check a callback's methods. Runs on the driver.

    Raises
    ------
    ParamError
        If it lacks all of the methods, or if one cannot be called as documented.
    """
    has_hook = any(getattr(callback, hook, None) is not None for hook in _HOOKS)
    if isinstance(callback, type) or not has_hook:
        raise ParamError(
            f"callbacks: expected objects with some of the methods {', '.join(_HOOKS)}, "
            f"found {callback!r}."
        )
    for hook, arguments in _HOOKS.items():
        _check_hook(callback, hook, arguments)


def _check_hook(callback: Any, hook: str, arguments: tuple[str, ...]) -> None:
    """Reject a callback method that cannot be called as documented."""
    method = getattr(callback, hook, None)
    if method is None:
        return
    documented = f"{hook}({', '.join(arguments)})"
    kind = type(callback)
    if not callable(method):
        raise ParamError(f"callbacks: expected {documented} of {kind.__name__} to be a method.")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # Built-in functions have no signature.
        return
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise ParamError(
            f"callbacks: {kind.__name__}.{hook}{signature} of {kind.__module__} cannot be called "
            f"as {documented} with keyword arguments: {error}."
        ) from None
