"""The store interface and the layout of paths under its prefix."""

from __future__ import annotations

import contextlib
import copy
import posixpath
import re
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store.checkpoint_names import listed
from hvd_estimators.store.errors import holds_credentials, redacted
from hvd_estimators.store.files import Files
from hvd_estimators.store.registry import store_class

if TYPE_CHECKING:
    import pandas as pd

    from hvd_estimators.store.runs import RunInfo

__all__ = ["RunPaths", "Store"]


@dataclass(frozen=True)
class RunPaths:
    """Where the artefacts of one run live; crosses to the workers.

    Attributes
    ----------
    run_id : str
        Name of the run.
    run_path : str
        Directory of the run.
    checkpoints_path : str or None
        Directory of the checkpoints, see `hvd_estimators.store.checkpoints`; None where the store
        keeps no runs.
    logs_path : str or None
        Directory of the TensorBoard event files; None where the store keeps no runs.
    fingerprint : mapping
        What the run is of, see `hvd_estimators.fitting.runs`.
    checkpoint_filename : str
        What the names of the checkpoints' files begin with.
    """

    run_id: str
    run_path: str
    checkpoints_path: str | None
    logs_path: str | None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_filename: str = "checkpoint"


class Store(Files):
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

    creates_exclusively: ClassVar[bool] = False
    """Whether of several processes that call `write_new` at the same time one alone succeeds."""

    def __init__(
        self,
        prefix_path: str | None = None,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
        save_storage_options: bool = False,
    ) -> None:
        self.storage_options = dict(storage_options or {})
        self.save_storage_options = save_storage_options
        self.prefix_path = self._checked_path("prefix_path", prefix_path)
        if self.prefix_path is None and not (train_path and runs_path):
            raise ParamError(
                "prefix_path: expected a path, found none. It may be left out where train_path and "
                "runs_path are set."
            )
        self._train_path = self._data_path("train_path", train_path, "intermediate_train_data")
        self._val_path = self._data_path("val_path", val_path, "intermediate_val_data")
        self._test_path = self._data_path("test_path", test_path, "intermediate_test_data")
        runs = self._data_path("runs_path", runs_path, "runs")
        assert runs is not None
        self._runs_path = runs
        self._save_runs = save_runs
        self._checkpoint_filename = checkpoint_filename or "checkpoint"

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
        store: Store = store_class(prefix_path)(prefix_path, *args, **kwargs)
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

    @property
    def folder(self) -> str:
        """The prefix; ``runs_path`` where there is none."""
        return self.prefix_path or self._runs_path

    @property
    def data_folder(self) -> str:
        """The folder that datasets are written in: that of ``train_path``."""
        assert self._train_path is not None
        return posixpath.dirname(self._train_path)

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

    def get_train_data_path(self, idx: str | None = None) -> str:
        """Return where the training part of a dataset lies.

        With ``idx`` that is a prepared dataset's manifest, and its rows if it has no validation
        part; `list_prepared_data` tells the folders of both parts.
        """
        return _numbered("train_path", self._train_path, idx)

    def get_val_data_path(self, idx: str | None = None) -> str:
        """Return where the validation part of a dataset lies that `prepare_data` did not write."""
        return _numbered("val_path", self._val_path, idx)

    def get_test_data_path(self, idx: str | None = None) -> str:
        """Return where the test part of a dataset lies."""
        return _numbered("test_path", self._test_path, idx)

    def saving_runs(self) -> bool:
        """Return whether runs are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the directory of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the directory of a run."""
        return f"{self._runs_path}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the directory of a run's checkpoints; None where runs are not kept.

        `get_checkpoints` returns the files in it.
        """
        return f"{self.get_run_path(run_id)}/checkpoints" if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the paths of a run's checkpoints that end in a suffix, the oldest first.

        Numbers in names count as numbers. Those of the estimators, and what a ``ModelCheckpoint``
        has written. `hvd_estimators.load_checkpoint` opens them.
        """
        directory = self.get_checkpoint_path(run_id)
        if directory is None:
            return []
        names = listed(self._checkpoint_filename, self.names(directory), suffix)
        return [f"{directory}/{name}" for name in names]

    def get_checkpoint_filename(self) -> str:
        """Return what the names of checkpoints' files begin with."""
        return self._checkpoint_filename

    def get_logs_path(self, run_id: str) -> str | None:
        """Return the directory of a run's TensorBoard logs; None where runs are not kept."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """Return the name of the logs' directory in a run's directory."""
        return "logs"

    def run_paths(self, run_id: str) -> RunPaths:
        """Return all paths of a run."""
        if not re.fullmatch(r"[\w.=-]+", run_id) or run_id in (".", ".."):
            raise ParamError(
                f"run_id: expected letters, digits, '.', '_', '-' and '=', found {run_id!r}."
            )
        return RunPaths(
            run_id,
            self.get_run_path(run_id),
            self.get_checkpoint_path(run_id),
            self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
        )

    def list_runs(self) -> list[RunInfo]:
        """Return what is known of all runs, the one that began last first. Runs on the driver.

        Each costs two reads of small files, several at a time.
        """
        from hvd_estimators.store.runs import list_runs

        return list_runs(self)

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
        from hvd_estimators.store.runs import load_history

        return load_history(self, run_id)

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
        from hvd_estimators.store.runs import delete_run

        delete_run(self, run_id)

    def _data_path(self, name: str, path: str | None, default: str) -> str | None:
        found = self._checked_path(name, path)
        if found is None and self.prefix_path is not None:
            return f"{self.prefix_path}/{default}"
        return found

    def _checked_path(self, name: str, path: str | None) -> str | None:
        """Return a path's full form; None where none is given."""
        if not path:
            return None
        if holds_credentials(path):
            raise ParamError(
                f"{name}: {redacted(path)!r} holds credentials, which would be written to "
                "manifests, logs and messages. Set them as storage_options of the store."
            )
        return self.get_full_path(path)

    def __repr__(self) -> str:
        if self.prefix_path is not None:
            return f"{type(self).__name__}({self.prefix_path!r})"
        paths = f"train_path={self._train_path!r}, runs_path={self._runs_path!r}"
        return f"{type(self).__name__}({paths})"


def _numbered(name: str, path: str | None, idx: str | None) -> str:
    if path is None:
        raise ParamError(
            f"{name}: the store has none, since it was made without a prefix_path. Set {name}."
        )
    return path if idx is None else f"{path}.{idx}"
