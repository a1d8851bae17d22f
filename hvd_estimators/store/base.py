"""The store interface: what the rest of the package asks of storage."""

from __future__ import annotations

import contextlib
import copy
import inspect
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import ParamError, StoreError, did_you_mean
from hvd_estimators.store import runs
from hvd_estimators.store.paths import RunPaths, StorePaths
from hvd_estimators.store.registry import store_class

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LEFT_OUT", "LeftOutNames", "RunPaths", "Store", "require_store"]

_RANKS = (
    "Ranks write to the store themselves: write_text(path, text), open_atomic(path) and read(path) "
    "work on both sides, and the store can be pickled."
)


_DATASETS = (
    "prepare_data writes datasets, get_dataset_properties(index) tells their rows and columns, and "
    "fit_on_parquet(dataset_idx=index) trains on them."
)


_PATHS = "get_full_path(path) is the path in the store, local_path(path) the one on this machine."


LEFT_OUT = {
    "copy": _RANKS,
    "get_data_metadata_path": _DATASETS,
    "get_filesystem": "fs is the filesystem.",
    "get_full_path_fn": _PATHS,
    "get_local_output_dir_fn": _RANKS,
    "get_localized_path": _PATHS,
    "get_parquet_dataset": _DATASETS,
    "is_parquet_dataset": _DATASETS,
    "matches": "Store.create(prefix) picks the class; isinstance tells which one it was.",
    "normalize_path": _PATHS,
    "parse_url": _PATHS,
    "read_serialized_keras_model": (
        "hvd_estimators.load_checkpoint(store, run_id=...) reads a run's checkpoint."
    ),
    "sync_fn": _RANKS,
    "to_remote": _RANKS,
}


"""Methods to what takes their place."""


class LeftOutNames:
    """Base of stores, which explains names that others had."""

    if not TYPE_CHECKING:  # else every name would seem to be there

        def __getattr__(self, name: str) -> Any:
            if name in LEFT_OUT:
                kind = type(self).__name__
                raise AttributeError(
                    f"{kind} has no {name}, unlike horovod.spark. {LEFT_OUT[name]}"
                )
            # A property of a subclass may have failed: its own error says more.
            return object.__getattribute__(self, name)


def require_store(given: Any) -> None:
    """Make sure that an argument ``store`` is one.

    Raises
    ------
    ParamError
        If it is something else.
    """
    if not isinstance(given, Store):
        raise ParamError(f"store: expected a Store, found {given!r}. Set Store.create(prefix).")


class Store(LeftOutNames, StorePaths):
    """Keeps what a training run reads and writes under one prefix.

    ``Store.create(prefix)`` picks the class by the prefix. A store holds values only, so it
    pickles and goes to the workers as it is. Runs on both sides.

    Parameters
    ----------
    prefix_path : str, optional
        Everything lives under this path. May be left out where ``train_path`` and ``runs_path`` are
        given.
    train_path, val_path, test_path : str, optional
        Datasets, where they are not ``<prefix>/intermediate_{train,val,test}_data``.
    runs_path : str, optional
        Runs, where they are not in ``<prefix>/runs``.
    save_runs : bool
        Keep checkpoints and logs; without them a run cannot be resumed.
    storage_options : dict, optional
        Passed to the fsspec filesystem: keys, tokens, endpoints. They go to the ranks with the
        store, and into no file, log or message.
    checkpoint_filename : str
        Begins the names of the checkpoints' files in ``runs/<run_id>/checkpoints``.
    save_storage_options : bool
        Whether an estimator or model that is saved with this store keeps its ``storage_options``,
        in plain text. By default they are left out, since they may be secrets, and have to be set
        again after loading.

    Raises
    ------
    ParamError
        If a path is not of this kind of store, holds credentials, or is missing.
    """

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Make the store that fits a prefix.

        Parameters
        ----------
        prefix_path : str
            A local path (on Databricks also ``dbfs:/…`` and ``/Volumes/…``), or a URL whose scheme
            a store is registered for: ``hdfs://``, ``s3://``, ``gs://``, ``abfss://`` and the like,
            and what `hvd_estimators.store.register_store` has added.
        *args, **kwargs
            Passed to the store's constructor.

        Raises
        ------
        ParamError
            If no store serves such a prefix.
        """
        cls = store_class(prefix_path)
        known = inspect.signature(cls).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            for name in sorted(kwargs.keys() - known.keys()):
                raise ParamError(
                    f"{cls.__name__} has no argument {name!r}.{did_you_mean(name, known)}"
                )
        store: Store = cls(prefix_path, *args, **kwargs)
        return store

    @abstractmethod
    def spark_url(self, path: str) -> str:
        """Return a path in the form in which Spark writes to it."""

    def spark_urls(self, path: str) -> Sequence[str]:
        """Return the forms in which a Spark may know a path, the best one first.

        By default `spark_url` alone.
        """
        return (self.spark_url(path),)

    @contextlib.contextmanager
    def options_for_others(self) -> Iterator[None]:
        """Let code that opens the store's URLs without it use its options, until the block ends.

        Lightning's ModelCheckpoint does so. Does nothing by default.
        """
        yield

    def check(self) -> None:
        """Make sure that runs can be written. Runs on the driver.

        Raises
        ------
        StoreError
            If a file cannot be written under the prefix, or ``runs_path`` where there is none.
        """
        self._check_folder(self.folder)

    def check_data(self) -> None:
        """Make sure that datasets can be written. Runs on the driver.

        Raises
        ------
        StoreError
            If a file cannot be written beside ``train_path``.
        """
        self._check_folder(self.data_folder)

    def _check_folder(self, folder: str) -> None:
        probe = f"{folder}/.probe-{uuid.uuid4().hex}"
        try:
            self.write_text(probe, "probe")
            self.delete(probe)
        except OSError as error:
            name = "prefix_path" if folder == self.prefix_path else "path"
            raise StoreError(
                f"The store cannot be written to: {name}={folder!r} ({error}). "
                "Set a prefix that exists, or can be made, on storage that the driver and all "
                "executors share."
            ) from error

    def without_options(self) -> Store:
        """Return the store without its ``storage_options``, which may hold secrets."""
        copied = copy.copy(self)
        copied.storage_options = {}
        return copied

    def list_runs(self) -> list[runs.RunInfo]:
        """Return what is known of all runs, the one that began last first. Runs on the driver.

        Each costs two reads of small files, several at a time.
        """
        return runs.list_runs(self)

    def load_history(self, run_id: str) -> pd.DataFrame:
        """Return what was measured in a run, as far as it has come.

        Parameters
        ----------
        run_id : str
            The run.

        Returns
        -------
        pandas.DataFrame
            A row per number, as a model's ``history_frame()`` has: ``epoch`` (from 0), ``stage``
            (``"train"`` or ``"validation"``), ``name`` and ``value``. Of a run whose
            ``history.json`` was deleted, what its checkpoints tell: an epoch each.

        Raises
        ------
        ParamError
            If there is no such run.
        """
        return runs.load_history(self, run_id)

    def delete_run(self, run_id: str) -> None:
        """Delete a run: its checkpoints, logs, history and all else that is in its folder.

        Parameters
        ----------
        run_id : str
            The run.

        Raises
        ------
        ParamError
            If there is no such run, or a fit trains it.
        """
        runs.delete_run(self, run_id)
