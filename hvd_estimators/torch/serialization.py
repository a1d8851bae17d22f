"""Serialization of modules and optimizers; a loaded optimizer is bound to its module.

Modules are pickled by value. ``torch.nn.utils.parametrize``, on which ``weight_norm``,
``spectral_norm`` and ``orthogonal`` are based, gives a module a class that raises when it is
pickled. `Pickler` recreates such a module from its original class, and restores the
parametrizations with the other attributes. The module is also a ``pickle_module`` for
``torch.save``.
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
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import IO, Any

import cloudpickle
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from hvd_estimators._util import unpickle_imports
from hvd_estimators._util.documents import to_python
from hvd_estimators._util.temp_files import LazyFile, LocalFile
from hvd_estimators.exceptions import ParamError, StoreError

logger = logging.getLogger(__name__)

_LARGE_BYTES = 2**25


class Pickler(cloudpickle.Pickler):
    """Pickler like cloudpickle's that also supports modules with parametrizations."""

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
        return super().reducer_override(obj)


def _calls_hooks(function: FunctionType) -> bool:
    """Return whether torch has wrapped the ``step`` of an optimizer class to call hooks.

    A pickled wrapper would contain a copy of torch's hook table, and would not call a rank's hooks.
    Torch wraps the function again when an object of the class is created or unpickled.
    """
    wrap = torch.optim.Optimizer.profile_hook_step
    return function.__globals__ is wrap.__globals__ and hasattr(function, "hooked")


def _itself(function: FunctionType) -> FunctionType:
    return function


class OptimizerPickler(Pickler):
    """Pickler that saves all attributes of optimizers; torch drops unknown attributes."""

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's pickle reduction. Called by pickle."""
        if isinstance(obj, torch.optim.Optimizer) and _has_torch_state(obj):
            return copyreg.__newobj__, (type(obj),), _optimizer_state(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _has_torch_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer uses torch's pickling, which drops custom attributes."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.__getstate__ is base.__getstate__ and kind.__reduce_ex__ is base.__reduce_ex__


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes, without the hooks that belong to this process."""
    optimizer_base = torch.optim.Optimizer([torch.zeros(1)], {})
    bookkeeping = vars(optimizer_base).keys() - optimizer_base.__getstate__().keys()
    # A scheduler replaces step() on the object.
    left_out = bookkeeping | {"step"}
    return {name: value for name, value in vars(optimizer).items() if name not in left_out}


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
        if mapped and not isinstance(document, bytes):
            return torch.load(os.fspath(document), mmap=True, **options)
        module: torch.nn.Module = torch.load(file, **options)
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
    """Serialize an optimizer, with names in place of the module's parameters.

    Parameter groups, options and state are preserved, for any optimizer class.

    Raises
    ------
    ParamError
        If the optimizer holds a parameter that does not belong to the module.
    """
    named = plain_module(module).named_parameters()
    names = {id(parameter): name for name, parameter in named}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ParamError(
                    f"optimizer: it holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not one of the model's. Create the optimizer from model.parameters() of "
                    "this model. In a grid over model, give each model with its own optimizer: "
                    "{estimator.model: net, estimator.optimizer: optimizer}."
                )

    return _dump(optimizer, names)


def load_optimizer(document: bytes, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Load an optimizer that `dump_optimizer` wrote, bound to a module's parameters."""
    parameters = dict(plain_module(module).named_parameters())
    optimizer: torch.optim.Optimizer = _load(document, parameters)
    return optimizer


def _dump(value: Any, references: Mapping[int, Any]) -> bytes:
    """Pickle a value, with references in place of objects, by their id."""

    class Referring(OptimizerPickler):
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
    """Return an optimizer's state with the names of its parameters, for `restore_optimizer`."""
    return {"optimizer": optimizer.state_dict(), "groups": group_names(optimizer, module)}


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
    groups = list(zip(state["param_groups"], content.get("groups", ()), strict=False))
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
    if lost:
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
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        loaded = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            current = loaded.get(name)
            if torch.is_tensor(value) and torch.is_tensor(current) and current.dtype != value.dtype:
                loaded[name] = value.to(current.device, copy=True)


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
    parts = {id(part): (kind, name) for kind, name, part in _parts_of(module)}
    return {**parts, id(optimizer): ("optimizer", "")}


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
