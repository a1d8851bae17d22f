"""Layout of paths under a store's prefix, and names of checkpoint files.

A checkpoint consists of the framework's file, such as ``checkpoint-000003.ckpt``, and its manifest,
``checkpoint-000003.json``. If the ranks hold parts of a model, they write its tensors to files of a
folder ``checkpoint-000003.tensors``. The manifest is written last. A checkpoint exists if its
manifest exists.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.files import Files
from hvd_estimators.store.redaction import holds_credentials, redacted
from hvd_estimators.store.registry import require_path

SUFFIX = ".ckpt"
"""Suffix of the framework's file."""

_MANIFEST_SUFFIX = ".json"

_TENSORS_SUFFIX = ".tensors"

# The longest name of a file or folder in Linux and HDFS.
_MOST_BYTES = 255


class Position(NamedTuple):
    """Progress of a run. Positions sort in the order in which a run reaches them.

    Attributes
    ----------
    epoch : int
        Number of completed epochs.
    rows : int
        Rows processed in the next epoch, over all shards; 0 at the end of an epoch.
    """

    epoch: int
    rows: int = 0


def file_name(stem: str, position: Position) -> str:
    """Return the name of the framework's file; ``stem`` is the store's ``checkpoint_filename``."""
    within = f"-{position.rows}" if position.rows else ""
    return f"{stem}-{position.epoch:06d}{within}{SUFFIX}"


def manifest_of(path: str) -> str:
    """Return the path of the manifest of a checkpoint file."""
    return path.removesuffix(SUFFIX) + _MANIFEST_SUFFIX


def tensors_of(path: str) -> str:
    """Return the path of the folder with the tensors of a checkpoint file."""
    return path.removesuffix(SUFFIX) + _TENSORS_SUFFIX


def with_manifest(stem: str, names: Iterable[str]) -> list[Position]:
    """Return the positions of all manifests among file names, sorted."""
    return sorted(_positions(stem, names, _MANIFEST_SUFFIX))


def orphans(stem: str, names: Iterable[str]) -> list[str]:
    """Return the names of files and folders that unfinished checkpoints left behind."""
    names = list(names)
    complete = with_manifest(stem, names)
    unfinished = [
        file_name(stem, position).removesuffix(SUFFIX) + suffix
        for suffix in (SUFFIX, _TENSORS_SUFFIX)
        for position in _positions(stem, names, suffix)
        if position not in complete
    ]
    of_checkpoint = re.compile(rf"\.{re.escape(stem)}-\d{{6,}}(-\d+)?\.(ckpt|json)-")
    return unfinished + [n for n in names if is_partial(n) and of_checkpoint.match(n)]


def is_partial(name: str) -> bool:
    """Return whether a file name is one that stores use while they write a file.

    A process that ends while its store does not answer leaves such a file.
    """
    # `LocalStore` and `HDFSStore`, which appends process and thread.
    return re.fullmatch(r"\..+-[0-9a-f]{32}(-\d+-\d+)?", name) is not None


def listed(stem: str, names: Iterable[str], suffix: str) -> list[str]:
    """Return the names with a suffix in natural sort order, without unfinished files."""
    names = list(names)
    left_out = set(orphans(stem, names))
    return sorted(
        (name for name in names if name.endswith(suffix) and name not in left_out),
        key=lambda name: _in_order(name.removesuffix(suffix)),
    )


def _positions(stem: str, names: Iterable[str], suffix: str) -> list[Position]:
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{6,}})(?:-(\d+))?{re.escape(suffix)}")
    matches = [pattern.fullmatch(posixpath.basename(name)) for name in names]
    return [Position(int(m[1]), int(m[2] or 0)) for m in matches if m is not None]


def _in_order(name: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run's artifacts. Sent to the workers.

    Attributes
    ----------
    run_id : str
        Name of the run.
    run_path : str
        Directory of the run.
    checkpoints_path : str or None
        Directory of the checkpoints, see `hvd_estimators.store.checkpoints`. None if the store does
        not save runs.
    logs_path : str or None
        Directory of the TensorBoard event files. None if the store does not save runs.
    fingerprint : mapping
        Identifies the run's training setup, see `hvd_estimators.fitting.fingerprint`.
    checkpoint_filename : str
        Prefix of the checkpoint file names.
    """

    run_id: str
    run_path: str
    checkpoints_path: str | None
    logs_path: str | None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_filename: str = "checkpoint"


class StorePaths(Files):
    """Paths of datasets and runs; see `hvd_estimators.store.base.Store` for the parameters."""

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
        if not isinstance(storage_options or {}, Mapping):
            raise ParamError(
                "storage_options: expected a dict of options of the fsspec filesystem, found "
                f"{type(storage_options).__name__}."
            )
        filename: Any = checkpoint_filename or "checkpoint"
        if not isinstance(filename, str) or "/" in filename:
            raise ParamError(
                "checkpoint_filename: expected the beginning of a file's name, without slashes, "
                f"found {checkpoint_filename!r}."
            )
        self.storage_options = dict(storage_options or {})
        self.save_storage_options = save_storage_options
        self.prefix_path = self.checked_path("prefix_path", prefix_path)
        if self.prefix_path is None and not (train_path and runs_path):
            raise ParamError("prefix_path is not set. Set it, or both train_path and runs_path.")
        self._train_path = self._data_path("train_path", train_path, "intermediate_train_data")
        self._val_path = self._data_path("val_path", val_path, "intermediate_val_data")
        self._test_path = self._data_path("test_path", test_path, "intermediate_test_data")
        runs = self._data_path("runs_path", runs_path, "runs")
        assert runs is not None
        self._runs_path = runs
        self._save_runs = save_runs
        self._checkpoint_filename = filename

    @property
    def folder(self) -> str:
        """The prefix, or ``runs_path`` if there is no prefix."""
        return self.prefix_path or self._runs_path

    @property
    def data_folder(self) -> str:
        """The folder that contains the datasets: the parent of ``train_path``."""
        assert self._train_path is not None
        return posixpath.dirname(self._train_path)

    def get_train_data_path(self, idx: str | None = None) -> str:
        """Return the folder of the training Parquet files.

        With ``idx``, return the folder of the dataset that `prepare_data` yielded. The dataset's
        manifest is in the same folder.
        """
        return _numbered("train_path", self._train_path, idx)

    def get_val_data_path(self, idx: str | None = None) -> str:
        """Return the folder of the validation Parquet files; with ``idx``, of that dataset."""
        return _numbered("val_path", self._val_path, idx)

    def get_test_data_path(self, idx: str | None = None) -> str:
        """Return the folder of the test Parquet files; with ``idx``, of that dataset."""
        return _numbered("test_path", self._test_path, idx)

    def saving_runs(self) -> bool:
        """Return whether the store saves runs."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the directory of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the directory of a run."""
        return f"{self._runs_path}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the directory of a run's checkpoints, or None if the store does not save runs.

        `get_checkpoints` lists the files in it.
        """
        return f"{self.get_run_path(run_id)}/checkpoints" if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the paths of a run's checkpoints with a suffix, oldest first.

        Numbers in file names sort numerically. The list includes checkpoints written by the
        estimators and by a ``ModelCheckpoint``. `hvd_estimators.load_checkpoint` opens them.
        """
        directory = self.get_checkpoint_path(run_id)
        if directory is None:
            return []
        names = listed(self._checkpoint_filename, self.names(directory), suffix)
        return [f"{directory}/{name}" for name in names]

    def get_checkpoint_filename(self) -> str:
        """Return the prefix of the checkpoint file names."""
        return self._checkpoint_filename

    def get_logs_path(self, run_id: str) -> str | None:
        """Return the directory of a run's TensorBoard logs, or None if runs are not saved."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """Return the name of the log directory within a run's directory."""
        return "logs"

    def run_paths(self, run_id: str) -> RunPaths:
        """Return all paths of a run."""
        if not isinstance(run_id, str):
            raise ParamError(f"run_id: expected a string, found {run_id!r}.")
        if not re.fullmatch(r"[\w.=-]+", run_id) or run_id in (".", ".."):
            raise ParamError(
                f"run_id: expected letters, digits, '.', '_', '-' and '=', found {run_id!r}."
            )
        num_bytes = len(run_id.encode())
        if num_bytes > _MOST_BYTES:
            raise ParamError(
                f"run_id: expected at most {_MOST_BYTES} bytes, as it is the name of a folder, "
                f"found {num_bytes}."
            )
        return RunPaths(
            run_id,
            self.get_run_path(run_id),
            self.get_checkpoint_path(run_id),
            self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
        )

    def _data_path(self, name: str, path: str | None, default: str) -> str | None:
        checked = self.checked_path(name, path)
        if checked is None and self.prefix_path is not None:
            return f"{self.prefix_path}/{default}"
        return checked

    def checked_path(self, name: str, path: str | None) -> str | None:
        """Return the full form of a path, or None if no path is given.

        Raises
        ------
        ParamError
            If the path, which is called ``name``, contains credentials or is on another filesystem.
        """
        require_path(name, path)
        if not path:
            return None
        if holds_credentials(path):
            raise ParamError(
                f"{redacted(path)!r} holds credentials, which would be written to "
                "manifests, logs and messages. Set them as storage_options of the store.",
                param=name,
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
            f"{name} is not set, and the store has no prefix_path to derive it from. Set {name}."
        )
    return path if idx is None else f"{path}.{idx}"
