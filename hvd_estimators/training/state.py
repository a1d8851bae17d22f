"""The state of a run: how far it has come, and all that training goes on from. One file holds it.

The file is the framework's own (``torch.save``'s, ``.keras``), which is a zip archive, with members
of ours after its own. The framework opens it as any file of its own, and what is ours is read
without it. Ours are JSON and ``.npy``: reading them runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import numpy as np

from hvd_estimators.exceptions import StoreError
from hvd_estimators.parquet.columns import Array
from hvd_estimators.store.base import Store
from hvd_estimators.training.encoding import decode, encode
from hvd_estimators.training.objects import ObjectExchange
from hvd_estimators.training.spec import EpochMetrics

__all__ = ["RunState", "check_state", "read_state", "reading", "restore", "write_state"]

_FORMAT = 1
_STATE = "hvd_estimators/state.json"
_ARRAY = "hvd_estimators/{}.npy"
_COPIED_BYTES = 2**24

# What zip archives, JSON, .npy files and the frameworks' own raise where they are not whole.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class RunState:
    """What a run is resumed with, beside what the framework's own file holds.

    Attributes
    ----------
    epoch : int
        Epochs that are done.
    rows : int
        Rows, over all shards, of the epoch after these that were trained on; 0 at an epoch's end.
    canonical_shards : int
        Shards into which the rows were cut when the run began.
    history : tuple of EpochMetrics
        One record per epoch that is done.
    random : tuple of mapping
        The states of the random streams, by canonical shard; see `training.randomness`.
    parts : mapping
        What else a framework keeps: states of callbacks, for example. Plain values, see `encode`.
    """

    epoch: int
    rows: int
    canonical_shards: int
    history: tuple[EpochMetrics, ...]
    random: tuple[Mapping[str, Any], ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)


def write_state(
    store: Store, path: str, state: RunState, write_model: Callable[[IO[bytes]], None]
) -> None:
    """Write a checkpoint, which appears whole or not at all. Runs on rank 0.

    Parameters
    ----------
    store : Store
        Opens the file.
    path : str
        The checkpoint.
    state : RunState
        What is added to the framework's file.
    write_model : callable
        Writes the framework's file, a zip archive, to a file object.
    """
    with store.open_atomic(path) as target, _seekable(target) as file:
        write_model(file)
        _append(file, state)


def check_state(store: Store, path: str) -> None:
    """Make sure that a checkpoint can be gone on from, as far as little of it tells.

    Runs on the driver; the ranks read all of it.

    Raises
    ------
    StoreError
        If the file is none of this package's checkpoints, or is damaged.
    """
    with reading(store, path) as file, zipfile.ZipFile(file) as archive:
        _document(archive)


def read_state(store: Store, path: str) -> RunState:
    """Return the state in a checkpoint, without reading the model. Runs on both sides.

    Raises
    ------
    StoreError
        If the file is none of this package's checkpoints, or is damaged.
    """
    with reading(store, path) as file:
        return _read(file)[0]


def restore(
    store: Store,
    path: str | None,
    exchange: ObjectExchange,
    rank: int,
    load: Callable[[IO[bytes]], None],
) -> RunState | None:
    """Load a run's newest checkpoint, where there is one. Called by all ranks.

    Every rank reads the file, of which only rank 0 looks whether it is there, and whole.

    Parameters
    ----------
    store : Store
        Opens the file.
    path : str or None
        The checkpoint; None where the store keeps no runs.
    exchange : ObjectExchange
        Carries what rank 0 has found to the others.
    rank : int
        This rank.
    load : callable
        Loads the framework's file from a file object.

    Returns
    -------
    RunState or None
        The state; None if there is no checkpoint.

    Raises
    ------
    StoreError
        If the file is none of this package's checkpoints, is damaged, or is not the same on all
        ranks.
    """
    found = None
    if rank == 0 and path is not None and store.exists(path):
        with reading(store, path) as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"the content of {damaged} has changed")
            found = _document(archive)[1]
    found = exchange.broadcast(found, "checkpoint")
    if found is None or path is None:
        return None
    with reading(store, path) as file:
        state, digest = _read(file)
        if digest != found:
            raise StoreError(
                f"{path!r} is not the same file on rank {rank} and on rank 0. Set a store of "
                "which all machines see the same, and that nobody else changes."
            )
        file.seek(0)
        load(file)
    return state


@contextlib.contextmanager
def reading(store: Store, path: str) -> Iterator[IO[bytes]]:
    """Open a checkpoint; what the block raises because it is not whole becomes a `StoreError`."""
    try:
        with store.open(path) as file:
            yield file
    except StoreError:
        raise
    except _UNREADABLE as error:
        told = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise StoreError(
            f"The checkpoint {path!r} cannot be gone on from: it is damaged, of another model, or "
            f"was not written by this version of hvd_estimators ({told}). Set another run_id, or "
            "none, to train anew; or delete this file to train this run from its beginning."
        ) from error


@contextlib.contextmanager
def _seekable(target: IO[bytes]) -> Iterator[IO[bytes]]:
    """Give a file that can be read again, as adding to an archive takes; in the end it is copied.

    Files of remote stores can only be written from beginning to end.
    """
    if target.seekable() and target.readable():
        yield target
        return
    with tempfile.TemporaryFile() as file:
        yield file
        file.seek(0)
        shutil.copyfileobj(file, target, _COPIED_BYTES)


def _append(file: IO[bytes], state: RunState) -> None:
    arrays: list[Array] = []
    fields = {**vars(state), "history": [asdict(record) for record in state.history]}
    state_document = encode(fields, arrays)
    document = {"format": _FORMAT, "arrays": len(arrays), "state": state_document}
    with zipfile.ZipFile(file, "a") as archive:
        folder = _folder(archive.namelist())
        for number, array in enumerate(arrays):
            info = zipfile.ZipInfo(folder + _ARRAY.format(number))
            # It may be large: the best weights that a callback keeps.
            with archive.open(info, "w", force_zip64=array.nbytes > _COPIED_BYTES) as member:
                np.save(member, array, allow_pickle=False)
        # Last, so that whatever has it has all.
        archive.writestr(zipfile.ZipInfo(folder + _STATE), json.dumps(document))


def _folder(names: Sequence[str]) -> str:
    """Return the folder that all members are in: torch opens no archive that has two."""
    folders = {name.partition("/")[0] for name in names}
    if len(folders) == 1 and all("/" in name for name in names):
        return folders.pop() + "/"
    return ""


def _document(archive: zipfile.ZipFile) -> tuple[dict[str, Any], str]:
    """Return what is JSON, arrays not read yet, and a digest: of each checkpoint another one."""
    names = [name for name in archive.namelist() if name.endswith(_STATE)]
    if len(names) != 1:
        raise ValueError(f"it has no {_STATE}")
    content = archive.read(names[0])
    document = json.loads(content)
    if document["format"] != _FORMAT:
        raise ValueError(f"its format is {document['format']}, expected {_FORMAT}")
    folder = names[0].removesuffix(_STATE)
    document["members"] = [folder + _ARRAY.format(n) for n in range(document["arrays"])]
    if not {*document["members"]} <= {*archive.namelist()}:
        raise ValueError("some of its arrays are missing")
    return document, hashlib.sha256(content).hexdigest()


def _read(file: IO[bytes]) -> tuple[RunState, str]:
    with zipfile.ZipFile(file) as archive:
        document, digest = _document(archive)
        arrays = []
        for name in document["members"]:
            with archive.open(name) as member:
                arrays.append(np.lib.format.read_array(member, allow_pickle=False))
    fields = decode(document["state"], arrays)
    history = tuple(EpochMetrics(**record) for record in fields["history"])
    return RunState(**{**fields, "history": history}), digest
