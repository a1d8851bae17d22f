"""What a DataFrame's rows come from: versions of files, and cached data.

Runs on the driver. ``DataFrame.inputFiles`` gives names only, and leaves out files below cached
data. Two versions of a file are told apart by marks that no program can set, since its size and its
modification time can be set back.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame

__all__ = ["FileVersion", "cached_data", "class_name", "file_versions", "items", "same_objects"]

_FILE = re.compile(r"path=(.*?); isDirectory=\w+; length=(\d+);.*?modification_time=(\d+);")
_MOST_REMOTE_FILES = 1000
"""Each of them takes a call to its filesystem."""

# Two changes within one tick of the clock get the same time.
_TICK_NS, _COARSE_TICK_NS = 50_000_000, 2_100_000_000

FileVersion = tuple[str, ...]


def cached_data(df: DataFrame) -> tuple[Any, ...]:
    """Return the JVM's objects that hold the cached data that a DataFrame would read now."""
    # A DataFrame remembers the cached data of its first run; a new one looks anew, like the write.
    frame: Any = df.select("*")
    leaves = items(frame._jdf.queryExecution().withCachedData().collectLeaves())
    return tuple(leaf.cacheBuilder() for leaf in leaves if class_name(leaf) == "InMemoryRelation")


def same_objects(session: Any, ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two sequences hold the very same objects of the JVM, not just equal ones."""
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        alone = session._jvm.java.util.IdentityHashMap()
        alone.put(one, True)
        if not alone.containsKey(other):
            return False
    return True


def file_versions(df: DataFrame) -> tuple[FileVersion, ...] | None:
    """Return what tells the current versions of all files of a DataFrame from other versions.

    Returns
    -------
    tuple of tuple of str, or None
        Path, size and time as Spark listed them when the DataFrame was made, and marks of the
        version: device, inode, and the time of the inode's last change for a local file, which no
        program can set; the entity tag of an object, or the checksum that the filesystem keeps.
        None where there is no such mark, where the DataFrame reads something else than files, or
        where a file's size is not what Spark listed: Spark would read a part of the file only.
    """
    frame: Any = df
    files: list[FileVersion] = []
    for leaf in items(frame._jdf.queryExecution().analyzed().collectLeaves()):
        if class_name(leaf) != "LogicalRelation":
            continue
        relation = leaf.relation()
        if class_name(relation) != "HadoopFsRelation" or class_name(relation.location()) != (
            "InMemoryFileIndex"
        ):
            return None
        listed = _listed(relation.location())
        if listed is None:
            return None
        files += listed
    local = [file for file in files if file[0].startswith("file:/")]
    if len(files) - len(local) > _MOST_REMOTE_FILES:
        return None
    marks = _local_marks([file[0] for file in local])
    if marks is None:
        return None
    versions = []
    for path, size, changed in files:
        size_now, *mark = marks.get(path) or _remote_marks(path, df.sparkSession) or ("",)
        if size_now != size:
            return None
        versions.append((path, size, changed, *mark))
    return tuple(versions)


def _local_marks(urls: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Return size and marks of files on this machine, or mounted; None if they do not tell."""
    stats = {url: _stat(url) for url in urls}
    wait = max((_unsettled_ns(stat) for stat in stats.values()), default=0)
    if wait > _TICK_NS:
        return None
    if wait > 0:
        time.sleep(wait / 1e9)
        stats = {url: _stat(url) for url in urls}
        if any(_unsettled_ns(stat) > 0 for stat in stats.values()):
            return None
    return {
        url: tuple(map(str, (s.st_size, s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns)))
        for url, s in stats.items()
    }


def _stat(url: str) -> os.stat_result:
    # Opening a file makes a network filesystem ask its server.
    descriptor = os.open("/" + url.removeprefix("file:").lstrip("/"), os.O_RDONLY)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _unsettled_ns(stat: os.stat_result) -> int:
    """Return for how long another change could still get the same time as this one."""
    coarse = stat.st_ctime_ns % 1_000_000_000 == 0
    tick = _COARSE_TICK_NS if coarse else _TICK_NS
    return tick - (time.time_ns() - stat.st_ctime_ns)


def _remote_marks(url: str, session: Any) -> tuple[str, ...] | None:
    """Return size and mark of a file of another filesystem; None if it has no mark."""
    path = session._jvm.org.apache.hadoop.fs.Path(url)
    filesystem = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    status = filesystem.getFileStatus(path)
    try:
        tag = status.getEtag()
    except Py4JError:  # only object stores have one
        tag = None
    if tag is not None:
        return (str(status.getLen()), "etag", str(tag))
    checksum = filesystem.getFileChecksum(path)
    return (
        None if checksum is None else (str(status.getLen()), "checksum", str(checksum.toString()))
    )


def _listed(index: Any) -> list[FileVersion] | None:
    """Return path, size and time of change of the files of one of Spark's file indexes."""
    statuses = index.allFiles()
    found = [_FILE.search(line) for line in statuses.mkString("\n").splitlines()]
    if not all(found) or len(found) != statuses.size():
        return None
    return sorted(match.groups() for match in found if match)


def class_name(value: Any) -> str:
    """Return the simple name of the class of one of the JVM's objects."""
    return str(value.getClass().getSimpleName())


def items(sequence: Any) -> Iterator[Any]:
    """Return the items of a Scala sequence."""
    return (sequence.apply(i) for i in range(sequence.size()))
