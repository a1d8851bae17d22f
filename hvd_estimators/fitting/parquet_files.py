"""Existing Parquet files that a fit trains on, with the store that opens them.

Runs on the driver.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.base import Store, as_store

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""One or several paths or URLs of folders or files."""


@dataclass(frozen=True)
class ParquetFiles:
    """Folders or files of training and validation rows.

    Attributes
    ----------
    store : Store
        Opens the files. It may be on another filesystem than the run.
    train, validation : tuple of str
        Full paths; ``validation`` is empty without validation.
    """

    store: Store
    train: tuple[str, ...]
    validation: tuple[str, ...] = ()


def find_files(own: Store, path: Paths | None, validation_path: Paths | None) -> ParquetFiles:
    """Return the files at the given paths.

    Parameters
    ----------
    own : Store
        The run's store. A path without a scheme is on its filesystem if it can open such paths.
    path : str, PathLike or sequence
        Paths of the training rows. Default: the store's train path.
    validation_path : str, PathLike or sequence
        Paths of the validation rows. Default: none.

    Raises
    ------
    ParamError
        If a path is invalid, or if the paths are on several filesystems.
    """
    train = [own.get_train_data_path()] if path is None else _listed("path", path)
    validation = [] if validation_path is None else _listed("validation_path", validation_path)
    store = store_of(train[0], own)
    named = [*(("path", each) for each in train), *(("validation_path", v) for v in validation)]
    full: list[str] = []
    for name, each in named:
        try:
            checked = store.checked_path(name, each)
        except ParamError:
            as_store(each, name)  # If no store can open the path, the error says why.
            raise ParamError(
                f"{name}: found {each!r}, which is on another filesystem than {train[0]!r}. Copy "
                "the files to one filesystem."
            ) from None
        assert checked is not None
        full.append(checked)
    return ParquetFiles(store, tuple(full[: len(train)]), tuple(full[len(train) :]))


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


def _listed(name: str, given: Any) -> list[str]:
    paths = [given] if isinstance(given, (str, os.PathLike)) else given
    valid = isinstance(paths, (list, tuple)) and all(
        isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths
    )
    if not valid or not paths:
        raise ParamError(
            f"{name}: expected a path or URL of Parquet files, or several as a list, found "
            f"{given!r}."
        )
    return [os.fspath(path) for path in paths]
