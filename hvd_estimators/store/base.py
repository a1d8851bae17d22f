"""Base class of all stores."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import ParamError, StoreError, did_you_mean
from hvd_estimators.store import runs
from hvd_estimators.store.paths import RunPaths, StorePaths
from hvd_estimators.store.registry import store_class

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

__all__ = ["LEFT_OUT", "LeftOutNames", "RunPaths", "Store", "as_store"]

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
"""Unsupported methods of Horovod's stores, mapped to their replacements."""


class LeftOutNames:
    """Base class that explains missing methods of Horovod's stores."""

    if not TYPE_CHECKING:  # otherwise type checkers would accept every attribute

        def __getattr__(self, name: str) -> Any:
            if name in LEFT_OUT:
                kind = type(self).__name__
                raise AttributeError(
                    f"{kind} has no {name}, unlike horovod.spark. {LEFT_OUT[name]}"
                )
            # A property of a subclass may have failed. Repeat the lookup to raise the property's
            # own error.
            return object.__getattribute__(self, name)


def as_store(given: Any, name: str = "store") -> Store:
    """Return a given `Store`, or the store at a given path or URL; ``name`` is for messages.

    Raises
    ------
    ParamError
        If ``given`` is neither, or if no store class supports the path.
    """
    if isinstance(given, (str, os.PathLike)) and given != "":
        try:
            return Store.create(os.fspath(given))
        except ParamError as error:
            error.param = name if error.param == "prefix_path" else error.param
            raise
    if not isinstance(given, Store):
        raise ParamError(
            f"{name}: expected a Store, or its path or URL, found {given!r}. "
            "Set Store.create(prefix), or the prefix."
        )
    return given


def store_of(path: str, own: Store, name: str = "path") -> Store:
    """Return a store that opens a path: the given one if it can, otherwise one at the path.

    A new store has no ``storage_options``; its credentials come from the environment. Errors call
    the path ``name``.
    """
    try:
        own.checked_path(name, path)
    except ParamError:
        return as_store(path, name)
    return own


class Store(LeftOutNames, StorePaths):
    """Storage of a training run's data, checkpoints and logs under one prefix.

    ``Store.create(prefix)`` picks the class by the prefix. A store holds only plain values, so it
    can be pickled and sent to the workers. Runs on the driver and on ranks.

    Parameters
    ----------
    prefix_path : str, optional
        Root path of all files. Optional if ``train_path`` and ``runs_path`` are given.
    train_path, val_path, test_path : str, optional
        Paths of the datasets. Default: ``<prefix>/intermediate_{train,val,test}_data``.
    runs_path : str, optional
        Path of the runs. Default: ``<prefix>/runs``.
    save_runs : bool
        Save checkpoints and logs. Without them, a run cannot be resumed.
    storage_options : dict, optional
        Options for the fsspec filesystem, such as keys, tokens and endpoints. Ranks receive them
        with the store. They are never written to files, logs or messages.
    checkpoint_filename : str
        Prefix of the checkpoint file names in ``runs/<run_id>/checkpoints``.
    save_storage_options : bool
        Whether an estimator or model that is saved with this store saves its ``storage_options``,
        in plain text. By default they are left out because they may contain secrets. They must then
        be set again after loading.

    Raises
    ------
    ParamError
        If a path is missing, contains credentials, or is not supported by this class.
    """

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Create a store of the class that matches a prefix.

        Parameters
        ----------
        prefix_path : str
            A local path (on Databricks also ``dbfs:/…`` and ``/Volumes/…``), or a URL with a
            registered scheme. Registered schemes are ``hdfs://``, ``s3://``, ``gs://``,
            ``abfss://`` and similar ones, and those added by `hvd_estimators.store.register_store`.
        *args, **kwargs
            Passed to the store's constructor.

        Raises
        ------
        ParamError
            If no store class supports the prefix.
        """
        cls = store_class(prefix_path)
        parameters = inspect.signature(cls).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            for name in sorted(kwargs.keys() - parameters.keys()):
                raise ParamError(
                    f"{cls.__name__} has no argument {name!r}.{did_you_mean(name, parameters)}"
                )
        store: Store = cls(prefix_path, *args, **kwargs)
        return store

    @abstractmethod
    def spark_url(self, path: str) -> str:
        """Return the URL to which Spark writes a path."""

    def spark_urls(self, path: str) -> Sequence[str]:
        """Return all URLs by which Spark may know a path, the preferred one first.

        Default: only `spark_url`.
        """
        return (self.spark_url(path),)

    def check(self) -> None:
        """Check that the store can write runs. Runs on the driver.

        Raises
        ------
        StoreError
            If the store cannot write a file under the prefix, or under ``runs_path`` if there is no
            prefix.
        """
        self._check_folder(self.folder)

    def check_data(self) -> None:
        """Check that the store can write datasets. Runs on the driver.

        Raises
        ------
        StoreError
            If the store cannot write a file next to ``train_path``.
        """
        self._check_folder(self.data_folder)

    def _check_folder(self, folder: str) -> None:
        probe = f"{folder}/.probe-{uuid.uuid4().hex}"
        try:
            self.write_new(probe, "probe")
            replaces = self.write_new(probe, "another probe")
            self.delete(probe)
        except OSError as error:
            name = "prefix_path" if folder == self.prefix_path else "path"
            told = f"The store cannot be written to: {name}={folder!r} ({error})."
            if isinstance(error, StoreError):  # which says what to do
                raise type(error)(told) from error
            raise StoreError(
                f"{told} Set a prefix that exists, or can be made, on storage that the driver and "
                "all executors share."
            ) from error
        if replaces:
            logger.warning(
                "The storage of %r replaces a file that should only be created. Two fits that "
                "start one run_id at the same moment may therefore both train. Start one of them "
                "after the other, or set a store that supports conditional writes.",
                folder,
            )

    def without_options(self) -> Store:
        """Return a copy of the store without its ``storage_options``, which may contain secrets."""
        bare = copy.copy(self)
        bare.storage_options = {}
        return bare

    def list_runs(self) -> list[runs.RunInfo]:
        """Return information about all runs, most recently started first. Runs on the driver.

        Each run takes two reads of small files. Several runs are read in parallel. Nothing is
        written, so the store may be read-only.
        """
        return runs.list_runs(self)

    def load_history(self, run_id: str) -> pd.DataFrame:
        """Return the metrics that a run has recorded so far.

        Parameters
        ----------
        run_id : str
            The run.

        Returns
        -------
        pandas.DataFrame
            One row per value, as in a model's ``history_frame()``. The columns are ``epoch`` (from
            0), ``stage`` (``"train"`` or ``"validation"``), ``name`` and ``value``. If the run's
            ``history.json`` was deleted, the rows come from its checkpoints, one epoch each.

        Raises
        ------
        ParamError
            If the run does not exist.
        """
        return runs.load_history(self, run_id)

    def delete_run(self, run_id: str) -> None:
        """Delete a run with its checkpoints, logs, history and all other files in its folder.

        Parameters
        ----------
        run_id : str
            The run.

        Raises
        ------
        ParamError
            If the run does not exist, or if a fit is training it.
        """
        runs.delete_run(self, run_id)
