"""Inspection of a run's checkpoints without Spark.

Reading a checkpoint requires the framework that wrote it.
"""

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
from hvd_estimators.store.base import RunPaths, Store, as_store
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

logger = logging.getLogger(__name__)

_READERS = {
    "torch": "hvd_estimators.torch.serialization",
    "lightning": "hvd_estimators.torch.serialization",
    "keras": "hvd_estimators.keras.model_file",
}


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint, as returned by `load_checkpoint`.

    Attributes
    ----------
    path : str
        Path of the framework's file.
    framework : str
        ``"torch"``, ``"keras"`` or ``"lightning"``. Without a manifest, the file's format decides,
        and a Lightning file also counts as ``"torch"``.
    epoch, rows : int or None
        Completed epochs, and rows already trained in the next epoch, over all shards. None if no
        estimator wrote the file.
    history : list of dict
        One dict per completed epoch, with the keys of torch's ``getHistory()``: epoch, train and
        validation.
    metrics : mapping of str to float
        Metrics of the last completed epoch. Names of validation metrics start with ``val_``.
    content : object
        The framework's content. For torch: ``{"model": …, "optimizer": …, …}``, with state dicts
        for ``load_state_dict``. For Lightning: the Trainer's checkpoint, with ``state_dict``. For
        Keras: the values of ``model.variables`` by layer and name, in their order.
    """

    path: str
    framework: str
    epoch: int | None
    rows: int | None
    history: list[dict[str, Any]]
    metrics: Mapping[str, float]
    content: Any


def load_checkpoint(
    store: Store | str, run_id: str | None = None, which: str = "newest", *, safe: bool = True
) -> Checkpoint:
    """Read a checkpoint of a run.

    This requires the framework that wrote the checkpoint, but neither Spark nor Horovod.

    Parameters
    ----------
    store : Store or str
        The store that holds the run, or the store's prefix. Without ``run_id``, it can also be the
        path of a checkpoint file.
    run_id : str, optional
        Name of the run.
    which : {"newest", "best"} or str
        The newest checkpoint, the best one by the run's monitored metric (see
        ``checkpoint_monitor``), or a path from ``store.get_checkpoints(run_id)``. The first two
        skip damaged checkpoints with a warning.
    safe : bool
        Do not run code from the file.

    Returns
    -------
    Checkpoint
        The checkpoint's contents, on the CPU.

    Raises
    ------
    ParamError
        If neither a run nor a path is given.
    StoreError
        If the checkpoint does not exist, is damaged, or holds objects that are not safe to read.

    Examples
    --------
    >>> best = load_checkpoint(store, run_id="line", which="best")    # doctest: +SKIP
    >>> net.load_state_dict(best.content["model"])                    # doctest: +SKIP
    """
    with (
        _opened(store, run_id, which) as (files, path, info, file),
        describing_damage(path, "be read", ""),
    ):
        framework = _framework(file) if info is None else info.framework
        state = read_archive(file) if has_state(file) else None
        content = None
        if framework in _READERS:
            reader = importlib.import_module(_READERS[framework])
            folder = files, posixpath.dirname(path)
            content = reader.read_content(file, safe, folder)
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
) -> Iterator[tuple[Store, str, CheckpointInfo | None, IO[bytes]]]:
    """Open the selected checkpoint; yield store, path, content of the manifest, and the file."""
    by_name = which in ("newest", "best")
    if run_id is None and by_name and isinstance(store, str):
        which, by_name = store, False
    store = as_store(store)
    if not isinstance(which, str):
        raise ParamError(
            f"which: expected 'newest', 'best' or a path of a checkpoint, found {which!r}."
        )
    with contextlib.ExitStack() as stack:
        if by_name:
            if run_id is None:
                raise ParamError("run_id is not set. Set run_id, or which=path of a checkpoint.")
            info, file = _of_run(store, store.run_paths(run_id), which, stack)
            yield store, info.path, info, file
            return
        path = store.get_full_path(which)
        manifest = info_at(store, path)
        try:
            opened = store.open(path) if manifest is None else open_valid(store, manifest)
            yield store, path, manifest, stack.enter_context(opened)
        except DamagedCheckpoint as error:
            raise StoreError(f"The checkpoint {path!r} is damaged: {error}.") from error
        except FileNotFoundError as error:
            raise StoreError(f"The store holds no checkpoint {path!r}.") from error


def _of_run(
    store: Store, run: RunPaths, which: str, stack: contextlib.ExitStack
) -> tuple[CheckpointInfo, IO[bytes]]:
    """Open the newest or the best valid checkpoint of a run."""

    def open_checked(info: CheckpointInfo) -> IO[bytes]:
        return stack.enter_context(open_valid(store, info))

    if which == "newest":
        newest = find_newest_valid(store, run, open_checked)
        if newest is not None:
            return newest
    infos = list_checkpoints(store, run) if which == "best" else []
    while best := best_checkpoint(infos):
        try:
            return best, open_checked(best)
        except (DamagedCheckpoint, UnreadableCheckpoint) as error:
            logger.warning("The best checkpoint, %r, is skipped: %s.", best.path, error)
            infos.remove(best)
    raise StoreError(
        f"The store holds no checkpoint of the run {run.run_id!r} in {run.checkpoints_path!r}"
        f"{', or none with a value of the metric' if which == 'best' else ''}."
    )


def _framework(file: IO[bytes]) -> str:
    """Return the framework that wrote a file without a manifest."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        if any(name.endswith("/data.pkl") for name in names):
            return "torch"
        if "hvd_estimators.keras.json" in names:
            return "keras"
    raise ValueError("it is not a file of torch, Keras or Lightning")
