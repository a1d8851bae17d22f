"""What a DataFrame's rows come from beside its plan: files as they are now, and cached data.

Runs on the driver. A file is told from what it was before by marks that nobody can set: size and
time of change can be made the same again.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame

__all__ = ["cached_data", "class_name", "file_versions", "items", "same_objects"]

_FILE = re.compile(r"path=(.*?); isDirectory=\w+; length=(\d+);.*?modification_time=(\d+);")
_MOST_REMOTE_FILES = 1000
"""Each of them is a call to its filesystem."""

# A change within the clock's tick after another gives the same time of change.
_TICK_NS, _COARSE_TICK_NS = 50_000_000, 2_100_000_000

FileVersion = tuple[str, ...]


def cached_data(df: DataFrame) -> tuple[Any, ...]:
    """Return the JVM's objects that hold the cached data which a DataFrame would read now."""
    # A plan keeps what it found when it first ran; a new one looks again, as the write will.
    frame: Any = df.select("*")
    leaves = items(frame._jdf.queryExecution().withCachedData().collectLeaves())
    return tuple(leaf.cacheBuilder() for leaf in leaves if class_name(leaf) == "InMemoryRelation")


def same_objects(session: Any, ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether the JVM's objects are the same ones, in order; equal ones do not count."""
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        alone = session._jvm.java.util.IdentityHashMap()
        alone.put(one, True)
        if not alone.containsKey(other):
            return False
    return True


def file_versions(plan: Any, session: Any) -> tuple[FileVersion, ...] | None:
    """Return what tells all files of a plan from what they were, or will be.

    Returns
    -------
    tuple of tuple of str, or None
        Path, size, time, and marks of the version: device, inode and time of the inode's change
        of a local file, which no program can set; the entity tag of an object, or the checksum
        that the filesystem keeps. None where there is no such mark, where the plan reads
        something else than files, or where files have changed since the DataFrame was made.
    """
    files: list[FileVersion] = []
    for leaf in items(plan.collectLeaves()):
        if class_name(leaf) != "LogicalRelation":
            continue
        relation = leaf.relation()
        if class_name(relation) != "HadoopFsRelation" or class_name(relation.location()) != (
            "InMemoryFileIndex"
        ):
            return None
        index = relation.location()
        listed, now = _listed(index), _listed(_listed_again(index, relation.options(), session))
        # Spark reads what it listed when the DataFrame was made.
        if listed is None or listed != now:
            return None
        files += listed
    local = [file for file in files if file[0].startswith("file:/")]
    if len(files) - len(local) > _MOST_REMOTE_FILES:
        return None
    marks = _local_marks([file[0] for file in local])
    if marks is None:
        return None
    versions = []
    for file in files:
        mark = marks.get(file[0]) or _remote_mark(file[0], session)
        if mark is None:
            return None
        versions.append((*file, *mark))
    return tuple(versions)


def _local_marks(urls: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Return the marks of files on this machine, or mounted; None if they do not tell."""
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
        url: tuple(map(str, (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)))
        for url, s in stats.items()
    }


def _stat(url: str) -> os.stat_result:
    # A network filesystem asks its server when a file is opened.
    descriptor = os.open("/" + url.removeprefix("file:").lstrip("/"), os.O_RDONLY)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _unsettled_ns(stat: os.stat_result) -> int:
    """Return how long another change could still get the same time as this one."""
    coarse = stat.st_ctime_ns % 1_000_000_000 == 0
    tick = _COARSE_TICK_NS if coarse else _TICK_NS
    return tick - (time.time_ns() - stat.st_ctime_ns)


def _remote_mark(url: str, session: Any) -> tuple[str, ...] | None:
    path = session._jvm.org.apache.hadoop.fs.Path(url)
    filesystem = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    try:
        tag = filesystem.getFileStatus(path).getEtag()
    except Py4JError:  # only those of object stores have one
        tag = None
    if tag is not None:
        return ("etag", str(tag))
    checksum = filesystem.getFileChecksum(path)
    return None if checksum is None else ("checksum", str(checksum.toString()))


def _listed(index: Any) -> list[FileVersion] | None:
    statuses = index.allFiles()
    found = [_FILE.search(line) for line in statuses.mkString("\n").splitlines()]
    if not all(found) or len(found) != statuses.size():
        return None
    return sorted(match.groups() for match in found if match)


def _listed_again(index: Any, options: Any, session: Any) -> Any:
    """Return a new index of the same paths, made past Spark's caches."""
    package = session._jvm.org.apache.spark.sql.execution.datasources
    no_cache = getattr(getattr(package, "NoopCache$"), "MODULE$")
    none = session._jvm.scala.Option.empty()
    return package.InMemoryFileIndex(
        session._jsparkSession, index.rootPaths(), options, none, no_cache, none, none
    )


def class_name(value: Any) -> str:
    """Return the simple name of the class of one of the JVM's objects."""
    return str(value.getClass().getSimpleName())


def items(sequence: Any) -> Iterator[Any]:
    """Return the items of a Scala sequence."""
    return (sequence.apply(i) for i in range(sequence.size()))
