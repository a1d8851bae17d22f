"""Serialization of modules and optimizers; a loaded optimizer is bound to its module.

Modules are pickled by value. ``torch.nn.utils.parametrize``, on which ``weight_norm``,
``spectral_norm`` and ``orthogonal`` are based, gives a module a class that raises when it is
pickled. `Pickler` recreates such a module from its original class, and restores the
parametrizations with the other attributes. It also pickles the hooks of parameters, which torch
drops. The module is also a ``pickle_module`` for ``torch.save``.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import importlib
import io
import logging
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MappingProxyType, MethodType
from typing import IO, Any

import cloudpickle
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hvd_estimators._util import unpickle_imports
from hvd_estimators._util.documents import to_python
from hvd_estimators._util.temp_files import LazyFile, LocalFile
from hvd_estimators.exceptions import ParamError, StoreError

logger = logging.getLogger(__name__)

_LARGE_BYTES = 2**25

_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Pickler(cloudpickle.Pickler):
    """Pickler like cloudpickle's that also supports parametrizations and parameters' hooks."""

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's pickle reduction. Called by pickle."""
        if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
            given = parametrize.type_before_parametrizations(obj)
            # In Python 3.11 and later, all objects have __getstate__.
            get_state = getattr(given, "__getstate__", None)
            state = dict(vars(obj)) if get_state is None else get_state(obj)
            tensors: Any = obj.parametrizations
            return _parametrized, (given, tuple(tensors)), state
        if isinstance(obj, FunctionType) and _calls_hooks(obj):
            return _itself, (obj.__wrapped__,)  # type: ignore[attr-defined]
        if isinstance(obj, MethodType) and _calls_hooks(obj.__func__):
            return functools.partial, (_step_of_class, type(obj.__self__), obj.__self__)
        if hooks_of(obj):
            # Hooks are pickled as state, because they may refer to their parameter.
            make, arguments = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return make, arguments, hooks_of(obj), None, None, _set_hooks
        return super().reducer_override(obj)


def hooks_of(value: Any) -> dict[str, Any]:
    """Return the hooks of a parameter, by the attribute that holds them; empty for other values."""
    if not isinstance(value, torch.nn.Parameter):
        return {}
    hooks = {name: getattr(value, name) for name in _PARAMETER_HOOKS}
    return {name: by_id for name, by_id in hooks.items() if by_id}


def _set_hooks(owner: Any, hooks: Mapping[str, Mapping[int, Any]]) -> None:
    """Set the hooks of a parameter or an optimizer."""
    _reserve_ids(hooks)
    for name, by_id in hooks.items():
        setattr(owner, name, by_id)


def _reserve_ids(attributes: Mapping[str, Any]) -> None:
    """Give new hooks of this process other ids than loaded hooks, which they would replace."""
    for name, by_id in attributes.items():
        if name.endswith("hooks") and isinstance(by_id, dict):
            ids = [key for key in by_id if isinstance(key, int)]
            RemovableHandle.next_id = max(RemovableHandle.next_id, *(key + 1 for key in ids), 0)


def copy_hooks(given: torch.nn.Module, trained: torch.nn.Module) -> None:
    """Give a trained module the hooks of the original module's parameters.

    Hooks that refer to the original module or its parameters refer to the trained ones afterwards.
    """
    hooks = {
        name: {attribute: OrderedDict(by_id) for attribute, by_id in hooks_of(parameter).items()}
        for name, parameter in plain_module(given).named_parameters()
        if hooks_of(parameter)
    }
    parameters = dict(plain_module(trained).named_parameters())
    if hooks.keys() <= parameters.keys():
        for name, found in with_references_to(hooks, (given, None), (trained, None)).items():
            _set_hooks(parameters[name], found)


def _calls_hooks(function: Any) -> bool:
    """Return whether torch has wrapped the ``step`` of an optimizer class to call hooks.

    A pickled wrapper would contain a copy of torch's hook table, and would not call a rank's hooks.
    Torch wraps the function again when an object of the class is created or unpickled.
    """
    wrap = torch.optim.Optimizer.profile_hook_step
    return (
        isinstance(function, FunctionType)
        and function.__globals__ is wrap.__globals__
        and hasattr(function, "hooked")
    )


def _itself(function: FunctionType) -> FunctionType:
    return function


def _step_of_class(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the ``step`` of an optimizer class, which calls hooks, for one of its objects."""
    return kind.step(*args, **kwargs)


class OptimizerPickler(Pickler):
    """Pickler that saves hooks and all attributes of optimizers; torch drops unknown attributes."""

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's pickle reduction. Called by pickle."""
        if isinstance(obj, torch.optim.Optimizer) and _has_torch_state(obj):
            make: Any = copyreg.__newobj__  # type: ignore[attr-defined]
            state = _optimizer_state(obj), step_hooks_of(obj)
            return make, (type(obj),), state, None, None, _set_optimizer_state
        return super().reducer_override(obj)


def _has_torch_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer uses torch's pickling, at least for one direction."""
    kind, base = type(optimizer), torch.optim.Optimizer
    is_of_torch = kind.__getstate__ is base.__getstate__ or kind.__setstate__ is base.__setstate__
    return is_of_torch and kind.__reduce_ex__ is base.__reduce_ex__


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes with the user's ``step``, without hooks.

    Torch's ``__getstate__`` drops unknown attributes, so it is not used. A wrapper's may drop
    flags, and the ``defaults``, which torch's ``__setstate__`` needs.
    """
    if type(optimizer).__getstate__ is not torch.optim.Optimizer.__getstate__:
        plain = {n: v for n, v in vars(optimizer).items() if isinstance(v, (int, float, str))}
        return {**plain, "defaults": optimizer.defaults, **optimizer.__getstate__()}
    optimizer_base = torch.optim.Optimizer([torch.zeros(1)], {})
    bookkeeping = vars(optimizer_base).keys() - optimizer_base.__getstate__().keys()
    left_out = bookkeeping | {"step"}
    state = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    step = users_step(optimizer)
    return state if step is None else {**state, "step": step}


def users_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Return the ``step`` that the user has set on an optimizer, without a scheduler's wrapper."""
    step: Any = vars(optimizer).get("step")
    while hasattr(step, "_wrapped_by_lr_sched"):
        function = step.__wrapped__
        if function is type(optimizer).step:
            return None
        step = MethodType(function, optimizer)
    return step


def step_hooks_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's hooks that run in a step, by the attribute that holds them."""
    hooks = {name: vars(optimizer).get(name) for name in _STEP_HOOKS}
    return {name: by_id for name, by_id in hooks.items() if by_id}


def _set_optimizer_state(
    optimizer: torch.optim.Optimizer, state: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    attributes, hooks = state
    # torch's __setstate__ changes step() of the class: it then reads these tables of each object.
    # A wrapper that skips the base class's constructor lacks them.
    for name in _STEP_HOOKS:
        setattr(torch.optim.Optimizer, name, MappingProxyType({}))
    optimizer.__setstate__(attributes)
    _set_hooks(optimizer, hooks)


def _parametrized(kind: type[torch.nn.Module], names: tuple[str, ...]) -> torch.nn.Module:
    """Return a module with some parametrized tensors and without other attributes."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.zeros(()))
        parametrize.register_parametrization(module, name, torch.nn.Identity(), unsafe=True)
    return module


def plain_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the original module of a ``torch.compile`` module; any other module unchanged.

    Both modules have the same parameters, but the compiled module's parameter names have a prefix.
    """
    # torch.compile stores the module in _orig_mod, which becomes a prefix of the names.
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def dump_module(module: torch.nn.Module) -> bytes:
    """Serialize a module: TorchScript as TorchScript, all other modules pickled by value.

    After loading, a ``torch.compile`` module is compiled again at its first call, with the same
    options. If the options cannot be pickled, the plain module is loaded instead.
    """
    buffer = io.BytesIO()
    _write_module(module, buffer)
    return buffer.getvalue()


def module_file(module: torch.nn.Module) -> LocalFile:
    """Write a module to a file as `dump_module` does; the module may exceed the memory."""
    local = LocalFile()
    with open(local.path, "wb") as file:
        _write_module(module, file)
    return local


def module_payload(module: torch.nn.Module) -> bytes | LocalFile:
    """Return the `dump_module` result; for a large module, a file that is written when read."""
    tensors = (*module.parameters(), *module.buffers())
    if sum(0 if is_lazy(t) else t.nbytes for t in tensors) < _LARGE_BYTES:
        return dump_module(module)
    return LazyFile(functools.partial(_write_module, module))


def load_module(document: bytes | os.PathLike[str], mapped: bool = False) -> torch.nn.Module:
    """Load a module that `dump_module` or `module_payload` wrote, on the CPU.

    Parameters
    ----------
    document : bytes or path
        The serialized module.
    mapped : bool
        Memory-map the tensors of a file instead of reading them. Processes that load the same file
        then share one copy, until a process changes a tensor.
    """
    options: dict[str, Any] = {
        "map_location": "cpu",
        "weights_only": False,
        "pickle_module": unpickle_imports,
    }
    with io.BytesIO(document) if isinstance(document, bytes) else open(document, "rb") as file:
        with zipfile.ZipFile(file) as archive:
            is_script = any(name.endswith("/constants.pkl") for name in archive.namelist())
        file.seek(0)
        if is_script:
            return torch.jit.load(file, map_location="cpu")
        is_mapped = mapped and not isinstance(document, bytes)
        source = {"f": os.fspath(document), "mmap": True} if is_mapped else {"f": file}
        module: torch.nn.Module = torch.load(**source, **options)
    for part in module.modules():
        _reserve_ids(vars(part))
    return module


def _write_module(module: torch.nn.Module, file: IO[bytes]) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        torch.jit.save(module, file)
        return
    uncompiled = plain_module(module)
    if uncompiled is not module:
        try:
            _pickle(module, file)
            return
        except Exception as error:
            logger.warning(
                "model: the options of torch.compile cannot be sent to other processes (%s: %s). "
                "They run the module without compiling it.",
                type(error).__name__,
                error,
            )
            file.seek(0)
            file.truncate()
    _pickle(without_compile_notes(uncompiled), file)


def without_compile_notes(module: torch.nn.Module) -> torch.nn.Module:
    """Return a plain module without the arguments of ``torch.compile``, which may not pickle.

    If Lightning is imported, ``torch.compile`` stores these arguments on the module.
    """
    bare = plain_module(module)
    if "_compile_kwargs" in vars(bare):
        bare = copy.copy(bare)
        del vars(bare)["_compile_kwargs"]
    return bare


def _pickle(module: torch.nn.Module, file: IO[bytes]) -> None:
    """Pickle a module, without intermediate copies of the tensors."""
    pickle_module = sys.modules[__name__]
    torch.save(module, file, pickle_module=pickle_module, pickle_protocol=pickle.HIGHEST_PROTOCOL)


def dump_optimizer(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> bytes:
    """Serialize an optimizer, with references to the module's parameters.

    Parameter groups, options, state and step hooks are preserved, for any optimizer class. Hooks
    can refer to the module and its parts.

    Raises
    ------
    ParamError
        If the optimizer holds a parameter that does not belong to the module.
    """
    own = set(map(id, plain_module(module).parameters()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ParamError(
                    f"optimizer: it holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not one of the model's. Create the optimizer from model.parameters() of "
                    "this model. If the parameter belongs to a loss, put the loss into the module "
                    "before that: model.loss_func = loss_func, and set loss=model.loss_func. In a "
                    "grid over model, give each model with its own optimizer: "
                    "{estimator.model: net, estimator.optimizer: optimizer}."
                )

    return _dump(optimizer, _references_to(module, None))


def load_optimizer(document: bytes, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Load an optimizer that `dump_optimizer` wrote, bound to a module's parameters."""
    optimizer: torch.optim.Optimizer = _load(document, _referents(module, None))
    return optimizer


def check_hooks(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that the hooks of a module's parameters and of an optimizer can be sent to the ranks.

    Raises
    ------
    ParamError
        If a hook cannot be pickled, or a parameter's hook refers to an optimizer.
    """
    hooks = [
        (f"model: a hook of the parameter {name!r}", hook, _ParameterHookPickler)
        for name, parameter in plain_module(module).named_parameters()
        for by_id in hooks_of(parameter).values()
        for hook in by_id.values()
    ]
    if hooks and isinstance(module, torch.jit.ScriptModule):
        raise ParamError(
            f"{hooks[0][0]} would be lost, because TorchScript does not save hooks. Set the module "
            "that is not scripted, or compile it with torch.compile."
        )
    if optimizer is not None:
        hooks += [
            ("optimizer: a step hook", hook, OptimizerPickler)
            for by_id in step_hooks_of(optimizer).values()
            for hook in by_id.values()
        ]
        hooks.append(("optimizer: its own step()", users_step(optimizer), OptimizerPickler))
    references = _references_to(module, None)
    for source, hook, pickler in hooks:
        try:
            _dump(hook, references, pickler)
        except ParamError as error:
            raise ParamError(f"{source} {error}") from None
        except Exception as error:
            raise ParamError(
                f"{source} is sent to the ranks with cloudpickle, which fails: "
                f"{type(error).__name__}: {error}. Create objects that cannot be sent within the "
                "hook, or register the hook on the ranks, as in a callback's on_train_begin()."
            ) from error


class _ParameterHookPickler(Pickler):
    """Pickler that rejects optimizers: a parameter's hook would get a copy."""

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's pickle reduction. Called by pickle."""
        if isinstance(obj, torch.optim.Optimizer):
            raise ParamError(
                f"refers to an optimizer ({type(obj).__name__}), and gradients are not averaged "
                "over the ranks when the hook runs. Use optimizer.register_step_pre_hook(), or a "
                "train_minibatch_fn."
            )
        return super().reducer_override(obj)


def _dump(
    value: Any, references: Mapping[int, Any], pickler: type[Pickler] = OptimizerPickler
) -> bytes:
    """Pickle a value, with references in place of objects, by their id."""

    class Referring(pickler):  # type: ignore[misc, valid-type]
        def persistent_id(self, obj: Any) -> Any:
            return references.get(id(obj))

    buffer = io.BytesIO()
    Referring(buffer).dump(value)
    return buffer.getvalue()


def _load(document: bytes, referents: Mapping[Any, Any]) -> Any:
    """Load a pickle with references to these objects."""

    class Referred(unpickle_imports.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return referents[pid]

    return Referred(io.BytesIO(document)).load()


def optimizer_content(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> dict[str, Any]:
    """Return an optimizer's state with its groups and their names, for `restore_optimizer`."""
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    groups = group_names(optimizer, module)
    return {"optimizer": optimizer.state_dict(), "groups": groups, "options": options}


def group_names(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> list[list[str]]:
    """Return the names of the parameters in each group; "" for a parameter outside the module."""
    names = {id(p): name for name, p in plain_module(module).named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def restore_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, content: Mapping[str, Any]
) -> None:
    """Restore an optimizer's state, with the groups and parameters that training added.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Optimizer with its original groups.
    module : torch.nn.Module
        Module with the parameters.
    content : mapping
        Result of `optimizer_content`. Added groups with parameters outside the module, which do not
        exist here, are skipped.
    """
    named = dict(plain_module(module).named_parameters())
    state = content["optimizer"]
    saved_groups = content.get("options") or state["param_groups"]
    groups = list(zip(saved_groups, content.get("groups", ()), strict=False))
    lost = [
        number
        for number, (_, names) in enumerate(groups)
        if number >= len(optimizer.param_groups) and not all(name in named for name in names)
    ]
    for number, (saved, names) in enumerate(groups):
        if number in lost:
            continue
        if number >= len(optimizer.param_groups):
            options = {key: value for key, value in saved.items() if key != "params"}
            optimizer.add_param_group({**options, "params": [named[name] for name in names]})
        elif len(names) > len(optimizer.param_groups[number]["params"]):
            optimizer.param_groups[number]["params"][:] = [named[name] for name in names]
    if lost and _is_of_torch(state):
        keys = {key for number in lost for key in state["param_groups"][number]["params"]}
        state = {
            **state,
            "state": {key: value for key, value in state["state"].items() if key not in keys},
            "param_groups": [g for n, g in enumerate(state["param_groups"]) if n not in lost],
        }
    load_optimizer_state(optimizer, state)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state with the dtypes that it was saved with.

    ``load_state_dict`` converts floating-point entries to the dtype of their parameter. An
    optimizer that stores an entry in another dtype (``mu_product`` of NAdam) would then not resume
    bit for bit.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Optimizer with the state's parameter groups.
    state : dict
        Result of the optimizer's ``state_dict()``.
    """
    sharing = [v for v in vars(optimizer).values() if _shares_groups(v, optimizer)]
    before = optimizer.param_groups
    optimizer.load_state_dict(state)
    for inner in sharing:
        # Loading gives both new groups, or only the inner one.
        if optimizer.param_groups is before:
            optimizer.param_groups = inner.param_groups
        else:
            inner.param_groups = optimizer.param_groups
    if not _is_of_torch(state):
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        if parameter in optimizer.state and number in state["state"]:
            loaded, saved = optimizer.state[parameter], state["state"][number]
            optimizer.state[parameter] = _with_dtypes_of(saved, loaded)


def _is_of_torch(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state has torch's form; wrappers may have their own."""
    return "state" in state and "param_groups" in state


def _shares_groups(value: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a value is an optimizer within another one that has the same groups."""
    is_inner = isinstance(value, torch.optim.Optimizer) and value is not optimizer
    return is_inner and value.param_groups is optimizer.param_groups


def _with_dtypes_of(saved: Any, loaded: Any) -> Any:
    """Return a loaded state in which tensors, also in lists, have their saved dtype."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {k: _with_dtypes_of(saved.get(k), value) for k, value in loaded.items()}
    if isinstance(saved, (list, tuple)) and type(saved) is type(loaded):
        return type(saved)(map(_with_dtypes_of, saved, loaded))
    return loaded


def save_state(state: Mapping[str, Any], file: IO[bytes] | str) -> None:
    """Write tensors and plain values with ``torch.save``, for `load_state`.

    NumPy scalars, which an optimizer's options may hold, are converted: `load_state` would reject
    them.
    """
    torch.save(to_python(state), file)


def load_state(file: IO[bytes] | str) -> dict[str, Any]:
    """Load a file that `save_state` wrote, on the CPU. Runs no code from the file."""
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def dump_with_references(
    value: Any,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    shared: Iterable[Any] = (),
) -> bytes:
    """Serialize the user's objects, with references to the model and the optimizer.

    On the ranks, a scheduler then steps the training optimizer. A function that names the model
    uses the trained model.

    Parameters
    ----------
    value : object
        Object to pickle, in one document, so that shared objects stay shared.
    module, optimizer
        The model and its optimizer. References replace both, and the model's layers, parameters and
        buffers.
    shared : iterable of object
        If an object is a global variable of a module that the ranks import, the document refers to
        that variable. Functions of the module then use the same object.
    """
    references: dict[int, tuple[str, ...]] = {}
    for entry in shared:
        variable = _global_variable(entry)
        if variable is not None:
            references[id(entry)] = ("global", *variable)
    references.update(_references_to(module, optimizer))
    return _dump(value, references)


def _references_to(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[int, tuple[str, ...]]:
    references: dict[int, tuple[str, ...]] = {
        id(part): (kind, name) for kind, name, part in _parts_of(module)
    }
    if optimizer is not None:
        references[id(optimizer)] = ("optimizer", "")
    return references


def load_with_references(
    document: bytes, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Any:
    """Load the result of `dump_with_references`, with references to this model and optimizer."""
    return _load(document, _referents(module, optimizer))


def _referents(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> _Referents:
    parts = _Referents({(kind, name): part for kind, name, part in _parts_of(module)})
    parts["optimizer", ""] = optimizer
    return parts


def with_references_to(
    value: Any,
    before: tuple[torch.nn.Module, torch.optim.Optimizer | None],
    after: tuple[torch.nn.Module, torch.optim.Optimizer | None],
) -> Any:
    """Return a value whose objects refer to another model and optimizer.

    Parameters
    ----------
    value : object
        Returned unchanged if it refers to no part of ``before``, otherwise copied.
    before, after : tuple
        A model and its optimizer.
    """
    references = _Recorded(_references_to(*before))
    document = _dump(value, references)
    return _load(document, _referents(*after)) if references.are_used else value


class _Recorded(dict[int, tuple[str, ...]]):
    """References that record whether any of them was needed."""

    are_used = False

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        self.are_used |= found is not None
        return found


class _Referents(dict[tuple[str, ...], Any]):
    """Objects by their references; a global variable is imported."""

    def __missing__(self, key: tuple[str, ...]) -> Any:
        _, module, variable = key
        return getattr(importlib.import_module(module), variable)


def _parts_of(module: torch.nn.Module) -> list[tuple[str, str, Any]]:
    """Return kind, name and object of each part of a model."""
    inner = plain_module(module)
    return [
        ("model", "", module),
        *(("module", name, part) for name, part in inner.named_modules()),
        *(("parameter", name, part) for name, part in inner.named_parameters()),
        *(("buffer", name, part) for name, part in inner.named_buffers()),
    ]


def _global_variable(value: Any) -> tuple[str, str] | None:
    """Return module and name of the importable global variable that holds a value, if any."""
    by_value = ("__main__", *cloudpickle.list_registry_pickle_by_value())
    for name, module in list(sys.modules.items()):
        if getattr(module, "__spec__", None) is None or f"{name}.".startswith(
            tuple(f"{root}." for root in by_value)
        ):
            continue
        for variable, entry in list(vars(module).items()):
            if entry is value:
                return name, variable
    return None


def trained_file(
    module: torch.nn.Module, given: Callable[[], torch.nn.Module], further: Mapping[str, Any]
) -> LocalFile:
    """Write a trained module and further plain values to a file. Runs on the ranks.

    The file holds tensors and plain values only. One of these values is the pickled module, in
    which names stand for parameters and buffers. The pickled module is omitted if attributes of the
    module cannot be pickled.

    Parameters
    ----------
    module : torch.nn.Module
        The module; it is moved to the CPU.
    given : callable
        Returns the module that the rank received.
    further : mapping
        Tensors and plain values.
    """
    module = module.cpu()
    inner = plain_module(module)
    tensors = dict([*inner.named_parameters(), *inner.named_buffers()])
    state = {**further, "model": inner.state_dict(), "tensors": tensors}
    try:
        if isinstance(module, torch.jit.ScriptModule):
            state["script"] = dump_module(module)
        else:
            state["module"] = _pickled_trained(module, tensors)
    except Exception as error:
        if state["model"].keys() != plain_module(given()).state_dict().keys():
            raise
        state["lost"] = _unpicklable(inner) or [f"{type(error).__name__}: {error}"]
    # The user's extra state may be of any type; the pickled module holds it.
    state["model"] = {n: v for n, v in state["model"].items() if isinstance(v, torch.Tensor)}
    local = LocalFile()
    save_state(state, local.path)
    return local


def load_trained(
    state: LocalFile, given: Callable[[], torch.nn.Module]
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Load the module that `trained_file` wrote, and all values. Runs on the driver.

    Parameters
    ----------
    state : LocalFile
        The file.
    given : callable
        Returns a copy of the original module. The copy gets the weights if the file has no module.
    """
    content = load_state(state.path)
    if "script" in content:
        return load_module(content["script"]), content
    if "module" in content:
        return _load(content["module"], content["tensors"]), content
    logger.warning(
        "The trained module cannot be pickled because of %s. The returned model has the trained "
        "weights. Its other attributes are those from before training.",
        ", ".join(content["lost"]),
    )
    module = given()
    plain_module(module).load_state_dict(content["model"], strict=False)
    return module, content


def _pickled_trained(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> bytes:
    names = {id(tensor): name for name, tensor in tensors.items()}

    class TrainedPickler(Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return names.get(id(obj))

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                # The driver may have no GPU.
                return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    def dump(value: torch.nn.Module) -> bytes:
        buffer = io.BytesIO()
        TrainedPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()

    inner = plain_module(module)
    if inner is not module:
        # The options of torch.compile may not be picklable.
        with contextlib.suppress(Exception):
            return dump(module)
    return dump(without_compile_notes(inner))


def _unpicklable(module: torch.nn.Module) -> list[str]:
    """Return the names of attributes that cannot be pickled."""
    names = []
    managed = vars(torch.nn.Module())
    for prefix, part in module.named_modules():
        # A LightningModule's state does not contain its Trainer.
        state = part.__getstate__() if hasattr(part, "__getstate__") else vars(part)
        for name, value in dict(state).items():
            if name in managed:
                continue
            try:
                cloudpickle.dumps(value)
            except Exception:
                names.append(f"{prefix}.{name}" if prefix else name)
    return names


def read_content(file: IO[bytes], safe: bool, custom_objects: Any) -> dict[str, Any]:
    """Read a ``torch.save`` file, on the CPU.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Run no code from the file.
    custom_objects : object
        Not used.

    Raises
    ------
    StoreError
        If ``safe`` is set and the file holds more than tensors and plain values.
    """
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=safe)
    except pickle.UnpicklingError as error:
        raise StoreError(
            "The checkpoint holds more than tensors and plain values, and loading these runs code "
            "from the file. If you trust its author, load it with safe=False."
        ) from error
    return content
