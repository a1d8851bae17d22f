"""State of the user's objects in checkpoints: schedulers, scalers, averages of weights.

A checkpoint holds the state of every object that has ``state_dict()`` and ``load_state_dict()``.
The objects come from the estimator's params and the module's attributes. Used by torch and
Lightning.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import inspect
import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
import torch

from hvd_estimators._util.documents import to_python
from hvd_estimators.torch.serialization import load_state, plain_module, save_state

logger = logging.getLogger(__name__)

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
_DICTS = (dict, collections.OrderedDict)
_LISTS = (list, tuple)
_DEPTH = 3
_MAX_BYTES = 2**24
# Layers of these packages have no Python state, or store it in their state_dict().
_LIBRARIES = ("torch.", "torchmetrics.", "pytorch_lightning.", "lightning.", "hvd_estimators.")


class StatefulObjects:
    """States of the user's objects, for saving and restoring.

    If an object lacks the two methods, its attributes are searched for objects that have them. The
    search covers the arguments of a ``functools.partial`` and the object of a bound method. Of a
    function, it covers the variables outside the function and the defaults that hold such an object
    directly. It skips modules in evaluation mode there, such as the teacher of a distillation.

    Parameters that an optimizer among the objects trains, and that no other object saves, are saved
    with the optimizer.

    Parameters
    ----------
    given : mapping
        Param name to the given object, or to a list of objects.
    module : torch.nn.Module
        The trained module. Its attributes and its layers' attributes are searched.
    library_objects : iterable of object
        Objects with a state that is saved elsewhere, such as the optimizer.
    ignored : iterable of str
        Attributes of the module that do not belong to the user.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        module: torch.nn.Module,
        library_objects: Iterable[Any] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        self._given = given
        self._module = module
        self._ignored = frozenset(ignored)
        self._library_objects = {id(value): value for value in library_objects}
        self._warned: set[str] = set()

    def capture(self) -> dict[str, Any]:
        """Return the states by name, if they are tensors and plain values.

        Other states are skipped with a warning, because loading them would run code from the file.
        """
        states = {}
        for name, value in self.items():
            try:
                state = to_python(value.state_dict())
            except Exception as error:
                self._warn(name, value, f"failed ({type(error).__name__}: {error})")
                continue
            if not is_loadable(state):
                self._warn(name, value, "returns more than tensors and plain values")
            elif state:
                states[name] = state
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load the states into the objects with these names."""
        objects = dict(self.items()) if states else {}
        for name, state in states.items():
            if name in objects:
                objects[name].load_state_dict(state)
            else:
                logger.warning(
                    "%s: the run's checkpoint holds its state, and the object does not exist when "
                    "training starts. It starts without that state. Create it in "
                    "on_train_begin() or earlier; in a LightningModule in configure_optimizers() "
                    "or earlier.",
                    name,
                )

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and object for each object that has a state."""
        visited = {id(part) for part in self._module.modules()} | self._library_objects.keys()
        roots: list[tuple[str, Any]] = []
        for name, value in self._given.items():
            roots += _parts(name, value) if isinstance(value, _LISTS) else [(name, value)]
        for path, part in self._module.named_modules():
            for name, value in _own_attributes(part, self._ignored):
                if _may_have_state(value):
                    roots.append((_joined("model", path, name), value))
        optimizers, saved = [], set(self._module.parameters())
        for name, root in roots:
            for found, value in _search(name, root, visited, _DEPTH):
                yield found, value
                if isinstance(value, torch.optim.Optimizer):
                    optimizers.append((found, value))
                elif isinstance(value, torch.nn.Module):
                    saved.update(value.parameters())
        for name, optimizer in optimizers:
            groups = optimizer.param_groups
            unsaved = [p for group in groups for p in group["params"] if p not in saved]
            if unsaved:
                yield f"{name}.params", _Parameters(unsaved)

    def _warn(self, name: str, value: Any, reason: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "%s: %s.state_dict() %s. Checkpoints do not hold its state, and a resumed run "
                "starts without it. Return tensors and plain values from state_dict().",
                name,
                type(value).__name__,
                reason,
            )


class _Parameters:
    """State of parameters that belong to no saved module."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        return {"params": [parameter.detach() for parameter in self._parameters]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for parameter, saved in zip(self._parameters, state["params"], strict=True):
                parameter.copy_(saved)


class AttributeWatch:
    """Detector of module attributes that training changes and no checkpoint holds.

    The watch observes the first epoch. It skips attributes that the hooks at the start of an epoch
    set again, and layers that define ``get_extra_state()``.

    Parameters
    ----------
    module : torch.nn.Module
        The trained module.
    library_objects : iterable of object
        Objects that an attribute may refer to without owning them, such as the optimizer.
    ignored : iterable of str
        Attributes that do not belong to the user.
    is_active : bool
        Whether to observe; only one rank does.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        library_objects: Iterable[Any] = (),
        ignored: Iterable[str] = (),
        is_active: bool = True,
    ) -> None:
        self._module = module
        self._library_objects = tuple(library_objects)
        self._ignored = frozenset(ignored)
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        self._is_done = not is_active

    def epoch_started(self) -> None:
        """Record the attributes, after all hooks of an epoch's start."""
        if self._is_done:
            return
        now = self._fingerprints()
        if self._before is not None and self._after is not None:
            self._decide([name for name in self._changed() if self._after[name] == now.get(name)])
        self._before = now

    def epoch_ended(self) -> None:
        """Record the attributes, after an epoch's last step."""
        if not self._is_done:
            self._after = self._fingerprints()

    def training_ended(self) -> None:
        """Report the changes if training had only one epoch."""
        if not self._is_done and self._after is not None:
            self._decide(self._changed())

    def _changed(self) -> list[str]:
        before, after = self._before or {}, self._after or {}
        return [name for name, now in after.items() if now and before.get(name, ()) != now]

    def _decide(self, names: list[str]) -> None:
        self._is_done = True
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            logger.warning(
                "%s: training changes this attribute, and no checkpoint holds it. A resumed run "
                "starts with the value from before training. Return it from get_extra_state() of "
                "its module and accept it in set_extra_state(), keep it in a buffer "
                "(register_buffer), or set it when an epoch starts.",
                shown,
            )

    def _fingerprints(self) -> dict[str, Any]:
        names = {id(value): f"known.{n}" for n, value in enumerate(self._library_objects)}
        for path, part in self._module.named_modules():
            names[id(part)] = f"module.{path}"
        for tensors in (self._module.named_parameters(), self._module.named_buffers()):
            names.update((id(tensor), f"tensor.{name}") for name, tensor in tensors)
        fingerprints = {}
        for path, part in self._module.named_modules():
            kind = type(part)
            has_extra_state = kind.get_extra_state is not torch.nn.Module.get_extra_state
            if has_extra_state or f"{kind.__module__}.".startswith(_LIBRARIES):
                continue
            for name, value in _own_attributes(part, self._ignored):
                if not (_may_have_state(value) and any(_search(name, value, set(names), _DEPTH))):
                    fingerprints[_joined("model", path, name)] = _fingerprint(value, names)
        return fingerprints


def _own_attributes(module: torch.nn.Module, ignored: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that ``torch.nn.Module`` does not manage."""
    for name, value in list(vars(module).items()):
        if name not in _MANAGED and name not in ignored:
            yield name, value


_MANAGED = frozenset(vars(torch.nn.Module())) | {"_compile_kwargs"}


def has_state(value: Any) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    if isinstance(value, (type, ModuleType)):
        return False
    # Static lookup, because some objects return a value for any name.
    methods = (inspect.getattr_static(value, m, None) for m in ("state_dict", "load_state_dict"))
    return all(method is not None for method in methods)


def is_loadable(state: Any) -> bool:
    """Return whether a state can be loaded without running code from the file."""
    if type(state) in _PLAIN:
        return True
    if type(state) in _DICTS:
        return all(is_loadable(part) for pair in state.items() for part in pair)
    if type(state) in _LISTS:
        return all(map(is_loadable, state))
    file = io.BytesIO()
    try:
        save_state({"state": state}, file)
        file.seek(0)
        load_state(file)
    except Exception as error:
        logger.debug("A state cannot be loaded", exc_info=error)
        return False
    return True


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _search(name: str, value: Any, visited: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield an object that has a state, or else such objects among its parts."""
    uncompiled = plain_module(value) if isinstance(value, torch.nn.Module) else value
    if not visited.isdisjoint((id(value), id(uncompiled))) or depth < 0:
        return
    if has_state(value):
        visited.add(id(value))
        yield name, value
        return
    for part_name, part in _parts(name, value):
        if _may_have_state(part):
            yield from _search(part_name, part, visited, depth - 1)


def _may_have_state(value: Any) -> bool:
    """Return whether a value has a state, or contains other values."""
    return isinstance(value, (*_LISTS, *_DICTS)) or has_state(value)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with a name that shows its position."""
    # Plain values are skipped: each checkpoint may search a list with one number per batch.
    if isinstance(value, _DICTS):
        for key, entry in value.items():
            if type(entry) not in _PLAIN:
                yield f"{name}[{key!r}]", entry
    elif isinstance(value, _LISTS):
        for index, entry in enumerate(value):
            if type(entry) not in _PLAIN:
                yield f"{name}[{index}]", entry
    elif isinstance(value, functools.partial):
        yield from _parts(f"{name}.func", value.func)
        yield from _parts(f"{name}.args", value.args)
        yield from _parts(f"{name}.keywords", value.keywords)
    elif isinstance(value, MethodType):
        instance = value.__self__
        yield from [(name, instance)] if has_state(instance) else _parts(name, instance)
    elif isinstance(value, FunctionType):
        for variable, entry in _outer_variables(value):
            is_frozen = isinstance(entry, torch.nn.Module) and not entry.training
            if has_state(entry) and not is_frozen:
                yield f"{name}.{variable}", entry
    elif not isinstance(value, (type, ModuleType)):
        for attribute, entry in getattr(value, "__dict__", {}).items():
            yield f"{name}.{attribute}", entry


def _outer_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the defaults, closure and global variables that a function refers to."""
    code, outer = function.__code__, function.__globals__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # The variable has no value yet.
            yield variable, cell.cell_contents
    for variable in code.co_names:
        if variable in outer:
            yield variable, outer[variable]


def _fingerprint(value: Any, names: Mapping[int, str]) -> Any:
    """Return a fingerprint that differs if a value has changed; None if it cannot be pickled."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value, type(value)
    if isinstance(value, FunctionType):
        return None  # the pickle of a function holds global variables
    file = _LimitedFile()
    try:
        _Pickler(file, names).dump(value)
    except Exception:
        return None
    return (hashlib.sha256(file.getvalue()).digest(),)


class _LimitedFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_BYTES:
            raise OverflowError(f"more than {_MAX_BYTES} bytes")
        return super().write(data)


class _Pickler(cloudpickle.Pickler):
    """Pickler that refers to the module's parts by name."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))
