"""A run's checkpoints in its store: which there are, and whether they are whole. On both sides.

Nothing is renamed, since object stores cannot: a file is put, and then the pointer to it, which
says what the file has to hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from hvd_estimators.exceptions import StoreError, StoreUnavailableError
from hvd_estimators.store.files import Files
from hvd_estimators.store.hashing import CHUNK_BYTES
from hvd_estimators.store.paths import Position, RunPaths, file_name, manifest_of, with_manifest

__all__ = [
    "CheckpointInfo",
    "DamagedCheckpoint",
    "UnreadableCheckpoint",
    "best_checkpoint",
    "check_valid",
    "checkpoint_path",
    "delete_checkpoint",
    "find_newest_valid",
    "info_at",
    "list_checkpoints",
    "newest_checkpoint",
    "open_valid",
    "positions",
    "write_manifest",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FORMAT = 1


@dataclass(frozen=True)
class CheckpointInfo:
    """What the pointer to a checkpoint says.

    Attributes
    ----------
    path : str
        The framework's file.
    size : int
        Its bytes.
    sha256 : str
        SHA-256 of all of it.
    epoch : int
        Epochs that were done.
    rows : int
        Rows, over all shards, of the epoch after these; 0 at an epoch's end.
    framework : str
        What it was written by: ``"torch"``, ``"keras"``, ``"lightning"``.
    metrics : mapping of str to float
        What was measured in the last epoch that was done; validation's begin with ``val_``. Empty
        within an epoch.
    monitor : str or None
        The metric that told which checkpoint is best; None where there was none.
    mode : str
        ``"min"`` if less of it is better, ``"max"`` if more is.
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

    @property
    def position(self) -> Position:
        """How far the run had come."""
        return Position(self.epoch, self.rows)


class DamagedCheckpoint(StoreError):
    """A checkpoint is not what its pointer says. The message is the reason alone."""


class UnreadableCheckpoint(StoreError):
    """A checkpoint cannot be read, as when all copies of it on HDFS are damaged or away."""


def checkpoint_path(run: RunPaths, position: Position) -> str:
    """Return where the framework's file of a position lies."""
    return f"{run.checkpoints_path}/{file_name(run.checkpoint_filename, position)}"


def positions(store: Files, run: RunPaths) -> list[Position]:
    """Return the positions of which there are checkpoints, in order; looks at names alone."""
    if run.checkpoints_path is None:
        return []
    return with_manifest(run.checkpoint_filename, store.names(run.checkpoints_path))


def list_checkpoints(
    store: Files, run: RunPaths, among: Iterable[Position] | None = None
) -> list[CheckpointInfo]:
    """Return a run's checkpoints, the oldest first.

    Those whose pointers are damaged are left out, with a warning. Whether the files are whole is
    not looked at. ``among`` is what `positions` has returned.
    """
    found = []
    for path, info in _pointers(store, run, positions(store, run) if among is None else among):
        if isinstance(info, CheckpointInfo):
            found.append(info)
        else:
            logger.warning("The checkpoint %s is left out: %s.", path, info)
    return found


def newest_checkpoint(store: Files, run: RunPaths) -> CheckpointInfo | None:
    """Return a run's newest checkpoint whose pointer can be read; None if there is none."""
    for path, info in _pointers(store, run, reversed(positions(store, run))):
        if isinstance(info, CheckpointInfo):
            return info
        logger.warning("The checkpoint %s is left out: %s.", path, info)
    return None


def best_checkpoint(infos: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the best of some checkpoints, of equal ones the first; None if nothing tells.

    Parameters
    ----------
    infos : sequence of CheckpointInfo
        In the order in which they were written. The last one that has a ``monitor`` says by what
        all are compared.
    """
    judge = next((info for info in reversed(infos) if info.monitor is not None), None)
    if judge is None or judge.monitor is None:
        return None
    sign = 1.0 if judge.mode == "min" else -1.0
    values = [sign * info.metrics.get(judge.monitor, math.nan) for info in infos]
    told = [index for index, value in enumerate(values) if not math.isnan(value)]
    return infos[min(told, key=values.__getitem__)] if told else None


def find_newest_valid(
    store: Files,
    run: RunPaths,
    look: Callable[[CheckpointInfo], T],
    among: Iterable[Position] | None = None,
) -> tuple[CheckpointInfo, T] | None:
    """Return a run's newest checkpoint that is whole; None if it has no checkpoints.

    Damaged ones are skipped in favour of those before, with a warning.

    Parameters
    ----------
    store : Files
        Holds the run.
    run : RunPaths
        The run.
    look : callable
        Looks at a checkpoint, and raises `DamagedCheckpoint` where that is not whole. What it
        returns comes with the checkpoint.
    among : iterable of Position, optional
        What `positions` has returned.

    Raises
    ------
    StoreError
        If there are checkpoints, and none is whole.
    UnreadableCheckpoint
        If one of these cannot be read: another time it may be whole.
    """
    unreadable: UnreadableCheckpoint | None = None
    damaged: list[str] = []
    among = positions(store, run) if among is None else among
    for path, info in _pointers(store, run, sorted(among, reverse=True)):
        reason: object = info
        if isinstance(info, CheckpointInfo):
            try:
                seen = look(info)
            except DamagedCheckpoint as error:
                reason = error
            except UnreadableCheckpoint as error:
                # If the store were away, those before could not be read either.
                reason = unreadable = error
            else:
                if damaged:
                    logger.warning(
                        "Checkpoints of run %r cannot be used: %s. The one before, %r, is taken.",
                        run.run_id,
                        ", ".join(damaged),
                        info.path,
                    )
                return info, seen
        damaged.append(f"{path!r} ({reason})")
    if not damaged:
        return None
    if unreadable is not None:
        away = unreadable.__cause__
        raise away if isinstance(away, StoreUnavailableError) else unreadable
    raise StoreError(
        f"No checkpoint of the run {run.run_id!r} is whole: {', '.join(damaged)}. Set another "
        f"run_id, or none, to train anew; or delete {run.checkpoints_path!r} to train this run "
        "from its beginning."
    )


def check_valid(store: Files, info: CheckpointInfo) -> None:
    """Make sure that a checkpoint is what its pointer says. Reads all of it.

    Raises
    ------
    DamagedCheckpoint
        If it is not.
    """
    with open_valid(store, info):
        pass


@contextlib.contextmanager
def open_valid(store: Files, info: CheckpointInfo) -> Iterator[IO[bytes]]:
    """Open a checkpoint that is what its pointer says.

    From a store that is elsewhere it is copied to a local file first, once from beginning to end.

    Raises
    ------
    DamagedCheckpoint
        If it is missing, cut or changed.
    UnreadableCheckpoint
        If the store does not give it.
    """
    is_local = store.local_path(info.path) is not None
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(store.open(info.path))
            if is_local:
                _check_size(info, source.seek(0, os.SEEK_END))
                source.seek(0)
            copy = None if is_local else stack.enter_context(tempfile.TemporaryFile())
            digest, size = hashlib.sha256(), 0
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if copy is not None:
                    copy.write(chunk)
        except DamagedCheckpoint:
            raise
        except OSError as error:
            if not _is_missing(error):
                raise UnreadableCheckpoint(f"{error}") from error
            raise DamagedCheckpoint("there is no such file") from error
        _check_size(info, size)
        if digest.hexdigest() != info.sha256:
            raise DamagedCheckpoint("its content has changed")
        file: IO[bytes] = source if copy is None else copy
        file.seek(0)
        yield file


def write_manifest(store: Files, info: CheckpointInfo) -> None:
    """Make a checkpoint exist whose file is there."""
    document = {
        "format": _FORMAT,
        **{name: value for name, value in vars(info).items() if name != "path"},
        # JSON has no NaN.
        "metrics": {n: v if math.isfinite(v) else str(v) for n, v in info.metrics.items()},
    }
    store.write_text(manifest_of(info.path), json.dumps(document, indent=1))


def delete_checkpoint(store: Files, run: RunPaths, position: Position) -> None:
    """Delete a checkpoint; at no moment there is a pointer to a file that is gone."""
    path = checkpoint_path(run, position)
    store.delete(manifest_of(path))
    store.delete(path)


def info_at(store: Files, path: str) -> CheckpointInfo | None:
    """Return what the pointer to a file says; None if there is none.

    Raises
    ------
    DamagedCheckpoint
        If the pointer cannot be read.
    """
    pointer = manifest_of(path)
    try:
        with store.open(pointer) as file:
            document: dict[str, Any] = json.loads(file.read())
        if document.pop("format") != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}")
        document["metrics"] = {name: float(value) for name, value in document["metrics"].items()}
        return CheckpointInfo(path, **document)
    except OSError as error:
        if not _is_missing(error):
            raise
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"its pointer {pointer!r} cannot be read: {error}") from error


def _pointers(
    store: Files, run: RunPaths, among: Iterable[Position]
) -> Iterator[tuple[str, CheckpointInfo | DamagedCheckpoint]]:
    """Yield the path of each checkpoint, and what its pointer says, or why that is unknown."""
    for position in among:
        path = checkpoint_path(run, position)
        try:
            info = info_at(store, path)
        except DamagedCheckpoint as error:
            yield path, error
            continue
        if info is not None and info.position != position:
            yield path, DamagedCheckpoint(f"its pointer is one of {info.position}")
        elif info is not None:
            yield path, info


def _is_missing(error: BaseException | None) -> bool:
    if isinstance(error, StoreError):
        error = error.__cause__
    return isinstance(error, (FileNotFoundError, IsADirectoryError))


def _check_size(info: CheckpointInfo, size: int) -> None:
    if size != info.size:
        raise DamagedCheckpoint(f"it has {size} bytes, and was written with {info.size}")
