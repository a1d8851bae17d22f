"""Lineage of DataFrames: the files and cached data that their rows come from.

``DataFrame.sameSemantics`` compares two plans. It does not determine if a plan gives the same rows
twice, because the plan may contain a clock or a Python function. It also ignores changes of the
files or cached data that the plan reads. This module inspects the JVM for both.

``DataFrame.inputFiles`` returns only names, and omits files below cached data. The size and
modification time of a file can be reset, so they do not identify its version. This module compares
marks that no program can set.

Everything is unknown with Spark Connect, because its plans are not in this process. Runs on the
driver.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame

from hvd_estimators._util.spark_session import is_connect

__all__ = [
    "FileVersion",
    "SourcePlan",
    "cached_data",
    "class_name",
    "estimated_rows",
    "file_versions",
    "items",
    "keeps_order",
    "same_objects",
    "source_plan",
]

_FILE = re.compile(r"path=(.*?); isDirectory=\w+; length=(\d+);.*?modification_time=(\d+);")


_MOST_REMOTE_FILES = 1000


"""Maximum number of remote files to check: each takes a call to its filesystem."""


# Two changes within one tick of the clock get the same time.
_TICK_NS, _COARSE_TICK_NS = 50_000_000, 2_100_000_000


FileVersion = tuple[str, ...]


def cached_data(df: DataFrame) -> tuple[Any, ...]:
    """Return the JVM objects with the cached data that a DataFrame would read now."""
    # A DataFrame remembers the cached data of its first run. A new one looks it up again, like the
    # write.
    frame: Any = df.select("*")
    leaves = items(frame._jdf.queryExecution().withCachedData().collectLeaves())
    return tuple(leaf.cacheBuilder() for leaf in leaves if class_name(leaf) == "InMemoryRelation")


def same_objects(session: Any, ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two sequences hold identical JVM objects, not just equal ones."""
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        alone = session._jvm.java.util.IdentityHashMap()
        alone.put(one, True)
        if not alone.containsKey(other):
            return False
    return True


def file_versions(df: DataFrame) -> tuple[FileVersion, ...] | None:
    """Return the current versions of all files of a DataFrame.

    Returns
    -------
    tuple of tuple of str, or None
        Path, size and time as Spark listed them when the DataFrame was created, followed by marks
        of the version. For a local file, the marks are the device, the inode and the time of the
        inode's last change, which no program can set. For other files, the mark is the entity tag
        of an object, or the checksum that the filesystem stores. None if there is no such mark, or
        if the DataFrame reads something other than files. None also if a file's size differs from
        the size that Spark listed, because Spark would then read only a part of the file.
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
    """Return size and marks of local or mounted files; None if the marks are ambiguous."""
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
    # Opening a file makes a network filesystem query its server.
    descriptor = os.open("/" + url.removeprefix("file:").lstrip("/"), os.O_RDONLY)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _unsettled_ns(stat: os.stat_result) -> int:
    """Return the nanoseconds in which another change could still get the same time as this one."""
    coarse = stat.st_ctime_ns % 1_000_000_000 == 0
    tick = _COARSE_TICK_NS if coarse else _TICK_NS
    return tick - (time.time_ns() - stat.st_ctime_ns)


def _remote_marks(url: str, session: Any) -> tuple[str, ...] | None:
    """Return size and mark of a file on another filesystem; None if it has no mark."""
    path = session._jvm.org.apache.hadoop.fs.Path(url)
    filesystem = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    status = filesystem.getFileStatus(path)
    try:
        tag = status.getEtag()
    except Py4JError:  # only object stores have a tag
        tag = None
    if tag is not None:
        return (str(status.getLen()), "etag", str(tag))
    checksum = filesystem.getFileChecksum(path)
    return (
        None if checksum is None else (str(status.getLen()), "checksum", str(checksum.toString()))
    )


def _listed(index: Any) -> list[FileVersion] | None:
    """Return path, size and modification time of the files in a Spark file index."""
    statuses = index.allFiles()
    found = [_FILE.search(line) for line in statuses.mkString("\n").splitlines()]
    if not all(found) or len(found) != statuses.size():
        return None
    return sorted(match.groups() for match in found if match)


def class_name(value: Any) -> str:
    """Return the simple class name of a JVM object."""
    return str(value.getClass().getSimpleName())


def items(sequence: Any) -> Iterator[Any]:
    """Return the items of a Scala sequence."""
    return (sequence.apply(i) for i in range(sequence.size()))


# Plan nodes that Spark evaluates to the same rows each time, in the same order or in any order.
_ORDERED_LEAVES = {"LocalRelation", "LogicalRelation", "Range"}


_ORDERED_NODES = {
    "Expand",
    "Filter",
    "Generate",
    "Project",
    "ResolvedHint",
    "Sample",
    "SubqueryAlias",
    "Union",
    "View",
}


_UNORDERED_NODES = {
    "Aggregate",
    "Deduplicate",
    "Distinct",
    "Except",
    "GlobalLimit",
    "Intersect",
    "Join",
    "LocalLimit",
    "Offset",
    "RebalancePartitions",
    "Repartition",
    "RepartitionByExpression",
    "Sort",
    "Window",
}


# Other leaf expressions read a clock, a random number, the session or another plan, or run Python.
_PURE_LEAF_EXPRESSIONS = {"AttributeReference", "Literal", "NamedLambdaVariable"}


_SEEDED = {"Rand", "Randn"}


_inherits_randomness: dict[str, bool] = {}


"""Cache of inspected expression classes, because an inspection takes a millisecond."""


_UNKNOWN_BYTES = 2**63 - 1


"""Size that Spark assumes for a source of unknown size."""


_OPAQUE_FIELDS = {"dataType", "inputEncoders", "outputEncoder"}


@dataclass
class _Classes:
    """Names of the classes in a plan."""

    nodes: set[str] = field(default_factory=set)
    expressions: set[str] = field(default_factory=set)
    leaf_expressions: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class SourcePlan:
    """A DataFrame whose rows stay the same as long as its sources do.

    Attributes
    ----------
    frame : pyspark.sql.DataFrame
        The DataFrame itself.
    schema : str
        Names and types of the columns; Spark's comparison ignores the names.
    settings : str
        The session's settings and parallelism, on which rows may depend.
    files : tuple
        The version of each file that is read, see `file_versions`.
    cached : tuple of py4j.java_gateway.JavaObject
        The cached data that Spark reads instead of parts of the plan, see `cached_data`. Its rows
        are those at the time of caching.
    """

    frame: DataFrame
    schema: str
    settings: str
    files: tuple[FileVersion, ...]
    cached: tuple[Any, ...]

    def same_as(self, other: SourcePlan) -> bool:
        """Return whether two DataFrames hold the same rows."""
        if (self.schema, self.settings, self.files) != (other.schema, other.settings, other.files):
            return False
        try:
            return same_objects(
                self.frame.sparkSession, self.cached, other.cached
            ) and self.frame.sameSemantics(other.frame)
        except Py4JError:
            # The JVM of one of them has ended.
            return False

    def is_current(self) -> bool:
        """Return whether the files and the cached data are unchanged."""
        try:
            return file_versions(self.frame) == self.files and same_objects(
                self.frame.sparkSession, self.cached, cached_data(self.frame)
            )
        except (Py4JError, TypeError, OSError):
            return False


def source_plan(df: DataFrame) -> SourcePlan | None:
    """Return an object that determines if a DataFrame has the same rows as another, or as before.

    Returns
    -------
    SourcePlan or None
        None if this is unknown: for RDDs, JDBC, tables that are not plain files, Python functions,
        clocks, random numbers and Spark Connect. ``rand`` and ``randn`` with a seed are known, over
        rows in a known order. Files are unknown if they have changed since the DataFrame was
        created, or if their changes cannot be detected (see `file_versions`).
    """
    plan = _analyzed(df)
    if plan is None:
        return None
    try:
        found = _classes(plan)
        random = _SEEDED if found.nodes.isdisjoint(_UNORDERED_NODES) else set()
        if (
            plan.isStreaming()
            or not plan.subqueriesAll().isEmpty()
            or not found.nodes <= _ORDERED_LEAVES | _ORDERED_NODES | _UNORDERED_NODES
            or not found.leaf_expressions <= _PURE_LEAF_EXPRESSIONS
            or any("Python" in name for name in found.expressions)
            or not _is_repeatable(plan, random, df.sparkSession)
        ):
            return None
        cached = cached_data(df)
        files = file_versions(df)
        if files is None:
            return None
        session: Any = df.sparkSession
        cores = session.sparkContext.defaultParallelism
        settings = session._jsparkSession.conf().getAll().toString()
        return SourcePlan(df, df.schema.json(), f"{cores} {settings}", files, cached)
    except (Py4JError, TypeError, OSError):
        # This version of Spark has different internals.
        return None


def keeps_order(df: DataFrame) -> bool:
    """Return whether rows always come in the same order, which is not the case after a shuffle."""
    plan = _analyzed(df)
    if plan is None:
        return False
    try:
        nodes = _classes(plan).nodes
        rdds = [
            leaf.rdd() for leaf in items(plan.collectLeaves()) if class_name(leaf) == "LogicalRDD"
        ]
        return (
            nodes <= _ORDERED_LEAVES | _ORDERED_NODES | {"LogicalRDD"}
            and bool(plan.subqueriesAll().isEmpty())
            and all(rdd.outputDeterministicLevel().toString() == "DETERMINATE" for rdd in rdds)
        )
    except Py4JError:
        return False


def estimated_rows(df: DataFrame) -> float | None:
    """Return an estimate of the maximum number of rows, from the plan alone; None if unknown.

    Cached data does not change the result.
    """
    plan = _analyzed(df)
    if plan is None:
        return None
    try:
        size = float(str(plan.stats().sizeInBytes()))
        # Spark counts 8 bytes per row in addition to its columns.
        return None if size >= _UNKNOWN_BYTES else size / (8 + plan.schema().defaultSize())
    except (Py4JError, TypeError):
        return None


def _analyzed(df: DataFrame) -> Any:
    if is_connect(df.sparkSession):
        return None
    frame: Any = df
    return frame._jdf.queryExecution().analyzed()


def _classes(plan: Any) -> _Classes:
    """Collect the class names of a plan's nodes and expressions."""
    found = _Classes()
    # One call for the whole plan, because each call takes a fraction of a millisecond.
    stack: list[Any] = [json.loads(plan.toJSON())]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            stack += [part for name, part in value.items() if name not in _OPAQUE_FIELDS]
            if "num-children" in value:
                package, _, name = value["class"].rpartition(".")
                if not package.startswith("org.apache.spark.sql.catalyst.expressions"):
                    found.nodes.add(name)
                else:
                    found.expressions.add(name)
                    if not value["num-children"]:
                        found.leaf_expressions.add(name)
    return found


def _is_repeatable(plan: Any, random: set[str], session: Any) -> bool:
    """Return whether all expressions give the same values each time."""
    if plan.deterministic():
        return True
    return all(_is_repeatable(child, random, session) for child in items(plan.children())) and all(
        _has_fixed_values(each, random, session) for each in items(plan.expressions())
    )


def _has_fixed_values(expression: Any, random: set[str], session: Any) -> bool:
    if expression.deterministic():
        return True
    name = class_name(expression)
    if name in random:
        return all(class_name(child) == "Literal" for child in items(expression.children()))
    if name == "ScalaUDF":
        # Spark ML marks its own functions, such as VectorAssembler's, as nondeterministic. It does
        # so only to keep the optimizer from moving them, because they raise on bad rows.
        known = expression.function().getClass().getName().startswith("org.apache.spark.ml.")
    else:
        if name not in _inherits_randomness:
            _inherits_randomness[name] = _has_default_determinism(expression, session)
        known = _inherits_randomness[name]
    children = items(expression.children())
    return known and all(_has_fixed_values(child, random, session) for child in children)


def _has_default_determinism(expression: Any, session: Any) -> bool:
    """Return whether an expression's class leaves its determinism to its children."""
    no_parameters = session.sparkContext._gateway.new_array(session._jvm.java.lang.Class, 0)
    method = expression.getClass().getMethod("deterministic", no_parameters)
    return bool(method.getDeclaringClass().getSimpleName() == "Expression")
