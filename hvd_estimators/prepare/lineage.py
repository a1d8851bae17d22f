"""What Spark's plan of a DataFrame tells: whether another one gives the same rows, in which order.

Runs on the driver. Plans are objects of the JVM; Spark Connect, which has none here, is told of as
unknown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame

from hvd_estimators.prepare.sources import (
    cached_data,
    class_name,
    file_versions,
    items,
    same_objects,
)

__all__ = ["SourcePlan", "estimated_rows", "keeps_order", "source_plan"]

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
# Others read a clock, a random number, the session, another plan, or run Python.
_PURE_LEAF_EXPRESSIONS = {"AttributeReference", "Literal", "NamedLambdaVariable"}
_SEEDED = {"Rand", "Randn"}
# Whether an expression over random numbers is random itself cannot be asked: these are not.
_PLAIN_EXPRESSIONS = {
    "Add",
    "Alias",
    "And",
    "CaseWhen",
    "Cast",
    "Ceil",
    "CreateArray",
    "CreateNamedStruct",
    "Divide",
    "EqualTo",
    "Floor",
    "GreaterThan",
    "GreaterThanOrEqual",
    "If",
    "LessThan",
    "LessThanOrEqual",
    "Multiply",
    "Not",
    "Or",
    "Pmod",
    "Remainder",
    "Round",
    "Subtract",
    "UnaryMinus",
}
_OPAQUE_FIELDS = {"dataType", "inputEncoders", "outputEncoder"}


@dataclass
class _Classes:
    """Names of the classes that a plan is made of."""

    nodes: set[str] = field(default_factory=set)
    expressions: set[str] = field(default_factory=set)
    leaf_expressions: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class SourcePlan:
    """A DataFrame whose rows are known to be the same as long as its sources are.

    Attributes
    ----------
    plan : py4j.java_gateway.JavaObject
        Spark's analyzed plan, kept alive in the JVM.
    schema : str
        Names and types of the columns, which a plan's own comparison leaves out.
    settings : str
        The session's settings and parallelism, on which rows may depend.
    files : tuple
        The version of every file that is read, see `file_versions`.
    cached : tuple of py4j.java_gateway.JavaObject
        The cached data that is read in the place of parts of the plan, see `cached_data`: it
        holds files as they were when it was cached.
    frame : pyspark.sql.DataFrame
        The DataFrame itself.
    """

    plan: Any
    schema: str
    settings: str
    files: tuple[tuple[str, ...], ...]
    cached: tuple[Any, ...]
    frame: Any

    def same_as(self, other: SourcePlan) -> bool:
        """Return whether two DataFrames hold the same rows, by Spark's own comparison of plans."""
        if (self.schema, self.settings, self.files) != (other.schema, other.settings, other.files):
            return False
        try:
            session = self.frame.sparkSession
            return same_objects(session, self.cached, other.cached) and bool(
                self.plan.sameResult(other.plan)
            )
        except Py4JError:
            # One of them lived in a JVM that has ended.
            return False

    def is_current(self) -> bool:
        """Return whether files and cached data still are what they were."""
        session = self.frame.sparkSession
        try:
            return file_versions(self.plan, session) == self.files and same_objects(
                session, self.cached, cached_data(self.frame)
            )
        except (Py4JError, TypeError, OSError):
            return False


def source_plan(df: DataFrame) -> SourcePlan | None:
    """Return what tells whether a DataFrame's rows are those of another, or of a later moment.

    Returns
    -------
    SourcePlan or None
        None if that cannot be told: for RDDs, JDBC, tables that are not plain files, Python
        functions, clocks, random numbers (those of ``rand`` and ``randn`` count as known where
        their seed and the order of rows are), files that have changed since the DataFrame was
        made or whose changes cannot be told (see `file_versions`), and Spark Connect.
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
            or not _is_repeatable(plan, random)
        ):
            return None
        session: Any = df.sparkSession
        cached = cached_data(df)
        files = file_versions(plan, session)
        if files is None:
            return None
        settings = session._jsparkSession.sessionState().conf().getAllConfs().toString()
        cores = session.sparkContext.defaultParallelism
        return SourcePlan(plan, df.schema.json(), f"{cores} {settings}", files, cached, df)
    except (Py4JError, TypeError, OSError):
        # A Spark whose internals are others: it is not known, so nothing is taken for the same.
        return None


def keeps_order(df: DataFrame) -> bool:
    """Return whether rows come in the same order each time, which they do not after a shuffle."""
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
    """Return about how many rows a DataFrame has at most, if its plan tells; runs nothing.

    What is cached is left out of account: the answer is the same before and after.
    """
    plan = _analyzed(df)
    if plan is None:
        return None
    try:
        size = float(str(plan.stats().sizeInBytes()))
        unknown = float(df.sparkSession._jsparkSession.sessionState().conf().defaultSizeInBytes())
        # Spark counts 8 bytes for a row beside its columns.
        return None if size >= unknown else size / (8 + plan.schema().defaultSize())
    except (Py4JError, TypeError):
        return None


def _analyzed(df: DataFrame) -> Any:
    frame: Any = getattr(df, "_jdf", None)
    return None if frame is None else frame.queryExecution().analyzed()


def _classes(plan: Any) -> _Classes:
    """Collect the names of the classes of a plan's nodes and expressions."""
    found = _Classes()
    # One call for the whole plan; each call takes a part of a millisecond.
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


def _is_repeatable(plan: Any, random: set[str]) -> bool:
    """Return whether all expressions give the same values each time."""
    if plan.deterministic():
        return True
    return all(_is_repeatable(child, random) for child in items(plan.children())) and all(
        _has_fixed_values(expression, random) for expression in items(plan.expressions())
    )


def _has_fixed_values(expression: Any, random: set[str]) -> bool:
    if expression.deterministic():
        return True
    name = class_name(expression)
    if name in random:
        return all(class_name(child) == "Literal" for child in items(expression.children()))
    # Spark ML marks its own functions, such as VectorAssembler's, as not deterministic only so
    # that the optimizer does not move them (they raise on bad rows).
    known = name in _PLAIN_EXPRESSIONS or (
        name == "ScalaUDF"
        and expression.function().getClass().getName().startswith("org.apache.spark.ml.")
    )
    return known and all(_has_fixed_values(child, random) for child in items(expression.children()))
