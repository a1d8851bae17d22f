"""Writing and restoring of a run's checkpoints on ranks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import logging
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any, NamedTuple, Self

from hvd_estimators.exceptions import StoreError, StoreUnavailableError, TrainingInterruptedError
from hvd_estimators.store.base import RunPaths, Store
from hvd_estimators.store.checkpoints import (
    CheckpointInfo,
    DamagedCheckpoint,
    TensorFile,
    best_checkpoint,
    checkpoint_path,
    delete_checkpoint,
    find_newest_valid,
    list_checkpoints,
    open_valid,
    write_manifest,
)
from hvd_estimators.store.files import CHUNK_BYTES
from hvd_estimators.store.paths import Position, manifest_of, orphans, tensors_of, with_manifest
from hvd_estimators.store.storage_errors import naming_full_disk
from hvd_estimators.training.object_collectives import ObjectExchange
from hvd_estimators.training.run_state import (
    RunState,
    describing_damage,
    describing_load,
    read_archive,
    write_archive,
)
from hvd_estimators.training.shard_state import (
    ShardStates,
    StatePart,
    capture_by_shard,
    merge_by_shard,
)
from hvd_estimators.training.spec import (
    CheckpointOptions,
    EpochMetrics,
    TrainSpec,
    check_monitor,
    measured,
    mode_of,
    monitored,
)

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of a run, and deletes old ones. Runs on ranks; rank 0 writes most.

    A save writes to a local file immediately, unless the state is already a copy. A thread does the
    rest while training continues: digest, upload, manifest and deletion of old checkpoints. The
    next save waits for the thread, and so does the end of the block, even after an error. Used as a
    context manager.

    Parameters
    ----------
    store : Store
        Store of the checkpoints.
    run : RunPaths
        The run.
    options : CheckpointOptions
        Options that decide which checkpoints are kept.
    validates : bool
        Whether some epochs may have no validation while others have one.

    Attributes
    ----------
    store, run
        As given.
    """

    def __init__(
        self, store: Store, run: RunPaths, options: CheckpointOptions, *, validates: bool = False
    ) -> None:
        self.store = store
        self.run = run
        self._options = options
        self._validates = validates
        self._stored: dict[Position, CheckpointInfo | None] | None = None
        self._orphans: list[str] = []
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._upload: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        try:
            self.finish()
        except Exception as error:
            # Ranks that stop on request say that there is a checkpoint.
            if exc is None or isinstance(exc, TrainingInterruptedError):
                raise
            # The error that ended training is more important.
            logger.warning("%s", error)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def save(
        self,
        state: RunState,
        write_model: Callable[[IO[bytes]], None],
        upload_others: Callable[[], None] | None = None,
        *,
        is_copy: bool = False,
        files: tuple[TensorFile, ...] = (),
    ) -> None:
        """Save a state. The caller may change the state when this method returns.

        Parameters
        ----------
        state : RunState
            The state to append to the framework's file.
        write_model : callable
            Writes the framework's file, a zip archive, to a file object.
        upload_others : callable, optional
            Uploads the checkpoint's other files. The thread calls it before it publishes the
            checkpoint.
        is_copy : bool
            Whether ``write_model`` writes a copy that does not change, so that the thread may write
            it. ``state`` must then be a copy as well.
        files : tuple of TensorFile
            Files of the checkpoint that the ranks have written.

        Raises
        ------
        StoreError
            If this checkpoint or the previous one cannot be written.
        ParamError
            If the metric that selects the best checkpoint does not exist; the checkpoint is kept.
            Also if its name does not say whether lower or higher values are better.
        """
        self.finish()
        metrics = measured(state.history[-1]) if state.history and not state.rows else {}
        waits = bool(metrics) and self._validates and state.history[-1].validation is None
        names = {n for record in state.history for n in measured(record)} if waits else metrics
        monitor = monitored(self._options.monitor, names)
        mode = "min" if monitor is None else mode_of(monitor, self._options.mode)
        path = checkpoint_path(self.run, Position(state.epoch, state.rows))
        written = None if is_copy else self._write(path, state, write_model)
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "hvd_estimators checkpoint")
        info = CheckpointInfo(
            path,
            0,
            "",
            state.epoch,
            state.rows,
            self._options.framework,
            metrics,
            monitor,
            mode,
            files,
        )

        def publish() -> None:
            self._publish(written or self._write(path, state, write_model), info, upload_others)

        self._upload = self._thread.submit(publish)
        if metrics and not waits:
            check_monitor(self._options.monitor, metrics)

    def finish(self) -> None:
        """Wait until the last save is in the store.

        Raises
        ------
        StoreError
            If the checkpoint could not be written.
        """
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def _write(
        self, path: str, state: RunState, write_model: Callable[[IO[bytes]], None]
    ) -> _Written:
        with _as_store_error(path), contextlib.ExitStack() as stack:
            target = stack.enter_context(self.store.open_atomic(path))
            file = target
            if not (target.seekable() and target.readable()):
                # Appending to an archive needs seek and read. The file is copied to the target
                # later.
                file = stack.enter_context(tempfile.TemporaryFile())
            noting: Any = _NotingErrors(file)
            try:
                write_archive(noting, state, write_model)
            except Exception as error:
                if noting.error is not None:
                    raise noting.error from error.__cause__
                # A temporary file of the framework, not the target, may have no space.
                with naming_full_disk():
                    raise
            return _Written(stack.pop_all(), file, target)

    def _publish(
        self, written: _Written, info: CheckpointInfo, upload_others: Callable[[], None] | None
    ) -> None:
        opened, file, target = written
        with _as_store_error(info.path):
            with opened:
                if upload_others is not None:
                    self._check_fence()
                    upload_others()
                digest, size = hashlib.sha256(), 0
                file.seek(0)
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                if file is not target:
                    file.seek(0)
                    shutil.copyfileobj(file, target, CHUNK_BYTES)
                stored = self._stored_checkpoints(info)
                # Checked again, because ranks of another launch may write a file with this name.
                self._check_fence()
                if info.position in stored:
                    # An earlier launch or fit left a damaged checkpoint at this position, so
                    # training resumed before it.
                    self.store.delete(manifest_of(info.path))
            info = replace(info, size=size, sha256=digest.hexdigest())
            self._check_fence()
            write_manifest(self.store, info)
        stored[info.position] = info
        try:
            self._check_fence()
            self._delete_others(stored, info)
        except OSError as error:
            logger.warning("Checkpoints that are not needed could not be deleted: %s", error)

    def _check_fence(self) -> None:
        if self._options.fence is not None:
            self._options.fence.check(self.store)

    def _stored_checkpoints(self, current: CheckpointInfo) -> dict[Position, CheckpointInfo | None]:
        """Return the checkpoints in the store by position; None marks an unreadable one.

        The first call lists the store, and records orphans of unfinished saves for deletion. Files
        of the current save, and those with the same names that it replaces, are no orphans.
        """
        if self._stored is None:
            store, run = self.store, self.run
            directory = run.checkpoints_path
            assert directory is not None
            names = store.names(directory)
            among = with_manifest(run.checkpoint_filename, names)
            self._stored = dict.fromkeys(among)
            self._stored.update({i.position: i for i in list_checkpoints(store, run, among)})
            own = {posixpath.basename(p) for p in (current.path, tensors_of(current.path))}
            self._orphans = [n for n in orphans(run.checkpoint_filename, names) if n not in own]
        return self._stored

    def _delete_others(
        self, stored: dict[Position, CheckpointInfo | None], newest: CheckpointInfo
    ) -> None:
        """Delete checkpoints that are not kept, and orphans, after a new checkpoint was written.

        Checkpoints at later positions are damaged. They are deleted, and their steps are repeated.
        """
        infos = [
            info
            for position, info in sorted(stored.items())
            if info is not None and position <= newest.position
        ]
        best = best_checkpoint(infos)
        kept_positions = {
            info.position for info in [*infos[-self._options.keep :], *([best] if best else [])]
        }
        for position in stored.keys() - kept_positions:
            delete_checkpoint(self.store, self.run, position, stored[position])
            del stored[position]
        while self._orphans:
            self.store.delete(f"{self.run.checkpoints_path}/{self._orphans.pop()}")


class _Written(NamedTuple):
    """A written local file, and its target, which is published when ``opened`` closes."""

    opened: contextlib.ExitStack
    file: IO[bytes]
    target: IO[bytes]


class _NotingErrors:
    """A file that records errors of writes, because torch does not report a full disk."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _as_store_error(path: str) -> Iterator[None]:
    """Convert errors that prevent a checkpoint from being written to a `StoreError`."""
    try:
        with naming_full_disk():
            yield
    except OSError as error:
        cause = f"{error}" if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        is_temporary = isinstance(error, StoreUnavailableError)
        raise (StoreUnavailableError if is_temporary else StoreError)(
            f"The checkpoint {path!r} could not be written ({cause}). Earlier checkpoints still "
            "exist: fit() with the same run_id resumes from the newest."
        ) from error


def restore(
    store: Store,
    run: RunPaths,
    exchange: ObjectExchange,
    rank: int,
    load: Callable[[IO[bytes]], None],
) -> RunState | None:
    """Load a run's newest valid checkpoint, if there is one. All ranks must call it.

    Rank 0 selects the checkpoint. Every rank reads it and checks that it is the same file.

    Parameters
    ----------
    store : Store
        Store of the run.
    run : RunPaths
        The run.
    exchange : ObjectExchange
        Broadcasts rank 0's selection.
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
        If there are checkpoints, but all are damaged. Also if the newest valid checkpoint is of
        another version or another model, or differs between ranks.
    """
    with contextlib.ExitStack() as stack:
        newest = None
        if rank == 0:
            newest = find_newest_valid(
                store, run, lambda info: stack.enter_context(open_valid(store, info))
            )
        info = exchange.broadcast(None if newest is None else newest[0], "checkpoint")
        if info is None:
            return None
        try:
            if newest is None:
                # Rank 0 has checked the ranks' files, of which each rank reads parts.
                file = stack.enter_context(open_valid(store, replace(info, files=())))
            else:
                file = newest[1]
        except DamagedCheckpoint as error:
            raise StoreError(
                f"{info.path!r} is not the same file on rank {rank} and on rank 0 ({error}). Set a "
                "store with the same files on all machines, which no other program changes."
            ) from error
        with describing_damage(info.path):
            state = read_archive(file)
        with describing_load(info.path):
            load(file)
    if rank == 0:
        rows = f" and {state.rows} rows of the next" if state.rows else ""
        logger.info("Resuming run %s after %d epochs%s", run.run_id, state.epoch, rows)
    return state


def gather_state(
    spec: TrainSpec,
    history: Sequence[EpochMetrics],
    batches: int,
    shards: ShardStates,
    streams: StatePart,
    exchange: ObjectExchange,
    own: Any,
    *,
    stopped: bool = False,
) -> tuple[RunState, list[Any]]:
    """Gather the state of a run at a position in training. All ranks must call it.

    Parameters
    ----------
    spec : TrainSpec
        The training job.
    history : sequence of EpochMetrics
        Records of the completed epochs.
    batches : int
        A shard's completed batches in the next epoch.
    shards : ShardStates
        The shards that this rank runs.
    streams : StatePart
        The random streams of the shard that the rank currently runs.
    exchange : ObjectExchange
        Gathers the states.
    own : object
        Further state of this rank.
    stopped : bool
        Whether a callback has stopped training.

    Returns
    -------
    RunState
        The state, without `RunState.parts`.
    list
        ``own`` of each rank.
    """
    gathered = exchange.gather((capture_by_shard(shards, streams.capture), own), "checkpoint")
    captured, of_ranks = zip(*gathered, strict=True)
    data, epoch = spec.data, len(history)
    state = RunState(
        epoch,
        data.rows_after(epoch, batches),
        data.num_shards,
        tuple(history),
        merge_by_shard(captured, data.num_shards),
        stopped=stopped,
    )
    return state, list(of_ranks)
