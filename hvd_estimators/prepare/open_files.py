"""Lets Spark's writers keep the files of both sides of a split open. Runs on the driver.

By default a task has one file open, so that Spark sorts rows by the column that says where they
go. With a file for each side that sort, and that of shuffled rows by two columns, is not needed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

__all__ = ["several_open_files"]

_OPTION = "spark.sql.maxConcurrentOutputFileWriters"


class _Setting:
    """What the option was before the first of several threads set it, and how many use it."""

    def __init__(self) -> None:
        self.users = 0
        self.before: str | None = None


_lock = threading.Lock()
_settings: dict[int, _Setting] = {}


@contextlib.contextmanager
def several_open_files(session: SparkSession, files: int) -> Iterator[None]:
    """Let a task write several files at a time until the block ends.

    It is an option of the session, which other threads share: the last of them that needs it puts
    it back. A larger number of the user's stays.

    Parameters
    ----------
    session : SparkSession
        That of the DataFrame which is written.
    files : int
        How many.
    """
    conf: Any = session.conf
    with _lock:
        setting = _settings.setdefault(id(session), _Setting())
        setting.users += 1
        if setting.users == 1:
            setting.before = conf.get(_OPTION, None)
        if int(conf.get(_OPTION, None) or 0) < files:
            conf.set(_OPTION, str(files))
    try:
        yield
    finally:
        with _lock:
            setting.users -= 1
            if not setting.users:
                del _settings[id(session)]
                if setting.before is None:
                    conf.unset(_OPTION)
                else:
                    conf.set(_OPTION, setting.before)
