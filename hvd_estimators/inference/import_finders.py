"""What Python looks modules up with in archives, where it costs each task. Runs on executors.

Imports no framework and no PySpark.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any
from zipimport import zipimporter

__all__ = ["forget_archives"]

_OF_JAVA = ".jar"


def forget_archives(finders: MutableMapping[str, Any] | None = None) -> None:
    """Let the next task's worker read fewer archives again.

    PySpark before 4.1 calls ``importlib.invalidate_caches`` at the beginning of each task, and of
    each folder in an archive that modules were imported from (a dozen in ``pyspark.zip``) Python
    then reads the archive's whole list of files: 60 ms, where a task's rows may take 20. Python
    makes the finders again where it needs them, from the list that the archive's own finder keeps
    up to date. Java's archives, of which Spark has one in ``PYTHONPATH``, are not looked at again
    before something is imported: a running JVM's do not change.

    Parameters
    ----------
    finders : mapping, optional
        Path to finder. Default: those of this process, ``sys.path_importer_cache``.
    """
    finders = sys.path_importer_cache if finders is None else finders
    for path, finder in list(finders.items()):
        if not isinstance(finder, zipimporter):
            continue
        is_folder = bool(finder.prefix) and finder.archive in finders
        if is_folder or finder.archive.endswith(_OF_JAVA):
            del finders[path]
