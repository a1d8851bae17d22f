"""Sharding of a module over the ranks: each holds a part of every parameter.

`shard` applies ``torch.distributed.fsdp.fully_shard`` (https://docs.pytorch.org/docs/stable/
distributed.fsdp.fully_shard.html), which gathers the parameters of a layer while it computes. A
backward pass leaves each rank the mean gradient of its part. Optimizers, clipping and
schedulers then work on the parts, and files hold whole tensors, see `shard_files`. Imports
`torch.distributed.tensor`, which takes a second, only for sharded fits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.torch.stored_weights import loading_weights
from hvd_estimators.torch.tensor_files import StoredTensor
from hvd_estimators.torch.tensors import map_tensors

_M_MMAP_THRESHOLD = -3

MODES = ("none", "optimizer", "full")
"""Values of the param ``sharding``."""


@dataclass(frozen=True)
class ShardingOptions:
    """Params of sharding.

    Attributes
    ----------
    mode : str
        One of `MODES`. With "optimizer", a layer's parameters stay gathered until its backward
        pass, which saves time. With "full", they are gathered again, which saves memory.
    modules : tuple of str, or None
        Names of the classes of the layers that are gathered one after another. Default: the
        entries of the model's ``ModuleList`` objects.
    activation_checkpointing : bool
        Whether these layers compute their activations again in the backward pass.
    precision : str
        Value of the param ``precision``.
    cpu_offload : bool
        Whether the parts stay in the memory of the machine, where optimizers step.
    """

    mode: str = "none"
    modules: tuple[str, ...] | None = None
    activation_checkpointing: bool = False
    precision: str = "32"
    cpu_offload: bool = False

    def applies_to(self, ranks: int) -> bool:
        """Return whether each of some ranks holds a part of the parameters."""
        return self.mode != "none" and ranks > 1

    def layers_of(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the layers that are gathered one after another, inner ones first.

        A layer that shares weights with others is gathered with the rest of the model.

        Raises
        ------
        ParamError
            If the model has no layer of a class that ``shard_modules`` names.
        """
        total = _uses(module)
        return [
            layer
            for layer in self._wanted(module)
            if all(total[key] == count for key, count in _uses(layer).items())
        ]

    def _wanted(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        if self.modules is None:
            return [*_entries_of_lists(module)]
        of_class: dict[str, list[torch.nn.Module]] = {}
        for layer in module.modules():
            if layer is not module:
                of_class.setdefault(type(layer).__name__, []).append(layer)
        for name in self.modules:
            if name not in of_class:
                raise ParamError(
                    f"shard_modules: the model has no layer of class {name!r}. Set one of "
                    f"{', '.join(map(repr, sorted(of_class)))}.{did_you_mean(name, [*of_class])}"
                )
        wanted = {id(layer) for name in self.modules for layer in of_class[name]}
        return [layer for layer in module.modules() if id(layer) in wanted][::-1]


def _uses(module: torch.nn.Module) -> Counter[int]:
    """Return how often each parameter occurs in a module, by id."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _entries_of_lists(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the entries of a module's lists of layers, but not of lists within an entry."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList) and len(child) > 1:
            yield from _called(child)
        else:
            yield from _entries_of_lists(child)


def _called(container: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers with parameters in a list, also of lists and dicts of layers."""
    for entry in container.children():
        if isinstance(entry, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _called(entry)
        elif any(True for _ in entry.parameters()):
            yield entry


def shard(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: ShardingOptions,
    device: torch.device,
) -> None:
    """Replace a module's parameters by this rank's parts of them. Called by all ranks.

    Parameters
    ----------
    module : torch.nn.Module
        The module on the CPU, with the same weights on all ranks, or with weights in files. Each
        layer gets these, and moves to the device, before it is cut.
    optimizers : sequence of torch.optim.Optimizer
        Optimizers of the module; their groups and states get the parts.
    options : ShardingOptions
        The options.
    device : torch.device
        Device that computes. It has the parts, unless these are offloaded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    apply: Any = functools.partial(
        fully_shard,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload if options.cpu_offload else OffloadPolicy(),
        reshard_after_forward=options.mode == "full",
    )
    if options.activation_checkpointing:
        for part in module.modules():
            # A layer that computes again would add to the cache of Hugging Face's decoders.
            if getattr(getattr(part, "config", None), "use_cache", False):
                part.config.use_cache = False  # type: ignore[union-attr]
    with loading_weights(module, mapped=True) as load:
        for layer in options.layers_of(module):
            if options.activation_checkpointing:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            load(layer)
            apply(layer)
            gc.collect(1)  # Cycles hold the whole parameters.
        load(module)
        apply(module)
    parts = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            given = group["params"]
            group["params"] = [parts[names[id(parameter)]] for parameter in given]
            for before, part in zip(given, group["params"], strict=True):
                if before in optimizer.state:
                    state = optimizer.state.pop(before)
                    optimizer.state[part] = _parts_of(state, part)

    if device.type == "cpu":
        _return_freed_memory()
    gc.collect()


def _return_freed_memory() -> None:
    """Let glibc give the memory of a gathered layer back to the system when it is freed.

    Otherwise, glibc keeps blocks of up to 32 MiB, which add up to the size of the model. The
    parameter ``M_MMAP_THRESHOLD`` is described in mallopt(3).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def is_sharded(tensor: Any) -> bool:
    """Return whether this rank holds a part of a tensor."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is not sharded."""
    given: Any = tensor
    part: torch.Tensor = given.to_local() if is_sharded(given) else given
    return part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, gathered if it is sharded. Called by all ranks."""
    given: Any = tensor
    if is_sharded(given):
        # Callbacks may keep parts on the CPU, where a GPU's ranks cannot gather them.
        given = given.to(given.device_mesh.device_type).full_tensor()
    made: torch.Tensor = given.cpu()
    return made


def gathered(value: Any, keep: bool = True) -> Any:
    """Return a value's dicts, lists and tuples with whole tensors, on the CPU. Called by all ranks.

    Without ``keep``, a rank gets None for each sharded tensor.
    """

    def of(tensor: torch.Tensor) -> torch.Tensor | None:
        made = whole(tensor) if is_sharded(tensor) else tensor
        return made if keep or made is tensor else None

    return map_tensors(of, value)


def sharded_weights(module: torch.nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a whole ``state_dict()`` with this rank's parts, if the module is sharded."""
    own = module.state_dict()
    return {
        name: _part(value, own[name]) if is_sharded(own.get(name)) else value
        for name, value in weights.items()
    }


def sharded_optimizer_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a whole ``state_dict()`` with this rank's parts, if the parameters are sharded."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(numbers) != len(parameters) or not any(map(is_sharded, parameters)):
        return dict(state)
    parameter_of = dict(zip(numbers, parameters, strict=True))
    parts = {
        number: _parts_of(entries, parameter_of[number])
        for number, entries in state["state"].items()
    }
    return {**state, "state": parts}


def with_parts(value: Any, like: Any) -> Any:
    """Return a value's dicts, lists and tuples with this rank's parts of tensors in files."""
    if isinstance(value, StoredTensor):
        return stored_part(value, like)
    if isinstance(value, Mapping):
        return {key: with_parts(entry, like) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_parts(entry, like) for entry in value)
    return value


def _parts_of(entries: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    """Return the optimizer's state of a parameter; entries of its shape are cut like it."""
    return {
        name: _part(value, parameter)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim()
        else with_parts(value, parameter)
        for name, value in entries.items()
    }


def _part(tensor: torch.Tensor | StoredTensor, like: Any) -> Any:
    """Return this rank's part of a tensor, cut like another one. No rank sends anything."""
    from torch.distributed.tensor import distribute_tensor

    if isinstance(tensor, StoredTensor):
        return stored_part(tensor, like)
    given = tensor.to(like.device)
    return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)


def stored_part(stored: StoredTensor, like: Any) -> Any:
    """Return this rank's part of a tensor in a file, on the device of another part.

    `fully_shard` divides the first dimension like `torch.chunk`.
    """
    from torch.distributed.tensor import DTensor

    mesh, rows = like.device_mesh, stored.shape[0]
    most = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * most, rows)
    own = stored.rows(start, min(start + most, rows)).to(like.device)
    whole = torch.empty(stored.shape, device="meta")
    return DTensor.from_local(
        own, mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
