"""State of a run in a checkpoint: the position and everything that training needs to resume.

The checkpoint is a zip archive: the file of ``torch.save``, or the values of a Keras model
(`hvd_estimators.keras.model_file`). This module appends members to it, and reads them without the
framework. They are JSON and ``.npy`` files: reading them runs no code.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.base import Store
from hvd_estimators.store.storage_errors import naming_full_disk, not_damage
from hvd_estimators.training.spec import EpochMetrics

_REGISTERED = 2
"""Value of ``dtype.isbuiltin`` for types that other packages register with NumPy."""


def encode(value: Any, arrays: list[Array]) -> Any:
    """Return a JSON-serializable form of a value; `decode` restores it bit for bit.

    Parameters
    ----------
    value : object
        None, a boolean, a number, text, bytes, a NumPy array or scalar, or a list, tuple or mapping
        of these. Mappings are restored as dicts.
    arrays : list of ndarray
        Arrays are appended to this list; the JSON contains their positions.

    Raises
    ------
    TypeError
        If the value, or a value in it, has another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(entry, arrays) for entry in value]
    if type(value) is tuple:
        return {"tuple": [encode(entry, arrays) for entry in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k, arrays), encode(v, arrays)] for k, v in value.items()]}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        dtype, array = value.dtype, np.asarray(value)
        document: dict[str, Any] = {"array": len(arrays), "scalar": isinstance(value, np.generic)}
        if dtype.isbuiltin == _REGISTERED:
            # A .npy file does not record types of other packages (for example, bfloat16).
            document["dtype"] = dtype.name
            array = array.view(f"u{dtype.itemsize}")
        arrays.append(array)
        return document
    raise TypeError(f"expected plain values, found {type(value).__name__}: {value!r:.80}")


def decode(document: Any, arrays: Sequence[Array]) -> Any:
    """Return the value that `encode` received."""
    if isinstance(document, list):
        return [decode(entry, arrays) for entry in document]
    if not isinstance(document, dict):
        return document
    if "tuple" in document:
        return tuple(decode(entry, arrays) for entry in document["tuple"])
    if "dict" in document:
        return {decode(k, arrays): decode(v, arrays) for k, v in document["dict"]}
    if "bytes" in document:
        return base64.b64decode(document["bytes"])
    array = arrays[document["array"]]
    if "dtype" in document:
        import ml_dtypes  # a dependency of the frameworks that use these types

        array = array.view(getattr(ml_dtypes, document["dtype"]))
    return array[()] if document["scalar"] else array


def is_encodable(value: Any) -> bool:
    """Return whether `encode` accepts a value."""
    try:
        encode(value, [])
    except TypeError:
        return False
    return True


_FORMAT = 1
_STATE = "hvd_estimators/state.json"
_ARRAY = "hvd_estimators/{}.npy"
_COPIED_BYTES = 2**24

# Errors that zip archives, JSON, .npy files and the frameworks raise for damaged files.
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
    """State that a run needs to resume, in addition to the content of the framework's file.

    Attributes
    ----------
    epoch : int
        Number of completed epochs.
    rows : int
        Rows processed in the next epoch, over all shards; 0 at the end of an epoch.
    canonical_shards : int
        Number of shards into which the rows were divided when the run began.
    history : tuple of EpochMetrics
        One record per completed epoch.
    random : tuple of mapping
        The states of the random streams, by canonical shard; see `training.shard_state`.
    parts : mapping
        Other state of the framework, such as the states of callbacks. Plain values, see `encode`.
    stopped : bool
        Whether a callback stopped training after the newest epoch.
    """

    epoch: int
    rows: int
    canonical_shards: int
    history: tuple[EpochMetrics, ...]
    random: tuple[Mapping[str, Any], ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    stopped: bool = False


def write_archive(
    file: IO[bytes], state: RunState, write_model: Callable[[IO[bytes]], None]
) -> None:
    """Write the framework's file, and append a state to it. Runs on rank 0.

    Parameters
    ----------
    file : file
        An empty file, open for writing and reading.
    state : RunState
        The state to append.
    write_model : callable
        Writes the framework's file, a zip archive, to a file object.
    """
    write_model(file)
    arrays: list[Array] = []
    fields = {**vars(state), "history": [asdict(record) for record in state.history]}
    state_document = encode(fields, arrays)
    document = {"format": _FORMAT, "arrays": len(arrays), "state": state_document}
    with zipfile.ZipFile(file, "a") as archive:
        folder = _folder(archive.namelist())
        for number, array in enumerate(arrays):
            info = zipfile.ZipInfo(folder + _ARRAY.format(number))
            # The array may be large, for example the best weights that a callback stores.
            with archive.open(info, "w", force_zip64=array.nbytes > _COPIED_BYTES) as member:
                np.save(member, array, allow_pickle=False)
        # Written last: if an archive contains this member, it contains all the others.
        archive.writestr(zipfile.ZipInfo(folder + _STATE), json.dumps(document))


def read_archive(file: IO[bytes]) -> RunState:
    """Return the state in a framework's file, and rewind the file."""
    with zipfile.ZipFile(file) as archive:
        document = _document(archive)
        arrays = []
        for name in document["members"]:
            with archive.open(name) as member:
                arrays.append(np.lib.format.read_array(member, allow_pickle=False))
    file.seek(0)
    fields = decode(document["state"], arrays)
    history = tuple(EpochMetrics(**record) for record in fields["history"])
    return RunState(**{**fields, "history": history})


def check_state(store: Store, path: str) -> int:
    """Check that a checkpoint can be resumed, judging by its header.

    Runs on the driver. The ranks check the whole file.

    Returns
    -------
    int
        The number of canonical shards.

    Raises
    ------
    StoreError
        If the file is not a checkpoint of this package, or is damaged.
    """
    with reading(store, path) as file, zipfile.ZipFile(file) as archive:
        shards: Any = dict(_document(archive)["state"]["dict"])["canonical_shards"]
        if type(shards) is not int or shards < 1:
            raise ValueError(f"it has {shards!r:.100} canonical shards")
        return shards


def has_state(file: IO[bytes]) -> bool:
    """Return whether a file is an archive that contains a state, and rewind the file."""
    has_member = False
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            has_member = any(name.endswith(_STATE) for name in archive.namelist())
    file.seek(0)
    return has_member


@contextlib.contextmanager
def reading(store: Store, path: str) -> Iterator[IO[bytes]]:
    """Open a checkpoint; errors of the block that damage can cause become a `StoreError`."""
    with describing_damage(path), store.open(path) as file:
        yield file


_REMEDY = (
    " Set another run_id, or none, for a new run; or delete the checkpoints of this run to train "
    "it from its beginning."
)

_DAMAGED = "it is damaged, of another model, or was not written by this version of hvd_estimators"


@contextlib.contextmanager
def describing_damage(
    path: str, cannot: str = "be resumed", remedy: str = _REMEDY, found: str = _DAMAGED
) -> Iterator[None]:
    """Convert errors of the block that a damaged checkpoint can cause to a `StoreError`.

    Parameters
    ----------
    path : str
        The checkpoint, for the message.
    cannot : str
        The operation that failed, for the message.
    remedy : str
        The suggested fix, for the message.
    found : str
        What may be wrong, for the message.
    """
    try:
        with naming_full_disk():
            yield
    except StoreError:
        raise
    except _UNREADABLE as error:
        other = not_damage(error, path)
        if other is not None:
            raise other from error
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise StoreError(
            f"The checkpoint {path!r} cannot {cannot}: {found} ({cause}).{remedy}"
        ) from error


def describing_load(path: str) -> contextlib.AbstractContextManager[None]:
    """Convert errors of the block, which loads a checkpoint that is intact, to a `StoreError`."""
    remedy = (
        " If code of your own raised this, such as set_extra_state() or an optimizer's "
        "load_state_dict(), correct it and fit again. Otherwise, fit with the model and the "
        "versions of packages that the run had, or set another run_id for a new run."
    )
    return describing_damage(path, remedy=remedy, found="its file is intact, and loading it failed")


def _folder(names: Sequence[str]) -> str:
    """Return the folder of all members, because torch rejects archives with two folders."""
    folders = {name.partition("/")[0] for name in names}
    if len(folders) == 1 and all("/" in name for name in names):
        return folders.pop() + "/"
    return ""


def _document(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the JSON part of the state, without reading arrays."""
    names = [name for name in archive.namelist() if name.endswith(_STATE)]
    if len(names) != 1:
        raise ValueError(f"it has no {_STATE}")
    document: dict[str, Any] = json.loads(archive.read(names[0]))
    if document["format"] != _FORMAT:
        raise ValueError(f"its format is {document['format']}, expected {_FORMAT}")
    count = document["arrays"]
    if not isinstance(count, int) or not 0 <= count < len(archive.namelist()):
        raise ValueError(f"it has {count!r:.100} arrays in {len(archive.namelist())} members")
    folder = names[0].removesuffix(_STATE)
    document["members"] = [folder + _ARRAY.format(n) for n in range(count)]
    if not {*document["members"]} <= {*archive.namelist()}:
        raise ValueError("some of its arrays are missing")
    return document
