"""Stores of a fit: the default one, and the one that opens existing Parquet files.

Runs on the driver.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

from pyspark.sql import Column

from hvd_estimators._util.spark_session import current_session, known_session, using_session
from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.data.tables import TableFiles, table_folder
from hvd_estimators.data.types import TextColumns
from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.cluster.connect import current_cluster
from hvd_estimators.launch.cluster.jobs import spark_job
from hvd_estimators.prepare.tables import describe_table
from hvd_estimators.store.base import Store, as_store, store_of

STORE_SETTING = "spark.hvdEstimators.store"
"""Spark setting with the path or URL of an application's default store."""

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""One or several paths or URLs of folders or files."""

logger = logging.getLogger(__name__)


def default_store() -> Store:
    """Return the application's default store.

    This is the store at the path or URL in Spark's configuration ``spark.hvdEstimators.store``.
    Without this setting, Spark on a single machine and programs without Spark get a temporary
    folder. It is deleted when the program ends.

    Raises
    ------
    ParamError
        If Spark has no such setting and runs on a cluster.
    """
    store = configured_store()
    if store is not None:
        return store
    session = known_session()
    master = "local" if session is None else session.conf.get("spark.master", None) or ""
    if not master.startswith("local"):
        raise ParamError(
            "store is not set. Set store to a path or URL that the driver and all executors see, "
            f"or the Spark configuration {STORE_SETTING}. (Only with a local master is the "
            f"default a temporary folder; the master is {master!r}.)"
        )
    return _temporary_store()


def configured_store() -> Store | None:
    """Return the store at the path in Spark's configuration, or None if there is none."""
    session = known_session()
    path = None if session is None else session.conf.get(STORE_SETTING, None)
    if not path:
        return None
    return as_store(path, STORE_SETTING)


@functools.lru_cache(maxsize=1)
def _temporary_store() -> Store:
    folder = tempfile.mkdtemp(prefix=folder_prefix())
    owner = os.getpid()

    def delete() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(delete)
    logger.info(
        "store is not set: datasets, checkpoints and logs are in %s, which is deleted when this "
        "program ends. Set store to keep them.",
        folder,
    )
    return as_store(folder)


@dataclass(frozen=True)
class ParquetFiles:
    """Folders or files of training and validation rows.

    Attributes
    ----------
    store : Store
        Opens the files. It may be on another filesystem than the run.
    train, validation : tuple of str, or TableFiles
        Full paths, or the files of a table; ``validation`` is empty without validation.
    """

    store: Store
    train: tuple[str, ...] | TableFiles
    validation: tuple[str, ...] | TableFiles = ()


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


def find_tables(
    own: Store,
    table: Any,
    where: Any,
    validation_where: Any,
    names: Sequence[str],
    allow_text: TextColumns,
) -> ParquetFiles:
    """Return the files with the chosen rows of a table.

    Parameters
    ----------
    own : Store
        The run's store. It opens the files if it can.
    table : str
        The table's name.
    where, validation_where : str, Column or None
        Choose the training and validation rows. Without ``where``, all rows that are not validation
        rows are for training.
    names : sequence of str
        The columns that training needs.
    allow_text : bool or mapping
        See `describe_table`.

    Raises
    ------
    ParamError
        If a parameter is invalid, if no rows are chosen, or if a file is chosen for both. See also
        `describe_table`.
    StoreError
        See `TableFiles.find`.
    """
    if not isinstance(table, str) or not table.strip():
        raise ParamError(f"table: expected the name of a table, found {table!r}.")
    conditions = {"where": where, "validation_where": validation_where}
    for param, condition in conditions.items():
        if not isinstance(condition, (str, Column, type(None))):
            raise ParamError(
                f"{param}: expected a condition in SQL, such as 'day < 7', or a Column, found "
                f"{condition!r}."
            )
    session = current_session()
    store_at = functools.partial(store_of, own=own, name="table")

    def find(param: str) -> tuple[Store, TableFiles]:
        found = find_in(param, conditions[param])
        if not found.files:
            raise ParamError(
                f"{param}: found {conditions[param]!r}, by which the table {table} has no rows. "
                "Choose others, or write some to the table."
            )
        store = store_at(_address(table_folder(next(iter(found.files)))))
        folders: dict[str, str | None] = {}
        files = {}
        for url, file in found.files.items():
            folder = table_folder(url)
            if folder not in folders:
                folders[folder] = store.checked_path("table", _address(folder))
            files[f"{folders[folder]}{url.removeprefix(folder)}"] = file
        return store, TableFiles.find(
            store, files, found.columns, is_one_folder=found.is_one_folder
        )

    with using_session(session), spark_job(current_cluster(), f"List the files of {table}"):
        find_in = describe_table(session, table, names, allow_text, store_at)
        store, train = find("where")
        if validation_where is None:
            return ParquetFiles(store, train)
        _, validation = find("validation_where")
    rest = train.without(validation)
    if rest is None or (where is not None and len(rest.files) < len(train.files)):
        raise ParamError(
            f"validation_where: found {validation_where!r}, which chooses files of training rows, "
            f"too ({where!r}). Choose other rows for validation than for training."
        )
    return ParquetFiles(store, rest, validation)


def _address(url: str) -> str:
    # In local URLs alone, stores take escapes for the characters that they stand for.
    return quote(url, safe=":/") if url.startswith("file:") else url


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
