"""Modules whose weights are in files: fitted with ``sharding``, or made for ``init_weights``.

Such a module has parameters on the meta device, which have a shape and no memory, and an attribute
that tells the files. It is sent and saved without its weights, and reads them where it computes.
With ``only_trainable``, the files of ``init_weights`` are the base of the fitted model, which has
only the other weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import posixpath
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvd_estimators._util.documents import parse_object
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store.base import Store, store_of
from hvd_estimators.store.checkpoints import TensorFile
from hvd_estimators.store.files import fetch
from hvd_estimators.torch.tensor_files import StoredTensor, TensorReader

logger = logging.getLogger(__name__)

_WEIGHTS = "hvd_estimators weights"
"""Attribute of a module without weights, with its `StoredWeights`."""

_SUFFIX = ".safetensors"

INDEX = "model.safetensors.index.json"
"""Name of the file that tells which files have which weights."""

_END_BYTES = 2**20

_PATCHING = threading.RLock()


@dataclass(frozen=True)
class StoredWeights:
    """Files with the weights of a module, which is loaded without them.

    Attributes
    ----------
    files : tuple of TensorFile
        The files.
    store : Store or None
        The store of the files. Its options may be secrets, so it is not pickled; `find_weights_in`
        sets it again.
    folder : str
        The folder of the files.
    names : mapping of str to str
        Names in the files of parameters and buffers that have other names in the module.
    is_base : bool
        Whether the fitted model refers to the files, which are not copied.
    """

    files: tuple[TensorFile, ...]
    store: Store | None = None
    folder: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    is_base: bool = False

    def __reduce__(self) -> Any:
        """Leave out the store, whose options may be secrets. Pickles may be written to files."""
        return StoredWeights, (self.files, None, self.folder, self.names, self.is_base)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeights:
        return self

    @property
    def without_store(self) -> StoredWeights:
        """The same for a saved model: only a base keeps its folder."""
        return replace(self, store=None, folder=self.folder if self.is_base else "")

    def reader(self, mapped: bool = False) -> TensorReader:
        """Return a reader of the files.

        Raises
        ------
        StoreError
            If a file is missing or damaged.
        """
        assert self.store is not None
        try:
            paths = [f"{self.folder}/{file.name}" for file in self.files]
            reader = TensorReader(self.store, paths, mapped)
        except FileNotFoundError as error:
            raise StoreError(
                f"The weights of the model are missing ({error}). A model that fit() returned has "
                "them in the folder of its run: save it before you delete the run. A model that "
                "was saved there again has to be loaded again."
            ) from error
        for path, file in zip(paths, self.files, strict=True):
            if self.is_base and _mark(self.store, path) != file.sha256:
                raise StoreError(
                    f"{path!r} has changed since the fit, and the model needs its weights. Restore "
                    "the file."
                )
        return reader

    def local_copies(self) -> Iterator[tuple[str, LocalFile]]:
        """Yield the name and a verified local copy of each file; a base is not copied."""
        assert self.store is not None
        for file in () if self.is_base else self.files:
            yield file.name, fetch(self.store, f"{self.folder}/{file.name}", file.sha256)[0]


def stored_weights(module: Any) -> StoredWeights | None:
    """Return the files with a module's weights; None if the module has its weights."""
    found: StoredWeights | None = getattr(module, "__dict__", {}).get(_WEIGHTS)
    return found


def set_stored_weights(module: torch.nn.Module, weights: StoredWeights) -> None:
    """Note where a module's weights are."""
    vars(module)[_WEIGHTS] = weights


def find_weights_in(module: Any, store: Store, folder: str | None = None) -> None:
    """Note the store of a module's weights, and their folder in a saved model."""
    weights = stored_weights(module)
    if weights is not None:
        if weights.is_base or folder is None:
            folder = weights.folder
        own = store_of(folder, store, "init_weights")
        set_stored_weights(module, replace(weights, store=own, folder=folder))


def weights_place(module: Any) -> tuple[Store, str] | None:
    """Return store and folder of a module's weights, to send with a call; None if it has them."""
    weights = stored_weights(module)
    return None if weights is None or weights.store is None else (weights.store, weights.folder)


def complete(
    module: torch.nn.Module, weights_in: tuple[Store, str] | None = None
) -> torch.nn.Module:
    """Return a module that predicts, with weights from the `weights_place` that was sent with it.

    Processes share the memory of files on a local disk.
    """
    if weights_in is not None:
        find_weights_in(module, *weights_in)
    return load_weights(module, mapped=True)


def drop_weights(module: torch.nn.Module) -> None:
    """Move the parameters to the meta device.

    They stay the same objects, to which optimizers refer.
    """
    with _without_weak_references(module):
        for parameter in module.parameters():
            _replace(parameter, torch.empty_like(parameter, device="meta"))


def refer_to_base(module: torch.nn.Module, base: StoredWeights) -> None:
    """Drop the frozen weights that a base has, and note the base."""
    with _without_weak_references(module):
        for name, parameter in module.named_parameters():
            if name in base.names and not parameter.requires_grad:
                _replace(parameter, torch.empty_like(parameter, device="meta"))
    set_stored_weights(module, base)


def put_weights(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load some weights, also into parameters on the meta device."""
    with _without_weak_references(module):
        for name, parameter in module.named_parameters():
            if parameter.is_meta and name in weights:
                _replace(parameter, weights[name])
    module.load_state_dict(weights, strict=False)


@contextlib.contextmanager
def _without_weak_references(module: torch.nn.Module) -> Iterator[None]:
    """Let recurrent layers refer to their parameters again after the block.

    Torch does not swap tensors that have weak references.
    """
    layers = [part for part in module.modules() if isinstance(part, torch.nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    yield
    for layer in layers:
        layer._init_flat_weights()


def _replace(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter another tensor, on any device. It stays the same object."""
    made = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, made)


def load_weights(module: torch.nn.Module, mapped: bool = False) -> torch.nn.Module:
    """Give a module the weights of its files, if it lacks them, and return it.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    mapped : bool
        Whether to map files of a local disk into memory, which processes then share.

    Raises
    ------
    StoreError
        If a file is missing or damaged.
    """
    with loading_weights(module, mapped) as load:
        load(module)
    return module


@contextlib.contextmanager
def loading_weights(
    module: torch.nn.Module, mapped: bool = False
) -> Iterator[Callable[[torch.nn.Module], None]]:
    """Yield a function that gives the weights to one layer after another; see `load_weights`."""
    weights = stored_weights(module)
    if weights is None:
        yield lambda layer: None
        return
    reader = weights.reader(mapped)
    named = [*module.named_parameters(), *module.named_buffers()]
    names = {id(tensor): weights.names.get(name, name) for name, tensor in named}

    def load(layer: torch.nn.Module) -> None:
        for parameter in layer.parameters():
            if parameter.is_meta:
                _replace(parameter, reader.whole(names[id(parameter)]).to(parameter.dtype))
        for buffer in layer.buffers():
            if names.get(id(buffer), "") in reader:
                buffer.copy_(reader.whole(names[id(buffer)]))

    with _without_weak_references(module):
        yield load
    vars(module).pop(_WEIGHTS, None)


def find_weights(path: str, store: Store) -> StoredWeights:
    """Return the safetensors files at a path: a file, or a folder with files.

    ``store`` is the store of the run, whose options serve files of its filesystem.

    Raises
    ------
    ParamError
        If there are none, or if no filesystem serves the path.
    StoreError
        If the storage cannot be queried.
    """
    store = store_of(path, store, "init_weights")
    full = store.get_full_path(path).rstrip("/")
    folder, names = full, [name for name in store.names(full) if name.endswith(_SUFFIX)]
    index = store.read_if_exists(f"{full}/{INDEX}") if names else None
    if index is not None:
        try:
            names = sorted(set(parse_object(index)["weight_map"].values()))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise StoreError(f"The index {full}/{INDEX} cannot be read ({error}).") from error
    if full.endswith(_SUFFIX) and store.exists(full):
        folder, names = posixpath.dirname(full), [posixpath.basename(full)]
    if not names:
        raise ParamError(
            f"found no safetensors file at {path!r}. Set the path of one, or of a folder of them, "
            "such as save_pretrained() of Hugging Face writes, that all machines can read.",
            param="init_weights",
        )
    try:
        files = [TensorFile(name, 0, _mark(store, f"{folder}/{name}")) for name in names]
    except FileNotFoundError as error:
        raise StoreError(f"A file of init_weights is missing ({error}). Copy all files.") from error
    return StoredWeights(tuple(files), store, folder)


def _mark(store: Store, path: str) -> str:
    """Return a digest of a file's ends, by which a file of other weights is noticed quickly."""
    ends = store.read_ranges(path, [(0, _END_BYTES), (-_END_BYTES, None)])
    return hashlib.sha256(b"".join(ends)).hexdigest()


def made_without_weights(
    make: Callable[..., Any], path: str, store: Store, is_base: bool = False, /, **arguments: Any
) -> torch.nn.Module:
    """Return the module that a function makes, without the weights that are in files.

    The function is called twice: first without any weights, for the names of the parameters, and
    then with those that the files lack, such as a new head or adapters.

    Parameters
    ----------
    make : callable
        Returns the module.
    path : str
        The files, see `find_weights`.
    store : Store
        The store of the run.
    is_base : bool
        Whether the fitted model shall refer to the files.
    **arguments
        Passed to the function.

    Raises
    ------
    ParamError
        If the files have no weights of the model, or one of another shape.
    """
    weights = find_weights(path, store)
    reader = weights.reader()
    with without_weights() as made:
        module = make(**arguments)
    if not isinstance(module, torch.nn.Module):
        return module  # which the caller rejects
    if hasattr(module, "_orig_mod"):
        raise ParamError(
            "the function returns a module of torch.compile. Let it return the plain module.",
            param="init_weights",
        )
    found, _ = _in_files(module, reader)
    with without_weights([id(parameter) in found for parameter in made]):
        module = make(**arguments)
    found, within = _in_files(module, reader)
    names = {name: stored.name for name, stored in found.values()}
    set_stored_weights(module, replace(weights, names=names, is_base=is_base))
    _check_lacking(module, reader, names, within)
    return module


def _check_lacking(
    module: torch.nn.Module, reader: TensorReader, names: Mapping[str, str], within: str
) -> None:
    """Check the parameters that files lack, and name them in a warning.

    Raises
    ------
    ParamError
        If the files seem to have them by other names, or if one has no value.
    """
    lacking = {n: p for n, p in module.named_parameters() if n not in names}
    unused = set(reader.names()) - set(names.values())
    for name, parameter in lacking.items():
        if parameter.is_meta:
            raise ParamError(
                f"model: the parameter {name!r} is not in the files of init_weights, and the "
                "function does not make it where a layer registers it. Add it to the files."
            )
        first = _of_base(name.removeprefix(within)).partition(".")[0]
        alike = [n for n in unused if n.partition(".")[0] == first]
        if alike:
            raise ParamError(
                f"the files have {min(alike)!r}, which the model lacks, and not {name!r}. Some "
                "models are saved with other names. Let the function call from_pretrained(), "
                "without init_weights, or save the weights with the names of state_dict().",
                param="init_weights",
            )
    if lacking:
        logger.warning(
            "The files of init_weights lack parameters, which keep the function's values: %s.",
            ", ".join(lacking),
        )


def _of_base(name: str) -> str:
    """Return a parameter's name in the model that peft has given adapters or layers to train."""
    within = re.sub(r"\.(base_layer|original_module|modules_to_save\.\w+)\.", ".", name)
    return within.removeprefix("base_model.model.")


@contextlib.contextmanager
def without_weights(chosen: Sequence[bool] | None = None) -> Iterator[list[torch.nn.Parameter]]:
    """Let layers have parameters on the meta device, and yield a list that receives them all.

    ``chosen`` tells which ones, in the order in which layers register them. Default: all. Other
    threads wait if they call this function, and make layers as ever.
    """
    with _PATCHING:
        yield from _patched(chosen)


def _patched(chosen: Sequence[bool] | None) -> Iterator[list[torch.nn.Parameter]]:
    owner = threading.get_ident()
    register, move = torch.nn.Module.register_parameter, torch.nn.Module.to
    made: list[torch.nn.Parameter] = []
    seen: set[int] = set()

    def register_parameter(
        module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        register(module, name, param)
        if threading.get_ident() != owner:
            return
        if type(param) is not torch.nn.Parameter or id(param) in seen:
            return
        seen.add(id(param))
        if chosen is None or (len(made) < len(chosen) and chosen[len(made)]):
            _replace(param, torch.empty_like(param, device="meta"))
        made.append(param)

    def to(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        if threading.get_ident() != owner:
            return move(module, *args, **options)
        # peft moves adapters to the device of their layer.
        args = tuple(each for each in args if each != torch.device("meta"))
        options = {name: each for name, each in options.items() if each != torch.device("meta")}
        return move(module, *args, **options) if args or options else module

    kind: Any = torch.nn.Module
    kind.register_parameter, kind.to = register_parameter, to
    try:
        yield made
    finally:
        kind.register_parameter, kind.to = register, move


def _in_files(
    module: torch.nn.Module, reader: TensorReader
) -> tuple[dict[int, tuple[str, StoredTensor]], str]:
    """Find the parameters and buffers that files have.

    Returns
    -------
    dict
        Name and stored tensor of each, by id.
    str
        The child that the files are of, with a dot, such as the network of a LightningModule. Empty
        if they are of the module itself.

    Raises
    ------
    ParamError
        If there are none, or if one has another shape.
    """
    roots = [("", module)]
    children = [(f"{name}.", child) for name, child in module.named_children()]
    for among in (roots, children):
        found, within = max(
            ((_matches(root, reader, within), within) for within, root in among),
            key=lambda each: len(each[0]),
            default=({}, ""),
        )
        if found:
            return found, within
    ours = next((name for name, _ in module.named_parameters()), "")
    theirs = next(iter(reader.names()), "")
    raise ParamError(
        f"none of the model's parameters, such as {ours!r}, is in the files, which have "
        f"{theirs!r}. Set the files of this model.",
        param="init_weights",
    )


def _matches(
    module: torch.nn.Module, reader: TensorReader, within: str
) -> dict[int, tuple[str, StoredTensor]]:
    """Return the tensors of a module that files have, see `_in_files`."""
    found: dict[int, tuple[str, StoredTensor]] = {}
    prefix = getattr(module, "base_model_prefix", "")
    buffers = module.named_buffers(remove_duplicate=False)
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *buffers]:
        base = _of_base(name)
        # Hugging Face's models may be saved with a head, and loaded without one, or reversely.
        for given in (name, base, f"{prefix}.{base}", base.removeprefix(f"{prefix}.")):
            if given in reader and id(tensor) not in found:
                stored = found.setdefault(id(tensor), (within + name, reader.stored(given)))[1]
                if stored.shape != tuple(tensor.shape):
                    raise ParamError(
                        f"{given!r} has shape {stored.shape} in the files, and {within + name!r} "
                        f"{tuple(tensor.shape)} in the model. Set the files of this model.",
                        param="init_weights",
                    )
    return found
