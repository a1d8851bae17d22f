"""Files of tensors that the ranks share: whole tensors, of which each rank writes some.

So a run may resume on another number of ranks, and without sharding. No rank holds more than three
whole tensors, and none has the whole model.

A checkpoint is saved in this order: the writer ends the one before; each rank writes its share of
the tensors (`write_parts`); rank 0 writes the rest, with placeholders, and at last the manifest,
which names all files and their digests. When a run resumes, rank 0 checks the digests, and each
rank reads the rows of its parts (`with_tensors`, `hvd_estimators.torch.sharding.stored_part`).
"""

from __future__ import annotations

import itertools
import json
import posixpath
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.base import RunPaths, Store
from hvd_estimators.store.checkpoints import TensorFile, checkpoint_path
from hvd_estimators.store.files import Files
from hvd_estimators.store.paths import Position, tensors_of
from hvd_estimators.torch.collectives import current, exchange
from hvd_estimators.torch.sharding import gathered, is_sharded, whole
from hvd_estimators.torch.stored_weights import (
    INDEX,
    StoredWeights,
    drop_weights,
    put_weights,
    set_stored_weights,
)
from hvd_estimators.torch.tensor_files import StoredTensor, TensorReader, write_tensors
from hvd_estimators.torch.tensors import map_tensors
from hvd_estimators.training.checkpoint_writer import CheckpointWriter


def write_parts(
    writer: CheckpointWriter, position: Position, content: dict[str, Any]
) -> tuple[dict[str, Any], tuple[TensorFile, ...]]:
    """Write the sharded tensors of a checkpoint. Called by all ranks.

    Parameters
    ----------
    writer : CheckpointWriter
        Writer of the run's checkpoints.
    position : Position
        Position of the checkpoint.
    content : dict
        This rank's content, with the same tensors on all ranks.

    Returns
    -------
    dict
        The content with placeholders for these tensors, and the names of the files, from which
        `with_tensors` restores it.
    tuple of TensorFile
        The files of all ranks.
    """
    # Otherwise its thread could take the files that ranks write next for orphans.
    writer.finish()
    content, tensors = without_tensors(content)
    path = checkpoint_path(writer.run, position)
    # A rank of an earlier launch may still write, so no two saves use the same names.
    shapes = [(name, tuple(value.shape)) for name, value in tensors.items()]
    token = uuid.uuid4().hex[:8]
    (token, first), *others = exchange.gather((token, shapes), "checkpoint_files")
    if any(other != first for _, other in others):
        raise ParamError(
            "stateful or callbacks: their states have other sharded tensors on one rank than "
            "on another. With sharding, all ranks must keep the same ones."
        )
    begins = f"{posixpath.basename(tensors_of(path))}/{token}"
    files, _ = _write(writer.store, posixpath.dirname(path), begins, tensors)
    return {**content, "files": [file.name for file in files]}, files


def write_trained(
    store: Store, run: RunPaths, module: torch.nn.Module, has_base: bool
) -> tuple[StoredWeights | None, dict[str, Any]]:
    """Return the trained weights of ranks that hold parts. Called by all ranks.

    Without a base, they go to a new folder of the run. The files have the names and the index of
    Hugging Face's, so its libraries load them.

    Parameters
    ----------
    store : Store
        The store of the run.
    run : RunPaths
        The run.
    module : torch.nn.Module
        The module of this rank.
    has_base : bool
        Whether files have the frozen weights, which ``state_dict()`` leaves out.

    Returns
    -------
    StoredWeights or None
        New files with all weights; None if there is a base.
    dict
        The other weights, on rank 0, if there is a base.
    """
    if has_base:
        return None, gathered(module.state_dict(), keep=current().rank == 0)
    token = exchange.broadcast(uuid.uuid4().hex, "model_files")
    folder = f"{run.run_path}/model-{token}"
    parameters, rank = dict(module.named_parameters()), current().rank
    state = module.state_dict() if rank == 0 else {}
    buffers = {n: b.cpu() for n, b in state.items() if n in dict(module.named_buffers())}
    files, index = _write(store, folder, "model", {**parameters, **buffers})
    if rank == 0:
        size = sum(file.size for file in files)
        document = {"metadata": {"total_size": size}, "weight_map": index}
        store.write_text(f"{folder}/{INDEX}", json.dumps(document, indent=1))
    return StoredWeights(files, folder=folder), {}


def _write(
    store: Store, folder: str, begins: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[tuple[TensorFile, ...], dict[str, str]]:
    """Write each rank's share of sharded tensors, and other tensors of this rank.

    Returns
    -------
    tuple of TensorFile
        The files of all ranks.
    dict
        Name of each tensor to the name of its file.
    """
    rank, size = current().rank, current().size
    name = f"{begins}-{rank + 1:05}-of-{size:05}.safetensors"
    kept, values = dealt(tensors, rank, size)
    written = write_tensors(store, folder, name, kept, values)
    of_ranks = exchange.gather((written, list(kept)), "tensor_files")
    index = {key: file.name for file, keys in of_ranks for key in keys}
    return tuple(file for file, _ in of_ranks), index


def dealt(
    tensors: Mapping[str, Any], rank: int, size: int
) -> tuple[dict[str, Any], Iterator[torch.Tensor]]:
    """Deal sharded tensors among the ranks, which gather one after another. Called by all ranks.

    Each tensor goes to the rank that has the fewest bytes so far.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Sharded tensors, in the same order on all ranks, and others of this rank, which keeps them.
    rank, size : int
        This rank, and the number of ranks.

    Returns
    -------
    dict
        The tensors that this rank gets, as given; those with large items first.
    iterator of torch.Tensor
        The same tensors, whole and on the CPU. Every rank must exhaust it.
    """
    held = [0] * size
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    keepers = {}
    for name, tensor in ordered:
        if is_sharded(tensor):
            keepers[name] = held.index(min(held))
            held[keepers[name]] += tensor.nbytes

    def values() -> Iterator[torch.Tensor]:
        for name, tensor in ordered:
            value = whole(tensor)
            if keepers.get(name, rank) == rank:
                yield value

    return {name: t for name, t in ordered if keepers.get(name, rank) == rank}, values()


def without_tensors(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return a value with placeholders for its sharded tensors, and these by number.

    A placeholder is a tensor on the meta device, which has a shape and no memory.
    """
    found: dict[str, Any] = {}

    def placeholder(tensor: Any) -> Any:
        if not is_sharded(tensor):
            return tensor
        found[str(len(found))] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return map_tensors(placeholder, value), found


def with_tensors(
    content: dict[str, Any],
    store: Files,
    folder: str,
    place: Callable[[str, StoredTensor], Any] = lambda key, stored: stored.whole(),
) -> dict[str, Any]:
    """Return the content of a checkpoint with tensors for the placeholders.

    Parameters
    ----------
    content : dict
        Result of `without_tensors`, and ``"files"``, the names of the ranks' files. Without these,
        it is returned unchanged.
    store : Files
        The store of the files.
    folder : str
        The folder of the checkpoint.
    place : callable
        Takes the content's key, and a tensor in it, and returns what replaces the tensor. Default:
        the whole tensor.
    """
    names = content.pop("files", None)
    if names is None:
        return content
    reader, numbers = TensorReader(store, [f"{folder}/{name}" for name in names]), itertools.count()

    def filled(key: str, value: Any) -> Any:
        def replacement(tensor: torch.Tensor) -> Any:
            return place(key, reader.stored(str(next(numbers)))) if tensor.is_meta else tensor

        return map_tensors(replacement, value)

    return {key: filled(key, value) for key, value in content.items()}


def as_trained(
    begun: torch.nn.Module,
    trained: torch.nn.Module,
    weights: StoredWeights | None,
    kept: Mapping[str, Any],
) -> None:
    """Give the driver's module what training has changed, with its weights in files.

    Parameters
    ----------
    begun : torch.nn.Module
        The module as the driver sent it.
    trained : torch.nn.Module
        The module of a rank, which holds parts.
    weights : StoredWeights or None
        Files with the trained weights. None if the module has a base in files.
    kept : mapping
        Weights that no files have.
    """
    requires_grad = {name: value.requires_grad for name, value in trained.named_parameters()}
    for name, parameter in begun.named_parameters():
        parameter.requires_grad_(requires_grad[name])
    if weights is not None:
        drop_weights(begun)
        set_stored_weights(begun, weights)
    put_weights(begun, kept)
    for name, part in trained.named_modules():
        target = begun.get_submodule(name)
        # Also those that a state_dict() lacks, that have grown, or that were None.
        for buffer, value in part.named_buffers(recurse=False):
            setattr(target, buffer, value.cpu())
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            target.set_extra_state(part.get_extra_state())
