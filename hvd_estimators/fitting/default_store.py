"""The store of fits whose ``store`` is not set. Runs on the driver."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile

from hvd_estimators._util.spark_session import known_session
from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.base import Store, as_store

STORE_SETTING = "spark.hvdEstimators.store"
"""Spark setting with the path or URL of an application's default store."""

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
