"""Transfer of the training call and the trained state, as files in the store, of any size.

Spark sends functions through the driver's disk and collects results through its JVM, which need to
hold them several times. Therefore the model that is sent to the ranks, and the state that they
return, are files in the run's folder. Spark itself transfers only small values.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Self

import cloudpickle

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import Unpickler, first_imports
from hvd_estimators.exceptions import HvdEstimatorsError, ResultsError
from hvd_estimators.store.base import Store
from hvd_estimators.store.checkpoints import checkpoint_path, positions
from hvd_estimators.store.files import CHUNK_BYTES, copy_from, digest_of, fetch
from hvd_estimators.store.leases import FencingToken
from hvd_estimators.store.storage_errors import naming_full_disk
from hvd_estimators.training.spec import TrainResult, TrainSpec

logger = logging.getLogger(__name__)

_PREFIX = "handover-"

Trainer = Callable[[Any], TrainResult]
"""Function that trains on one rank, given a `TrainSpec`, and returns the state on rank 0."""


@dataclass(frozen=True)
class StoredCall:
    """A trainer and its spec in a file; sent to the ranks.

    Attributes
    ----------
    store : Store
        Store of the file.
    path : str
        The file.
    digest : str
        SHA-256 digest of the file's content. It ensures that ranks unpickle no other content.
    state_path : str
        Path at which rank 0 writes the trained state.
    trainer_module : str
        Module of the trainer, for a launcher that imports it before it starts the ranks.
    fence : FencingToken or None
        Checks whether the ranks may still write to the run.
    """

    store: Store
    path: str
    digest: str
    state_path: str
    trainer_module: str = ""
    fence: FencingToken | None = None


@naming_full_disk()
def train_stored(call: StoredCall) -> TrainResult:
    """Run a stored trainer, and write the resulting state to the store. Runs on every rank.

    Returns
    -------
    TrainResult
        The trainer's result, with the digest of the state's file instead of the state.

    Raises
    ------
    StoreError
        If a disk is full, beside the errors of the trainer and the store.
    """
    with tempfile.TemporaryFile() as file:
        copy_from(call.store, call.path, file, call.digest)
        *_, train, spec = _Unpickler(file, call.store, posixpath.dirname(call.path)).load()
    if call.fence is not None:
        spec = replace(spec, checkpoints=replace(spec.checkpoints, fence=call.fence))
    result: TrainResult = train(spec)
    state = result.state
    if state is None:
        return result
    with call.store.open_atomic(call.state_path) as stored:
        if isinstance(state, LocalFile):
            with open(state.path, "rb") as local:
                shutil.copyfileobj(local, stored, CHUNK_BYTES)
            state.close()
        else:
            stored.write(state)
        digest = digest_of(stored)
    return replace(
        result, state=None, state_digest=digest, state_is_file=isinstance(state, LocalFile)
    )


class CallTransfer:
    """The transferred files of one fit, as a context manager that deletes them. Runs on the driver.

    Parameters
    ----------
    spec : TrainSpec
        Specification for the trainer.
    """

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        self._store = spec.store
        self._folder = f"{spec.run.run_path}/{_PREFIX}{uuid.uuid4().hex}"
        self._state_path = f"{self._folder}/state"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        with _logged("The files of a fit could not be deleted"):
            self._store.delete(self._folder)

    def delete_others(self) -> None:
        """Delete files of earlier fits of the run that were killed, if this fit holds its lease."""
        if not self._store.saving_runs():
            return
        run_path = self._spec.run.run_path
        with _logged("The files of earlier fits could not be deleted"):
            for name in self._store.names(run_path):
                folder = f"{run_path}/{name}"
                if name.startswith(_PREFIX) and folder != self._folder:
                    self._store.delete(folder)

    def put(self, train: Trainer, spec: TrainSpec | None = None) -> StoredCall:
        """Write the call for all ranks; ``spec`` replaces an earlier spec."""
        self._spec = spec or self._spec
        path = f"{self._folder}/call"
        with self._store.open_atomic(path) as file:
            _Pickler(file, self._store, self._folder).dump((*first_imports(), train, self._spec))
            digest = digest_of(file)
        module = getattr(train, "__module__", "")
        return StoredCall(self._store, path, digest, self._state_path, module)

    def read(self, results: Sequence[TrainResult]) -> list[TrainResult]:
        """Return the ranks' results, with the state that rank 0 wrote."""
        first = results[0]
        if not first.state_digest:
            return list(results)
        local, _ = fetch(self._store, self._state_path, first.state_digest)
        if first.state_is_file:
            return [replace(first, state=local), *results[1:]]
        with open(local.path, "rb") as file:
            state = file.read()
        local.close()
        return [replace(first, state=state), *results[1:]]

    @contextlib.contextmanager
    def describing_saved_state(self, *, trained: bool) -> Iterator[None]:
        """Add the run's newest checkpoint, and how to load it, to errors of the block.

        Parameters
        ----------
        trained : bool
            Whether training on the ranks has ended. If it has, errors of other packages become a
            `ResultsError`. Otherwise they may be errors of a backend, and are not changed.
        """
        try:
            yield
        except HvdEstimatorsError as error:
            if hint := self._hint():
                error.add_remedy(hint)
            raise
        except BaseException as error:
            if not (trained and isinstance(error, Exception)):
                hint = self._hint()
                if hint:
                    logger.error("%s", hint)
                raise
            raise ResultsError(
                "The ranks have trained the model, but the driver could not create it from the "
                f"trained state ({type(error).__name__}: {error}). {self._hint()}".rstrip()
            ) from error

    def _hint(self) -> str:
        """Return the path of the newest checkpoint, for a message; empty if there is none."""
        run = self._spec.run
        with _logged("The run's checkpoints could not be looked up in the store"):
            checkpoints = positions(self._store, run)
            if checkpoints:
                return (
                    f"The trained state is saved as run_id={run.run_id!r}, in the checkpoint "
                    f"{checkpoint_path(run, checkpoints[-1])!r}. fit() with that run_id and "
                    "otherwise the same params resumes there and repeats no completed epoch; "
                    f"hvd_estimators.load_checkpoint(store, run_id={run.run_id!r}) opens it."
                )
        return ""


@contextlib.contextmanager
def _logged(message: str) -> Iterator[None]:
    """Log errors of the store instead of raising them, so that they do not hide other errors."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", message, error)


# The store's options may contain secrets. They are sent with the call itself, like all data that
# Spark gets, and not in a file that others could read. Files of the spec become files in the store.


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: Any, store: Store, folder: str) -> None:
        super().__init__(file)
        self._store = store
        self._folder = folder
        self._names = {id(store): "store", id(store.storage_options): "storage_options"}
        self._files: dict[int, tuple[str, str]] = {}

    def persistent_id(self, obj: Any) -> str | tuple[str, str] | None:
        if isinstance(obj, LocalFile):
            if id(obj) not in self._files:
                self._files[id(obj)] = self._put(obj)
            return self._files[id(obj)]
        return self._names.get(id(obj))

    def _put(self, local: LocalFile) -> tuple[str, str]:
        """Copy a file to the store, and return its name there and its digest."""
        name = f"file-{len(self._files)}"
        with (
            open(local.path, "rb") as source,
            self._store.open_atomic(f"{self._folder}/{name}") as target,
        ):
            shutil.copyfileobj(source, target, CHUNK_BYTES)
            digest = digest_of(target)
        return name, digest


class _Unpickler(Unpickler):
    def __init__(self, file: IO[bytes], store: Store, folder: str) -> None:
        super().__init__(file)
        self._store = store
        self._folder = folder
        self._values: dict[Any, Any] = {"store": store, "storage_options": store.storage_options}

    def persistent_load(self, pid: Any) -> Any:
        if pid not in self._values:
            name, digest = pid
            self._values[pid] = fetch(self._store, f"{self._folder}/{name}", digest)[0]
        return self._values[pid]
