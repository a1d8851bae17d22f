"""Serialization of modules, optimizers and the objects that share them.

Objects that are pickled together keep their references to each other: an optimizer holds the
parameters of its module, a scheduler its optimizer, and a function the layer that it names. So the
driver sends what a rank trains as one document, and rank 0 returns one.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import io
import itertools
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import IO, Any, TypeVar

import cloudpickle
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hvd_estimators._util import unpickle_imports
from hvd_estimators._util.documents import to_python
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import Store
from hvd_estimators.torch.shard_files import with_tensors
from hvd_estimators.torch.sharding import sharded_optimizer_state, with_parts
from hvd_estimators.torch.stored_weights import stored_weights

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE_BYTES = 2**25

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Pickler(cloudpickle.Pickler):
    """Pickler like cloudpickle's that also takes torch's special modules, and whole optimizers.

    - Parametrized modules (``weight_norm``, ``spectral_norm``) have a generated class that raises.
    - TorchScript is saved as TorchScript.
    - torch drops the attributes of optimizers that it does not know.
    """

    shared: Mapping[int, tuple[str, str]] = {}
    """Module and variable of objects that the receiver imports, by id."""

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's pickle reduction. Called by pickle."""
        if id(obj) in self.shared:
            return _variable, self.shared[id(obj)]
        if isinstance(obj, torch.nn.Module):
            return self._reduce_module(obj)
        if isinstance(obj, torch.optim.Optimizer) and _has_torch_state(obj):
            make: Any = copyreg.__newobj__  # type: ignore[attr-defined]
            return make, (type(obj),), _optimizer_state(obj), None, None, _set_optimizer_state
        if isinstance(obj, FunctionType) and _calls_hooks(obj):
            return _itself, (obj.__wrapped__,)  # type: ignore[attr-defined]
        if isinstance(obj, MethodType) and _calls_hooks(obj.__func__):
            return functools.partial, (_step_of_class, type(obj.__self__), obj.__self__)
        return super().reducer_override(obj)

    def _reduce_module(self, module: torch.nn.Module) -> Any:
        if isinstance(module, torch.jit.ScriptModule):
            buffer = io.BytesIO()
            torch.jit.save(module, buffer)
            return _load_script, (buffer.getvalue(),)
        if parametrize.is_parametrized(module):
            kind = parametrize.type_before_parametrizations(module)
            # In Python 3.11 and later, all objects have __getstate__.
            get_state = getattr(kind, "__getstate__", lambda module: dict(vars(module)))
            tensors: Any = module.parametrizations
            return _parametrized, (kind, tuple(tensors)), get_state(module)
        return super().reducer_override(module)


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes without hooks, and without a scheduler's ``step``."""
    base = torch.optim.Optimizer([torch.zeros(1)], {})
    left_out = vars(base).keys() - base.__getstate__().keys() | {"step"}
    return {name: value for name, value in vars(optimizer).items() if name not in left_out}


def _variable(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _itself(value: T) -> T:
    return value


def _load_script(document: bytes) -> Any:
    return torch.jit.load(io.BytesIO(document), map_location="cpu")


def _calls_hooks(function: Any) -> bool:
    """Return whether torch has wrapped the ``step`` of an optimizer class to call hooks.

    A pickled wrapper would contain a copy of torch's hook table, and would not call a rank's hooks.
    Torch wraps the function again when an object of the class is created or unpickled.
    """
    wrap = torch.optim.Optimizer.profile_hook_step
    is_function = isinstance(function, FunctionType)
    return is_function and function.__globals__ is wrap.__globals__ and hasattr(function, "hooked")


def _step_of_class(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the ``step`` of an optimizer class, which calls hooks, for one of its objects."""
    return kind.step(*args, **kwargs)


def _has_torch_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer uses torch's pickling, at least for one direction."""
    kind, base = type(optimizer), torch.optim.Optimizer
    is_of_torch = kind.__getstate__ is base.__getstate__ or kind.__setstate__ is base.__setstate__
    return is_of_torch and kind.__reduce_ex__ is base.__reduce_ex__


def _set_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    # torch's __setstate__ changes step() of the class: it then reads these tables of each object.
    # A wrapper that skips the base class's constructor lacks them.
    for name in _STEP_HOOKS:
        setattr(torch.optim.Optimizer, name, MappingProxyType({}))
    optimizer.__setstate__(state)


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


def check_parameters(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that an optimizer has only parameters of the module, and that neither has hooks.

    Raises
    ------
    ParamError
        If the optimizer holds another parameter, or if torch would not send a hook of a parameter
        or an optimizer, or a ``step`` that is not of the optimizer's class. Also if the optimizer
        is one of TorchScript, or a tensor of the module is sparse.
    """
    if optimizer is not None and isinstance(module, torch.jit.ScriptModule):
        raise ParamError(
            "model: found TorchScript, whose parameters an optimizer cannot share in another "
            "process. Train the module that it was made of. TorchModel predicts with TorchScript."
        )
    for name, tensor in itertools.chain(module.named_buffers(), module.named_parameters()):
        if tensor.layout != torch.strided:
            raise ParamError(
                f"model: {name!r} is sparse ({tensor.layout}), and processes send and compare "
                "dense tensors only. Register the indices and the values as buffers, and make the "
                "sparse tensor of them in forward()."
            )
    own = {id(p): (name, p) for name, p in plain_module(module).named_parameters()}
    for name, parameter in own.values():
        tables = ("_backward_hooks", "_post_accumulate_grad_hooks")
        if any(getattr(parameter, table, None) for table in tables):
            raise ParamError(
                f"model: the parameter {name!r} has a hook, and torch does not send hooks of "
                "parameters to other processes. Register the hook on the ranks, in a callback's "
                f"on_train_begin(), such as module.get_parameter({name!r}).register_hook(...)."
            )
    if optimizer is None:
        return
    step = vars(optimizer).get("step", type(optimizer).step)
    # A scheduler wraps the step of the class.
    is_of_class = inspect.unwrap(step) is inspect.unwrap(type(optimizer).step)
    if not is_of_class or any(getattr(optimizer, table, None) for table in _STEP_HOOKS):
        found = "a step hook" if is_of_class else "a replaced step()"
        raise ParamError(
            f"optimizer: the object has {found}, which torch does not send to other processes. "
            "Define step() in a class, or register hooks on the ranks, in a callback's "
            "on_train_begin(), such as optimizer.register_step_post_hook(...)."
        )
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


def dump_module(module: Any) -> bytes:
    """Serialize a module, or a tuple of objects that share one, by value.

    After loading, a ``torch.compile`` module is compiled again at its first call, with the same
    options.
    """
    buffer = io.BytesIO()
    _write(module, buffer)
    return buffer.getvalue()


def module_file(module: Any, shared: Iterable[Any] = ()) -> LocalFile:
    """Write a module to a file as `dump_module` does; the module may exceed the memory.

    Parameters
    ----------
    module : object
        A module, or objects that share one.
    shared : iterable of object
        If an object is a global variable of a module that the ranks import, the file refers to
        that variable. Functions of the module then use the same object.
    """
    local = LocalFile()
    with open(local.path, "wb") as file:
        _write(module, file, shared)
    return local


def module_payload(module: torch.nn.Module, *others: Any) -> bytes | LocalFile:
    """Return the `dump_module` result of a module, or of a tuple of it and other objects.

    For a large module, the result is a file.
    """
    content = (module, *others) if others else module
    tensors = (*module.parameters(), *module.buffers())
    if sum(0 if is_lazy(t) else t.nbytes for t in tensors) < _LARGE_BYTES:
        return dump_module(content)
    return module_file(content)


def load_module(
    document: bytes | os.PathLike[str],
    mapped: bool = False,
    unpickler: type[pickle.Unpickler] = unpickle_imports.Unpickler,
) -> Any:
    """Load what `dump_module`, `module_file` or `module_payload` wrote, on the CPU.

    Parameters
    ----------
    document : bytes or path
        The serialized module.
    mapped : bool
        Memory-map the tensors of a file instead of reading them. Processes that load the same file
        then share one copy, until a process changes a tensor.
    unpickler : type
        Loads the objects.
    """
    module: Any = SimpleNamespace(__name__=__name__, Unpickler=unpickler)
    is_bytes = isinstance(document, bytes)
    source: Any = io.BytesIO(document) if isinstance(document, bytes) else os.fspath(document)
    return _received(
        torch.load(
            source,
            map_location="cpu",
            weights_only=False,
            pickle_module=module,
            mmap=mapped and not is_bytes,
        )
    )


def _write(value: Any, file: IO[bytes], shared: Iterable[Any] = ()) -> None:
    """Pickle a value, without intermediate copies of the tensors."""
    found = ((id(entry), _global_variable(entry)) for entry in shared)
    variables = {key: variable for key, variable in found if variable is not None}
    kind = type("SharingPickler", (Pickler,), {"shared": variables})
    module: Any = SimpleNamespace(__name__=__name__, Pickler=kind)
    torch.save(_sent(value), file, pickle_module=module, pickle_protocol=pickle.HIGHEST_PROTOCOL)


def _sent(value: Any) -> tuple[int, Any]:
    return RemovableHandle.next_id, value


def _received(document: tuple[int, T]) -> T:
    next_id, value = document
    # A new hook with the id of a loaded one would replace it.
    RemovableHandle.next_id = max(RemovableHandle.next_id, next_id)
    return value


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


class _TensorPickler(Pickler):
    """Pickler that stores names of tensors.

    Parameters
    ----------
    file : file
        For the pickle.
    tensors : mapping of str to torch.Tensor
        Tensors by name.
    """

    def __init__(self, file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._names = {id(tensor): name for name, tensor in tensors.items()}

    def persistent_id(self, obj: Any) -> str | None:
        """Return the name of a tensor. Called by pickle."""
        return self._names.get(id(obj))


class _TensorUnpickler(unpickle_imports.Unpickler):
    def __init__(self, document: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(document))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]


def dump_optimizer(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> bytes:
    """Serialize an optimizer of any class, with the names of the module's parameters."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, dict(plain_module(module).named_parameters())).dump(_sent(optimizer))
    return buffer.getvalue()


def load_optimizer(document: bytes, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Load an optimizer that `dump_optimizer` wrote, bound to a module's parameters."""
    tensors = dict(plain_module(module).named_parameters())
    optimizer: torch.optim.Optimizer = _received(_TensorUnpickler(document, tensors).load())
    return optimizer


class _Copier(unpickle_imports.Unpickler):
    """Unpickler that copies the classes of scripts and notebooks, with the globals they use."""

    def _make_class(self, make: Callable[..., type], args: tuple[Any, ...]) -> type:
        *given, _, extra = args
        return make(*given, None, extra)


def copied(value: T) -> T:
    """Return a copy of a value, preserving references between its objects.

    Unlike `copy.deepcopy`, this function copies functions and classes of scripts, modules with
    computed tensors (``torch.nn.utils.weight_norm``), and all attributes of an optimizer.
    """
    loaded: T = load_module(dump_module(value), unpickler=_Copier)
    return loaded


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
        Result of `optimizer_content`; ``"options"`` may be missing.

    Raises
    ------
    ParamError
        If training has added parameters that are not the module's.
    """
    named = dict(plain_module(module).named_parameters())
    state = content["optimizer"]
    saved_groups = content.get("options") or state["param_groups"]
    for number, (saved, names) in enumerate(zip(saved_groups, content["groups"], strict=True)):
        is_new = number >= len(optimizer.param_groups)
        if not is_new and len(names) <= len(optimizer.param_groups[number]["params"]):
            continue
        if not named.keys() >= set(names):
            raise ParamError(
                "optimizer: training has added parameters that are not the model's, which a "
                "resumed run does not have. Make them a part of the model, or add their group in "
                "a callback's on_train_begin()."
            )
        parameters = [named[name] for name in names]
        if is_new:
            options = {key: value for key, value in saved.items() if key != "params"}
            optimizer.add_param_group({**options, "params": parameters})
        else:
            optimizer.param_groups[number]["params"][:] = parameters
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
    if _is_of_torch(state):
        state = sharded_optimizer_state(optimizer, state)
    else:
        state = with_parts(state, optimizer.param_groups[0]["params"][0])
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


def trained_file(
    module: torch.nn.Module, given: Callable[[], torch.nn.Module], others: tuple[Any, ...] = ()
) -> LocalFile:
    """Write a trained module and the objects that share it to a file. Runs on the ranks.

    The file has the weights alone if an object cannot be pickled.

    Parameters
    ----------
    module : torch.nn.Module
        The module; it is moved to the CPU, unless it has weights in files.
    given : callable
        Returns the module that the rank received.
    others : tuple
        Further objects, such as the optimizer.
    """
    if stored_weights(module) is None:
        module = module.cpu()
    local = LocalFile()
    try:
        # Ranks, and callbacks on them, have registered step hooks.
        with open(local.path, "wb") as file:
            _write({"objects": (module, *others)}, file)
        return local
    except Exception as error:
        failure = error
    state = plain_module(module).state_dict()
    if state.keys() != plain_module(given()).state_dict().keys():
        raise failure
    # The user's extra state may be of any type, and weights in files are not here.
    tensors = ((n, value) for n, value in state.items() if isinstance(value, torch.Tensor))
    weights = {name: value for name, value in tensors if not value.is_meta}
    lost = f"{type(failure).__name__}: {failure}"
    with open(local.path, "wb") as file:
        _write({"model": weights, "lost": lost}, file)
    return local


def load_trained(
    state: LocalFile, given: Callable[[], torch.nn.Module]
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Load the module that `trained_file` wrote, and the others. Runs on the driver.

    Parameters
    ----------
    state : LocalFile
        The file.
    given : callable
        Returns the module from before training, which gets the weights if the file has no module.

    Returns
    -------
    module : torch.nn.Module
        The trained module.
    tuple
        The further objects; empty if one cannot be pickled.
    """
    content: dict[str, Any] = load_module(state)
    if "objects" in content:
        module, *others = content["objects"]
        return module, tuple(others)
    logger.warning(
        "The trained model, optimizer, loss or metrics cannot be pickled (%s). The returned model "
        "has the trained weights. The rest is as before training.",
        content["lost"],
    )
    module = given()
    plain_module(module).load_state_dict(content["model"], strict=False)
    return module, ()


def read_content(file: IO[bytes], safe: bool, folder: tuple[Store, str]) -> dict[str, Any]:
    """Read a ``torch.save`` file, on the CPU.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Run no code from the file.
    folder : tuple of (Store, str)
        Folder of the files that the ranks wrote, if each holds a part of the model.

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
    return with_tensors(content, *folder)
