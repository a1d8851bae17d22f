"""Optimizer steps: learning rate scaling, gradient clipping, mixed precision and schedulers.

Each rank of the torch trainer creates an `OptimizerStep` from the params, its `StepOptions`.
Lightning has its own steps, and uses `StepRate`. Mixed precision follows
https://pytorch.org/docs/stable/notes/amp_examples.html.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.training.spec import EpochMetrics, TrainSpec, measured, monitored

PRECISIONS = ("32", "bf16", "fp16")
"""Values of the param ``precision``."""

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

INTERVALS = ("epoch", "step")
"""Values of the param ``lr_scheduler_interval``."""


@dataclass(frozen=True)
class StepOptions:
    """Params of the same names; see `TorchEstimator`."""

    gradient_clip_norm: float | None = None
    gradient_clip_value: float | None = None
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    lr_scheduler_interval: str = "epoch"
    precision: str = "32"


def autocast(precision: str, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that computes in a half precision, if ``precision`` names one.

    Values of the params ``precision`` and ``inference_precision`` do.
    """
    if precision in ("32", "float32"):
        return contextlib.nullcontext()
    return torch.autocast(device_type, _HALVES.get(precision) or getattr(torch, precision))


class OptimizerStep:
    """Steps of an optimizer on averaged gradients. Each rank creates one.

    Every rank has the same gradients, so clipping and schedulers have the same effect on all.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer, with its state from before training.
    options : StepOptions
        Clipping, scheduler and precision.
    device : torch.device
        Device of the model.

    Attributes
    ----------
    objects : dict
        Scheduler and gradient scaler, whose states belong in checkpoints, by name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: StepOptions, device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._options = options
        self._device = device
        self.objects: dict[str, Any] = {}
        self._scheduler: Any = None
        self._scaler: Any = None
        if options.lr_scheduler is not None:
            self._scheduler = self.objects["lr_scheduler"] = make_scheduler(
                options.lr_scheduler, optimizer, options.lr_scheduler_interval
            )
        if options.precision == "fp16":
            self._scaler = self.objects["scaler"] = torch.amp.GradScaler(device.type)
            # Makes the scale, which a rank without rows in its first step needs.
            self._scaler.scale(torch.zeros((), device=device))

    @property
    def learning_rates(self) -> list[float]:
        """Current learning rates of the parameter groups that have one."""
        return learning_rates(self._optimizer)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that computes forward pass and loss in the chosen precision."""
        return autocast(self._options.precision, self._device.type)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss for the backward pass: scaled, so that 16-bit gradients do not vanish."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self) -> None:
        """Clip the gradients, change the parameters, and reset the gradients."""
        options = self._options
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if options.gradient_clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._parameters(), options.gradient_clip_value)
        if options.gradient_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters(), options.gradient_clip_norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad()
        if self._scheduler is not None and options.lr_scheduler_interval == "step":
            self._scheduler.step()

    def check_length(self, spec: TrainSpec) -> None:
        """Reject a restored scheduler that ends before training does."""
        check_length(
            self._scheduler,
            self._options.lr_scheduler_interval,
            spec,
            "A run that resumes keeps the scheduler with which it began. Set fewer epochs, or "
            "another run_id.",
        )

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def epoch_ended(self, record: EpochMetrics) -> None:
        """Step a scheduler of epochs. ``ReduceLROnPlateau`` gets ``val_loss``, or else ``loss``."""
        if self._scheduler is None or self._options.lr_scheduler_interval != "epoch":
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            values = measured(record)
            name = monitored(None, values)
            assert name is not None
            self._scheduler.step(values[name])
        else:
            self._scheduler.step()


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates of the parameter groups that have one."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    # Adafactor of timm and transformers computes the rate itself if it is None.
    return [float(rate) for rate in rates if rate is not None]


def make_scheduler(
    make: Callable[[torch.optim.Optimizer], Any], optimizer: Any, interval: str
) -> Any:
    """Return the scheduler that the user's function creates for an optimizer.

    Parameters
    ----------
    make : callable
        The param ``lr_scheduler``.
    optimizer : torch.optim.Optimizer
        The optimizer.
    interval : {"epoch", "step"}
        When the scheduler steps.

    Raises
    ------
    ParamError
        If the function fails, or does not return a scheduler of that optimizer. Also if the
        scheduler's ``step`` needs arguments.
    """
    try:
        scheduler = make(optimizer)
    except Exception as error:
        raise ParamError(
            f"lr_scheduler: the function failed ({type(error).__name__}: {error}). Set a function "
            "that takes only the optimizer, such as lambda optimizer: StepLR(optimizer, 10)."
        ) from error
    methods = ("step", "state_dict", "load_state_dict")
    if not all(callable(getattr(scheduler, name, None)) for name in methods):
        raise ParamError(
            "lr_scheduler: expected a function of the optimizer that returns a scheduler, such as "
            f"lambda optimizer: StepLR(optimizer, 10); it returned {scheduler!r}."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ParamError(
            "lr_scheduler: the function returned a scheduler of another optimizer. Create the "
            "scheduler within the function, for the optimizer that the function gets."
        )
    gets_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if gets_metric and interval == "step":
        raise ParamError(
            "lr_scheduler_interval: found 'step', and ReduceLROnPlateau needs the value of an "
            "epoch. Set 'epoch'."
        )
    try:
        inspect.signature(scheduler.step).bind(*[0.0] * gets_metric)
    except TypeError as error:
        raise ParamError(
            f"lr_scheduler: the function returned a {type(scheduler).__name__}, whose step() "
            f"cannot be called without arguments ({error}). Return a scheduler of torch, or an "
            "object whose step(), state_dict() and load_state_dict() call the scheduler's."
        ) from error
    return scheduler


def check_length(scheduler: Any, interval: str, spec: TrainSpec, remedy: str) -> None:
    """Reject a scheduler that ends before training does.

    Parameters
    ----------
    scheduler : object
        The scheduler.
    interval : {"epoch", "step"}
        When it steps.
    spec : TrainSpec
        The training job.
    remedy : str
        The last sentence of the message, in which ``{needed}`` is the number of steps.

    Raises
    ------
    ParamError
        If it is a ``OneCycleLR`` of fewer steps, which would fail after its last one.
    """
    steps = spec.steps_done(1, 0)
    needed = spec.epochs * (steps if interval == "step" else 1)
    is_limited = isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
    if is_limited and scheduler.total_steps < needed:
        each = f" of {steps} steps" if interval == "step" else ""
        raise ParamError(
            f"lr_scheduler: expected a OneCycleLR with total_steps={needed} or more, for "
            f"epochs={spec.epochs}{each} and lr_scheduler_interval={interval!r}, found "
            f"{scheduler.total_steps}. {remedy.format(needed=needed)}"
        )


StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of an optimizer's ``step``, itself among them."""


def with_closure(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrap: Callable[[Callable[[], Any]], Callable[[], Any]],
) -> StepArguments | None:
    """Return the arguments of a step with its closure wrapped, or None without a closure."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return None


class StepRate:
    """Scaling of an optimizer's learning rates that is active only while the optimizer steps.

    Schedulers, callbacks, loggers, checkpoints and the step's closure always see the unscaled
    rates. A run can therefore be resumed with another number of ranks.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer.
    scale : int
        The factor: in a fit, the number of the run's canonical shards.
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
                optimizer.register_step_pre_hook(self._enter),
                optimizer.register_step_post_hook(lambda *_: self._leave()),
            ]

    def remove(self) -> None:
        """Remove the hooks from the optimizer, and restore the unscaled rates."""
        self._lower()
        for hook in self._hooks:
            hook.remove()

    def _enter(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        self._depth += 1
        if self._depth > 1:
            return None
        self._raise()
        return with_closure(args, kwargs, self._with_given_rates)

    def _with_given_rates(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def lowered() -> Any:
            if not self._raised:  # called outside of a step
                return closure()
            self._lower()
            try:
                returned = closure()
            except BaseException:  # which ends the step
                self._depth = 0
                raise
            self._raise()
            return returned

        return lowered

    def _leave(self) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self._lower()

    def _raise(self) -> None:
        for group in self._optimizer.param_groups:
            if group.get("lr") is not None:
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
    if has_modes(optimizer):
        modes: Any = optimizer
        (modes.train if training else modes.eval)()


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has modes for training and evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
