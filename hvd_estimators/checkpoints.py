"""Checkpoints of runs for those who look at them: with the framework that wrote them, no Spark."""

from __future__ import annotations

import contextlib
import importlib
import logging
import posixpath
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store.base import RunPaths, Store, require_store
from hvd_estimators.store.checkpoints import (
    CheckpointInfo,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    best_checkpoint,
    find_newest_valid,
    info_at,
    list_checkpoints,
    open_valid,
)
from hvd_estimators.training.run_state import describing_damage, has_state, read_archive

__all__ = ["Checkpoint", "load_checkpoint"]

logger = logging.getLogger(__name__)

_READERS = {
    "torch": "hvd_estimators.torch.reader",
    "lightning": "hvd_estimators.torch.reader",
    "keras": "hvd_estimators.keras.reader",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load_checkpoint` has read.

    Attributes
    ----------
    path : str
        The framework's file.
    framework : str
        ``"torch"``, ``"keras"`` or ``"lightning"``; ``"torch"``, too, where only the file tells.
    epoch, rows : int or None
        Epochs that were done, and rows of the epoch after these, over all shards. None in a file
        that no estimator has written.
    history : list of dict
        One per epoch that was done, as torch's ``getHistory()``: epoch, train and validation.
    metrics : mapping of str to float
        What was measured in the last of these; validation's begin with ``val_``.
    content : object
        The framework's own: of torch ``{"model": …, "optimizer": …, …}``, states as
        ``load_state_dict`` takes them; of Lightning what its Trainer writes, with ``state_dict``;
        of Keras the model, or its weights by name where its class has no config.
    """

    path: str
    framework: str
    epoch: int | None
    rows: int | None
    history: list[dict[str, Any]]
    metrics: Mapping[str, float]
    content: Any


def load_checkpoint(
    store: Store | str,
    run_id: str | None = None,
    which: str = "newest",
    *,
    safe: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Read a checkpoint of a run. Needs the framework that wrote it, neither Spark nor Horovod.

    Parameters
    ----------
    store : Store or str
        Holds the run; or its prefix; or, without ``run_id``, the path of a checkpoint's file.
    run_id : str, optional
        Name of the run.
    which : {"newest", "best"} or str
        The newest, the best by what the run has monitored (see ``checkpoint_monitor``), or a path
        as ``store.get_checkpoints(run_id)`` returns it. Damaged ones are skipped, with a warning.
    safe : bool
        Run no code from the file.
    custom_objects : mapping, optional
        Name to custom class or function of a Keras model.

    Returns
    -------
    Checkpoint
        What it holds, on the CPU.

    Raises
    ------
    ParamError
        If neither a run nor a path is given.
    StoreError
        If there is no such checkpoint, it is damaged, or it holds more than is safe to read.

    Examples
    --------
    >>> best = load_checkpoint(store, run_id="line", which="best")    # doctest: +SKIP
    >>> net.load_state_dict(best.content["model"])                    # doctest: +SKIP
    """
    with (
        _opened(store, run_id, which) as (path, info, file),
        describing_damage(path, "be read", ""),
    ):
        framework = _framework(file) if info is None else info.framework
        state = read_archive(file) if has_state(file) else None
        content = None
        if framework in _READERS:
            reader = importlib.import_module(_READERS[framework])
            content = reader.read_content(file, safe, custom_objects or {})
    return Checkpoint(
        path,
        framework,
        None if state is None else state.epoch,
        None if state is None else state.rows,
        [] if state is None else [record.as_dict() for record in state.history],
        {} if info is None else info.metrics,
        content,
    )


@contextlib.contextmanager
def _opened(
    store: Store | str, run_id: str | None, which: str
) -> Iterator[tuple[str, CheckpointInfo | None, IO[bytes]]]:
    """Open the checkpoint that is meant; yield its path, what its pointer says, and the file."""
    by_name = which in ("newest", "best")
    if run_id is None and by_name and isinstance(store, str):
        which, by_name, store = store, False, posixpath.dirname(store)
    if isinstance(store, str):
        store = Store.create(store)
    require_store(store)
    if not isinstance(which, str):
        raise ParamError(
            f"which: expected 'newest', 'best' or a path of a checkpoint, found {which!r}."
        )
    with contextlib.ExitStack() as stack:
        if by_name:
            if run_id is None:
                raise ParamError("run_id is not set. Set run_id, or which=path of a checkpoint.")
            info, file = _of_run(store, store.run_paths(run_id), which, stack)
            yield info.path, info, file
            return
        path = store.get_full_path(which)
        found = info_at(store, path)
        try:
            opened = store.open(path) if found is None else open_valid(store, found)
            yield path, found, stack.enter_context(opened)
        except DamagedCheckpoint as error:
            raise StoreError(f"The checkpoint {path!r} is damaged: {error}.") from error
        except FileNotFoundError as error:
            raise StoreError(f"The store holds no checkpoint {path!r}.") from error


def _of_run(
    store: Store, run: RunPaths, which: str, stack: contextlib.ExitStack
) -> tuple[CheckpointInfo, IO[bytes]]:
    """Open the newest or the best checkpoint of a run that is whole."""

    def look(info: CheckpointInfo) -> IO[bytes]:
        return stack.enter_context(open_valid(store, info))

    if which == "newest":
        newest = find_newest_valid(store, run, look)
        if newest is not None:
            return newest
    infos = list_checkpoints(store, run) if which == "best" else []
    while best := best_checkpoint(infos):
        try:
            return best, look(best)
        except (DamagedCheckpoint, UnreadableCheckpoint) as error:
            logger.warning("The best checkpoint, %r, is skipped: %s.", best.path, error)
            infos.remove(best)
    raise StoreError(
        f"The store holds no checkpoint of the run {run.run_id!r} in {run.checkpoints_path!r}"
        f"{', or none of which it is known how good it is' if which == 'best' else ''}."
    )


def _framework(file: IO[bytes]) -> str:
    """Return what has written a file that no pointer tells of."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        if any(name.endswith("/data.pkl") for name in names):
            return "torch"
        if "model.weights.h5" in names:
            return "keras"
    file.seek(0)
    if file.read(4) == b"\x89HDF":
        return "keras"
    raise ValueError("it is no file of torch, Keras or Lightning")
