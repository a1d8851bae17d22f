"""Averaging of gradients over the ranks, for torch and Lightning and any optimizer."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.collectives import current, reduce_group_async
from hvd_estimators.torch.loss_weights import StepWeights
from hvd_estimators.torch.optimizer_step import StepArguments, with_closure
from hvd_estimators.torch.sharding import is_sharded

_BUCKET_BYTES = 16 * 2**20

# Attribute of closures that average their gradients.
_AVERAGES = "averages_gradients"


class GradientAverager:
    """Hooks that replace gradients by their means over the ranks when a backward pass ends.

    The mean covers all accumulated gradients, so the order of averaging and accumulating does not
    matter. Passes inside ``averaging(accumulate=True)`` add up locally until the next pass outside
    such a block. Clipping functions, gradient scalers and callbacks therefore see means.

    Buckets of gradients are sent while the pass still runs, in the same order on all ranks. A
    bucket holds the same tensors in the same order in every run. A parameter without a gradient on
    this rank counts as zero. A parameter without a gradient on all ranks keeps None. The mean of
    sparse gradients is sparse for layers with ``sparse=True`` and for SparseAdam, and dense
    otherwise.

    The averager reads the optimizers' current parameters at each step. A parameter may become
    trainable later, and a group may be added. Any optimizer that steps with a parameter of the
    module is followed from its first step on. Optimizer classes are not modified. A backward pass
    within another one, as of reentrant checkpoints, is an error.

    A closure that is passed to ``optimizer.step`` returns the mean loss over the ranks if the
    optimizer computes with the loss (LBFGS). All ranks must then decide alike.

    Parameters
    ----------
    module : torch.nn.Module
        Module that names the parameters.
    optimizers : sequence of torch.optim.Optimizer
        Optimizers that are known from the start.
    compression : compressor, optional
        An object with ``compress`` and ``decompress``, such as ``horovod.torch.Compression.fp16``.
    losses : sequence of callable
        Losses; loss modules may have parameters.
    every_parameter : bool
        Average all trainable parameters of the module and losses, not only the optimizers'.
        For user-written steps, which may use their own optimizers; see `follow` for others.
    loss_in_step : callable, optional
        Returns this rank's contribution to the step's loss, given the loss that a closure returned.
        The step's loss is the mean of the contributions. Default: the loss itself.

    Attributes
    ----------
    weights : StepWeights
        Weights of the losses of a step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        compression: Any = None,
        losses: Sequence[Callable[..., Any]] = (),
        every_parameter: bool = False,
        loss_in_step: Callable[[Any], Any] | None = None,
    ) -> None:
        self._module = module
        self._losses = [loss for loss in losses if isinstance(loss, torch.nn.Module)]
        self._compression = compression
        self._every_parameter = every_parameter
        self.weights = StepWeights(lambda: self._bucket_of)
        self._loss_in_step = loss_in_step
        self._others: list[torch.nn.Module] = []
        # The gradients of a sharded module are means already.
        self._alone = current().size == 1 or any(map(is_sharded, module.parameters()))
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, None]
        self._optimizers = weakref.WeakKeyDictionary()
        self._gradient_hooks: dict[torch.Tensor, Any] = {}
        self._plans: dict[tuple[int, ...], list[_Bucket]] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._launched = 0
        self._averaged: set[torch.Tensor] = set()
        self._unused: set[torch.Tensor] = set()
        self._in_pass = self._accumulating = self._pending = False
        self._reductions = 0
        for optimizer in optimizers:
            self._follow(optimizer)
        self.refresh()
        self._step_hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def follow(self, objects: Iterable[Any]) -> None:
        """Also average for the optimizers among the user's objects.

        Modules among them, such as a loss, name parameters. An optimizer of these that steps later
        is followed, too.
        """
        for value in objects:
            if isinstance(value, torch.optim.Optimizer):
                self._follow(value)
            elif isinstance(value, torch.nn.Module):
                self._others.append(value)
        self.refresh()

    @property
    def outside(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of losses and optimizers that are not the module's, by name."""
        of_losses = (p for loss in self._losses for p in loss.parameters())
        outside = {*self._owned(), *of_losses}.difference(self._module.parameters())
        return {name: p for name, p in self._named() if p in outside}

    @property
    def pending(self) -> bool:
        """Return whether this rank has gradients that are not averaged yet."""
        return self._pending

    def drop_used_gradients(self) -> None:
        """Remove the gradients that optimizers have used."""
        for _, parameter in self._named():
            if parameter not in self._unused:
                parameter.grad = None

    def unused_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that wait for a step, by parameter name."""
        return {
            # A view would be saved with the whole bucket.
            name: parameter.grad.clone()
            for name, parameter in self._named()
            if parameter in self._unused and parameter.grad is not None
        }

    def restore_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restore gradients that wait for a step; they are equal on all ranks."""
        for name, parameter in self._named():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device)
                self._unused.add(parameter)
                self._averaged.add(parameter)

    @contextlib.contextmanager
    def averaging(self, accumulate: bool = False) -> Iterator[None]:
        """Average the gradients of each backward pass in the block, or accumulate them locally.

        All ranks must enter the block equally often. A rank that computes no gradient takes part
        when the block ends.
        """
        self.refresh()
        before, self._accumulating = self._accumulating, accumulate
        reductions = self._reductions
        try:
            yield
        finally:
            self._accumulating = before
        if not accumulate and reductions == self._reductions:
            self._reduce()

    def refresh(self) -> None:
        """Update the set of trained parameters."""
        trained = {id(p): p for p in self._owned() if p.requires_grad}
        if self._every_parameter:
            modules = [self._module, *self._losses]
            every = (p for module in modules for p in module.parameters())
            trained.update((id(p), p) for p in every if p.requires_grad)
        key = tuple(trained)
        if key not in self._plans:
            self._plans[key] = self._planned(trained)
        if self._plans[key] is not self._buckets:
            self._buckets = self._plans[key]
            self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def remove(self) -> None:
        """Remove the hooks from parameters and optimizers."""
        for hook in (*self._step_hooks, *self._gradient_hooks.values()):
            hook.remove()
        self._gradient_hooks.clear()

    def _planned(self, trained: Mapping[int, torch.nn.Parameter]) -> list[_Bucket]:
        # The order is the same on all ranks. Parameters outside the module come last.
        named = [(name, p) for name, p in self._named() if id(p) in trained]
        for _, parameter in named:
            if parameter not in self._gradient_hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._gradient_hooks[parameter] = hook
        return _fill_buckets(named, set(self._sparse_parameters()), self._compression)

    def _sparse_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters whose gradients are exchanged by rows."""
        for layer in self._module.modules():
            if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
                yield from layer.parameters(recurse=False)
        for optimizer in self._optimizers:
            if isinstance(optimizer, torch.optim.SparseAdam):
                for group in optimizer.param_groups:
                    yield from group["params"]

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield name and parameter of the module, losses, other modules and optimizers, once."""
        named = list(self._module.named_parameters())
        for index, module in enumerate((*self._losses, *self._others)):
            named += module.named_parameters(f"loss_{index}")
        named += ((f"parameter_{index}", p) for index, p in enumerate(self._owned()))
        visited: set[torch.nn.Parameter] = set()
        for name, parameter in named:
            if parameter not in visited:
                visited.add(parameter)
                yield name, parameter

    def _owned(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of the followed optimizers."""
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                yield from group["params"]

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers[optimizer] = None
        self._plans.clear()  # Its gradients may be sparse.

    def _on_gradient(self, parameter: Any) -> None:
        self._unused.add(parameter)
        self._pending = True
        self._averaged.discard(parameter)
        if self._accumulating:
            return
        if not self._in_pass:
            self._in_pass = True
            for bucket in self._buckets:
                bucket.waiting = len(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        # A parameter outside the buckets is not trained any longer.
        if self._alone or parameter not in self._bucket_of:
            return
        self._bucket_of[parameter].waiting -= 1
        # A complete bucket waits for those before it, because the order is the same on all ranks.
        while self._launched < len(self._buckets) and self._buckets[self._launched].waiting <= 0:
            self._launch()

    def _launch(self) -> None:
        self._buckets[self._launched].launch()
        self._launched += 1

    def _end_pass(self) -> None:
        """Average when a pass ends.

        Raises
        ------
        ParamError
            If another pass contains it: the ranks would not average equally often.
        """
        outer: Any = torch._C._current_autograd_node()
        if outer is not None:
            raise ParamError(
                "model: a backward pass runs within another one, as torch.utils.checkpoint does "
                "with use_reentrant=True. Set use_reentrant=False; for a model of Hugging Face "
                "call model.gradient_checkpointing_enable({'use_reentrant': False})."
            )
        if self._in_pass:
            self._reduce()

    def _reduce(self) -> None:
        """Set all gradients to their means over the ranks."""
        self._reductions += 1
        if not self._alone:
            while self._launched < len(self._buckets):
                self._launch()
            for bucket in self._buckets:
                bucket.finish()
            self._launched = 0
        self._averaged.update(self._bucket_of)
        self._pending = self._in_pass = False

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """Average the gradients that are not averaged yet. Called before any optimizer steps."""
        if optimizer not in self._optimizers:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not any(id(parameter) in owned for _, parameter in self._named()):
                return None
            self._follow(optimizer)
        # A closure computes the gradients of the step later.
        wrapped = with_closure(args, kwargs, lambda closure: self._closure(optimizer, closure))
        if wrapped is None:
            self._use(optimizer)
        return wrapped

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Let the optimizer's next gradients be averaged, also if no backward pass sets them.

        Not called at the start of a step, within which an optimizer may call another one.
        """
        for group in optimizer.param_groups:
            self._averaged.difference_update(group["params"])

    def _closure(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Wrap a closure to average its gradients, and its loss if the optimizer needs the loss."""
        if hasattr(closure, _AVERAGES):  # An outer optimizer has wrapped it.
            return closure

        @functools.wraps(closure)
        def averaged() -> Any:
            self._after_step(optimizer)  # its last gradients, of a closure that ran before
            loss = closure()
            self._use(optimizer)
            return self._mean_loss(loss) if _computes_with_loss(optimizer) else loss

        setattr(averaged, _AVERAGES, True)
        return averaged

    def _mean_loss(self, loss: Any) -> Any:
        if current().size == 1 or loss is None:
            return loss
        counted = loss if self._loss_in_step is None else self._loss_in_step(loss)
        own = torch.as_tensor(counted).detach().to("cpu", torch.float64).reshape(1)
        mean = float(current().reduce(own, "mean", "closure_loss"))
        return torch.full_like(loss, mean) if isinstance(loss, torch.Tensor) else mean

    def _use(self, optimizer: torch.optim.Optimizer) -> None:
        """Average an optimizer's remaining gradients, and record that the optimizer uses them."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.weights.before_step()
        if any(p not in self._averaged for p in trained if p.requires_grad):
            self.refresh()
            self._reduce()
        self._unused.difference_update(trained)


def _computes_with_loss(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer may compute with its closure's return value."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    # torch's other optimizers only return the loss.
    return not type(optimizer).step.__module__.startswith("torch.optim.")


class _Bucket:
    """Gradients that are reduced together, as dense tensors.

    Parameters
    ----------
    name : str
        Name of the reduction; the same on all ranks.
    parameters : list of torch.nn.Parameter
        Parameters of one dtype, the gradients of which are averaged.
    compression : compressor or None
        An object with ``compress`` and ``decompress``.
    """

    def __init__(
        self, name: str, parameters: list[torch.nn.Parameter], compression: Any = None
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.waiting = len(parameters)
        self._wait: Callable[[], Any] | None = None
        self._compression = compression
        self._contexts: list[Any] = []
        self._missing: list[int] = []
        self._all_exist: torch.Tensor | None = None

    def finish(self) -> None:
        """Wait for the reduction, and set each gradient to the mean over the ranks."""
        assert self._wait is not None
        reduced = self._wait()
        self._wait = None
        self.waiting = len(self.parameters)
        self._set(reduced)

    def launch(self) -> None:
        """Start the reduction; a gradient that this rank lacks counts as zero."""
        self._missing = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._missing.append(index)
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        compressed = [self._compress(p.grad) for p in self.parameters]
        self._contexts = [context for _, context in compressed]
        tensors = [tensor for tensor, _ in compressed]
        # Whether gradients exist is sent, too: one that no rank has stays None.
        if self._all_exist is None:
            self._all_exist = tensors[0].new_ones(len(self.parameters))
        exist = self._all_exist
        if self._missing:
            exist = exist.clone()
            exist[self._missing] = 0.0
        self._wait = reduce_group_async([*tensors, exist], "mean", self.name)

    def _set(self, reduced: Any) -> None:
        """Set the gradients to their means."""
        *outputs, exist = reduced
        for parameter, output, context in zip(
            self.parameters, outputs, self._contexts, strict=True
        ):
            gradient = self._decompress(output, context, parameter.dtype)
            own = parameter.grad
            # The new gradients are views of one tensor.
            if own is None or own.is_contiguous():
                parameter.grad = gradient
            else:  # Keep the memory format, such as channels_last.
                own.copy_(gradient)
        if self._missing:
            counts = exist.tolist()
            for index in self._missing:
                if not counts[index]:
                    self.parameters[index].grad = None

    def _compress(self, gradient: Any) -> tuple[torch.Tensor, Any]:
        # Sums in bfloat16 would be imprecise. Horovod supports neither it nor complex numbers.
        if gradient.dtype == torch.bfloat16:
            gradient = gradient.float()
        elif gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        tensor, context = gradient, None
        if self._compression is not None:
            tensor, context = self._compression.compress(gradient)
        return tensor, context

    def _decompress(self, tensor: torch.Tensor, context: Any, dtype: torch.dtype) -> torch.Tensor:
        gradient = tensor
        if self._compression is not None:
            gradient = self._compression.decompress(tensor, context)
        return torch.view_as_complex(gradient) if dtype.is_complex else gradient.to(dtype)


class _RowsBucket(_Bucket):
    """The gradient of one parameter, a sparse tensor of its rows.

    A rank with a dense gradient also sends a row after the last one. All ranks then have dense
    gradients.
    """

    def launch(self) -> None:
        """Start the reduction."""
        (parameter,) = self.parameters
        gradient = parameter.grad
        end, *row = parameter.shape
        if gradient is None:
            indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty((0, *row))
        elif gradient.is_sparse and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            indices, values = gradient.indices(), gradient.values()
        else:
            indices = torch.arange(end + 1, device=parameter.device)[None]
            values = torch.cat([gradient.to_dense(), gradient.new_zeros((1, *row))])
        shape = (end + 1, *row)
        extended = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        self._wait = current().average_sparse_async(extended, self.name)

    def _set(self, reduced: Any) -> None:
        (parameter,) = self.parameters
        total = reduced.coalesce()
        indices = total.indices()
        if indices.numel() and int(indices[0, -1]) == len(parameter):
            parameter.grad = total.to_dense()[:-1]
            return
        parameter.grad = torch.sparse_coo_tensor(
            *(indices, total.values(), parameter.shape), check_invariants=False, is_coalesced=True
        )


def _fill_buckets(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    sparse: set[torch.nn.Parameter],
    compression: Any = None,
) -> list[_Bucket]:
    """Return buckets of one dtype each, last parameters first.

    Backward passes compute the gradients of the last parameters first.

    Parameters
    ----------
    named : sequence of tuple
        Names and parameters, in the same order on all ranks.
    sparse : set of torch.nn.Parameter
        Parameters whose gradients are sparse.
    compression : compressor, optional
        Compresses dense gradients. Default: no compression.
    """
    buckets: list[_Bucket] = []
    groups: dict[torch.dtype, list[tuple[str, torch.nn.Parameter]]] = {}

    def close(dtype: torch.dtype) -> None:
        group = groups.pop(dtype)
        parameters = [parameter for _, parameter in group]
        buckets.append(_Bucket(f"gradients.{group[0][0]}", parameters, compression))

    for name, parameter in reversed(named):
        if parameter in sparse:
            buckets.append(_RowsBucket(f"gradient.{name}", [parameter]))
            continue
        group = groups.setdefault(parameter.dtype, [])
        group.append((name, parameter))
        if sum(p.nbytes for _, p in group) > _BUCKET_BYTES:
            close(parameter.dtype)
    for dtype in list(groups):
        close(dtype)
    return buckets
