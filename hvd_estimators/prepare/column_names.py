"""Names of columns with any characters: quoting them, comparing them, and making new ones.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql import DataFrame

from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.sessions import is_connect

__all__ = ["clashing", "quoted", "require_columns", "require_frame", "unused_name"]


def quoted(name: str) -> str:
    """Return a column's name quoted for Spark's functions, which keeps its dots and backticks."""
    return "`" + name.replace("`", "``") + "`"


def unused_name(wanted: str, taken: Iterable[str]) -> str:
    """Return a name that is not taken, ignoring case: the wanted one or one like it."""
    folded = {name.casefold() for name in taken}
    while wanted.casefold() in folded:
        wanted += "_"
    return wanted


def clashing(df: DataFrame, name: str, others: Sequence[str]) -> list[str]:
    """Return the names among others that Spark takes to be the same as one."""
    if str(df.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true":
        return [other for other in others if other == name]
    return [other for other in others if _alike(other, name)]


def _alike(name: str, other: str) -> bool:
    """Return whether Spark's resolver takes two names to be the same, as equalsIgnoreCase does.

    Python's casefold differs: it turns "ß" into "ss", and keeps the Turkish dotless i.
    """
    return len(name) == len(other) and all(
        a == b or _upper(a) == _upper(b) or _lower(_upper(a)) == _lower(_upper(b))
        for a, b in zip(name, other, strict=True)
    )


def _upper(character: str) -> str:
    upper = character.upper()
    return upper if len(upper) == 1 else character


def _lower(character: str) -> str:
    # One capital, the Turkish İ, becomes two characters. Java takes the first.
    return character.lower()[0]


def require_frame(param: str, given: Any) -> None:
    """Make sure that a parameter is a DataFrame of Spark's.

    Raises
    ------
    ParamError
        If it is something else.
    DependencyError
        If its session is one of Spark Connect, and this PySpark is too old for that.
    """
    if isinstance(given, DataFrame) or hasattr(given, "sparkSession"):
        is_connect(given.sparkSession)
        return
    found = f"{type(given).__module__}.{type(given).__name__}"
    raise ParamError(
        f"{param}: expected a pyspark.sql.DataFrame, found {found}. Make one with "
        "spark.createDataFrame(...) or spark.read."
    )


def require_columns(df: DataFrame, param: str, names: Sequence[str]) -> None:
    """Make sure that a parameter names columns that exist and are unambiguous.

    Raises
    ------
    ColumnError
        If no names are given, if a column is missing, or if a name fits several columns.
    """
    if not names:
        raise ColumnError(f"{param}: expected at least one column name, found none. Set {param}.")
    columns = df.columns
    missing = [name for name in names if name not in columns]
    if missing:
        raise ColumnError(
            f"{param}: the DataFrame has no column {', '.join(map(repr, missing))}; "
            f"its columns are {', '.join(columns)}."
        )
    for name in names:
        alike = clashing(df, name, columns)
        if len(alike) > 1:
            remedy = "Rename or drop the others (toDF renames by position)"
            if len(set(alike)) > 1:
                remedy += ", or set spark.sql.caseSensitive=true, if case tells them apart"
            raise ColumnError(
                f"{param}: the DataFrame has {len(alike)} columns that Spark takes for "
                f"{name!r}: {', '.join(map(repr, alike))}. {remedy}."
            )
