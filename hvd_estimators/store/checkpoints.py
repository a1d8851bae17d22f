"""List, validate, write and delete a run's checkpoints.

Checkpoints are written without renames, because object stores do not support them. First the
framework's file is written, then its manifest, which contains the size and digest of the file. Runs
on the driver and on ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TypeVar

from hvd_estimators._util.documents import check_types, parse_object, strict_number
from hvd_estimators.exceptions import StoreError, StoreUnavailableError
from hvd_estimators.store.files import CHUNK_BYTES, Files, digest_of, is_missing
from hvd_estimators.store.paths import (
    Position,
    RunPaths,
    file_name,
    manifest_of,
    tensors_of,
    with_manifest,
)
from hvd_estimators.store.storage_errors import Kind, kind_of, naming_full_disk

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FORMAT = 1

# Types of a manifest's values.
_REQUIRED: dict[str, type] = {
    **dict.fromkeys(("size", "epoch", "rows"), int),
    **dict.fromkeys(("sha256", "framework"), str),
    "metrics": dict,
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "monitor": (str, type(None)),
    "mode": (str,),
    "files": (list,),
}


@dataclass(frozen=True)
class TensorFile:
    """Further file of a checkpoint, which a rank wrote.

    Attributes
    ----------
    name : str
        Path of the file, relative to the folder of the checkpoints.
    size : int
        Size of the file in bytes.
    sha256 : str
        SHA-256 digest of the file.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointInfo:
    """Content of a checkpoint's manifest.

    Attributes
    ----------
    path : str
        The framework's file.
    size : int
        Size of the file in bytes.
    sha256 : str
        SHA-256 digest of the file.
    epoch : int
        Number of completed epochs.
    rows : int
        Rows processed in the next epoch, over all shards; 0 at the end of an epoch.
    framework : str
        Framework that wrote the file: ``"torch"``, ``"keras"`` or ``"lightning"``.
    metrics : mapping of str to float
        Metrics of the last completed epoch; names of validation metrics begin with ``val_``. Empty
        within an epoch.
    monitor : str or None
        The metric that selects the best checkpoint, or None.
    mode : str
        ``"min"`` if lower values of the metric are better, ``"max"`` if higher values are better.
    files : tuple of TensorFile
        Files that the ranks wrote, if each holds a part of the model.
    """

    path: str
    size: int
    sha256: str
    epoch: int
    rows: int
    framework: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    monitor: str | None = None
    mode: str = "min"
    files: tuple[TensorFile, ...] = ()

    @property
    def position(self) -> Position:
        """Progress of the run at this checkpoint."""
        return Position(self.epoch, self.rows)


class DamagedCheckpoint(StoreError):
    """Error for a checkpoint that does not match its manifest. The message is only the reason."""


class UnreadableCheckpoint(StoreError):
    """Error for an unreadable checkpoint, for example if all its HDFS replicas are lost."""


def checkpoint_path(run: RunPaths, position: Position) -> str:
    """Return the path of the framework's file for a position."""
    return f"{run.checkpoints_path}/{file_name(run.checkpoint_filename, position)}"


def positions(store: Files, run: RunPaths) -> list[Position]:
    """Return the positions of all checkpoints, sorted. Only file names are read."""
    if run.checkpoints_path is None:
        return []
    return with_manifest(run.checkpoint_filename, store.names(run.checkpoints_path))


def list_checkpoints(
    store: Files, run: RunPaths, among: Iterable[Position] | None = None
) -> list[CheckpointInfo]:
    """Return a run's checkpoints, oldest first.

    Checkpoints with damaged manifests are skipped with a warning. The framework's files are not
    validated. ``among`` is a result of `positions`.
    """
    infos = []
    for path, info in _manifests(store, run, positions(store, run) if among is None else among):
        if isinstance(info, CheckpointInfo):
            infos.append(info)
        else:
            logger.warning("The checkpoint %s is left out: %s.", path, info)
    return infos


def best_checkpoint(infos: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the best checkpoint, the first among equals, or None if no metric is available.

    Parameters
    ----------
    infos : sequence of CheckpointInfo
        In the order in which they were written. The ``monitor`` of the last checkpoint that has one
        is used to compare all of them.
    """
    judge = next((info for info in reversed(infos) if info.monitor in info.metrics), None)
    if judge is None or judge.monitor is None:
        return None
    sign = 1.0 if judge.mode == "min" else -1.0
    values = [sign * info.metrics.get(judge.monitor, math.nan) for info in infos]
    valued = [index for index, value in enumerate(values) if not math.isnan(value)]
    return infos[min(valued, key=values.__getitem__)] if valued else None


def find_newest_valid(
    store: Files,
    run: RunPaths,
    validate: Callable[[CheckpointInfo], T],
    among: Iterable[Position] | None = None,
) -> tuple[CheckpointInfo, T] | None:
    """Return a run's newest valid checkpoint, or None if the run has no checkpoints.

    Damaged checkpoints are skipped with a warning.

    Parameters
    ----------
    store : Files
        The store of the run.
    run : RunPaths
        The run.
    validate : callable
        Called with each checkpoint; raises `DamagedCheckpoint` if it is not valid. Its result is
        returned with the checkpoint.
    among : iterable of Position, optional
        Result of `positions`.

    Raises
    ------
    StoreError
        If there are checkpoints but no valid one.
    UnreadableCheckpoint
        If there is no valid checkpoint and one of them could not be read; it may be valid later.
    StoreUnavailableError
        If the store does not answer. An earlier checkpoint would lose steps.
    """
    unreadable: UnreadableCheckpoint | None = None
    damaged: list[str] = []
    among = positions(store, run) if among is None else among
    for path, info in _manifests(store, run, sorted(among, reverse=True)):
        reason: object = info
        if isinstance(info, CheckpointInfo):
            try:
                result = validate(info)
            except DamagedCheckpoint as error:
                reason = error
            except UnreadableCheckpoint as error:
                if isinstance(error.__cause__, StoreUnavailableError):
                    raise error.__cause__ from None  # it may be readable later
                reason = unreadable = error
            else:
                if damaged:
                    logger.warning(
                        "Checkpoints of run %r cannot be used: %s. The one before, %r, is taken.",
                        run.run_id,
                        ", ".join(damaged),
                        info.path,
                    )
                return info, result
        damaged.append(f"{path!r} ({reason})")
    if not damaged:
        return None
    if unreadable is not None:
        raise unreadable
    raise StoreError(
        f"No checkpoint of the run {run.run_id!r} is valid: {', '.join(damaged)}. Set another "
        f"run_id, or none, for a new run; or delete {run.checkpoints_path!r} to train this run "
        "from its beginning."
    )


def check_valid(store: Files, info: CheckpointInfo) -> None:
    """Check that a checkpoint matches its manifest. Reads the complete file.

    Raises
    ------
    DamagedCheckpoint
        If the checkpoint does not match.
    """
    with open_valid(store, info):
        pass


@contextlib.contextmanager
def open_valid(store: Files, info: CheckpointInfo) -> Iterator[IO[bytes]]:
    """Open a checkpoint after checking that it, and the ranks' files, match its manifest.

    A file of a remote store is first copied to a local file, in one sequential read.

    Raises
    ------
    DamagedCheckpoint
        If the file is missing, truncated or changed.
    UnreadableCheckpoint
        If the store cannot read the file.
    StoreError
        If the disk of the local copy is full.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = posixpath.dirname(info.path)
            for further in info.files:
                with store.open(f"{folder}/{further.name}") as opened:
                    _check_content(opened, further)
            file = stack.enter_context(store.open(info.path))
            if store.local_path(info.path) is None:
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(file, copy, CHUNK_BYTES)
                file = copy
            _check_content(file, info)
        except DamagedCheckpoint:
            raise
        except OSError as error:
            if kind_of(error) is Kind.FULL:  # of the local copy
                with naming_full_disk():
                    raise
            if not is_missing(error):
                raise UnreadableCheckpoint(f"{error}") from error
            raise DamagedCheckpoint("there is no such file") from error
        yield file


def _check_content(file: IO[bytes], expected: CheckpointInfo | TensorFile) -> None:
    size = file.seek(0, os.SEEK_END)
    if size != expected.size:
        raise DamagedCheckpoint(f"it has {size} bytes, and was written with {expected.size}")
    if digest_of(file) != expected.sha256:
        raise DamagedCheckpoint("its content has changed")


def write_manifest(store: Files, info: CheckpointInfo) -> None:
    """Write the manifest of a checkpoint whose file exists, which completes the checkpoint."""
    document = {
        "format": _FORMAT,
        **{name: value for name, value in vars(info).items() if name != "path"},
        "files": [[file.name, file.size, file.sha256] for file in info.files],
        "metrics": {name: strict_number(value) for name, value in info.metrics.items()},
    }
    store.write_text(manifest_of(info.path), json.dumps(document, indent=1))


def delete_checkpoint(
    store: Files, run: RunPaths, position: Position, info: CheckpointInfo | None
) -> None:
    """Delete a checkpoint, its manifest first, so that no manifest refers to a missing file.

    ``info`` is the content of the manifest, or None if it is not known.
    """
    path = checkpoint_path(run, position)
    store.delete(manifest_of(path))
    store.delete(path)
    if info is None or info.files:
        store.delete(tensors_of(path))


def info_at(store: Files, path: str) -> CheckpointInfo | None:
    """Return the content of a file's manifest, or None if it has none.

    Raises
    ------
    DamagedCheckpoint
        If the manifest cannot be parsed.
    """
    manifest = manifest_of(path)
    content = store.read_if_exists(manifest)
    if content is None:
        return None
    try:
        document = parse_object(content)
        if document.pop("format", None) != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}")
        check_types(document, _REQUIRED, required=_REQUIRED)
        check_types(document, _OPTIONAL)
        document["metrics"] = {name: float(value) for name, value in document["metrics"].items()}
        document["files"] = tuple(map(_tensor_file, document.get("files", ())))
        return CheckpointInfo(path, **document)
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedCheckpoint(f"its manifest {manifest!r} cannot be read: {error}") from error


def _tensor_file(fields: object) -> TensorFile:
    match fields:
        case [str() as name, int() as size, str() as digest]:
            return TensorFile(name, size, digest)
    raise ValueError(f"files: found {fields!r:.100}")


def _manifests(
    store: Files, run: RunPaths, among: Iterable[Position]
) -> Iterator[tuple[str, CheckpointInfo | DamagedCheckpoint]]:
    """Yield each checkpoint's path with its manifest, or with the error that makes it unusable."""
    for position in among:
        path = checkpoint_path(run, position)
        try:
            info = info_at(store, path)
        except DamagedCheckpoint as error:
            yield path, error
            continue
        if info is not None and info.position != position:
            yield path, DamagedCheckpoint(f"its manifest is one of {info.position}")
        elif info is not None:
            yield path, info
