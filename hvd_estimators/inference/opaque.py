"""Columns past which Spark's optimizer takes no filter. Runs on the driver."""

from __future__ import annotations

import uuid

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

__all__ = ["computed_here", "with_opaque"]


def with_opaque(frame: DataFrame, column: Column, name: str) -> DataFrame:
    """Return a DataFrame with a further column; filters on it stay above it.

    Spark pushes a filter below a projection with the column's expression in it: a UDF would run in
    the filter, and once more. Here filters on other columns do go below, and the column is computed
    only where it is needed.

    Parameters
    ----------
    frame : DataFrame
        The other columns.
    column : Column
        What the column holds.
    name : str
        Its name, which no other column has.
    """
    # An unpivot of one column leaves as many rows as there were. To the optimizer it is an Expand,
    # past which it takes conditions on the columns that an Expand is given, and not on those that
    # it makes; and it computes none of these that nothing asks for.
    variable = f"{name}_from"
    return frame.unpivot("*", column.alias("column"), variable, name).drop(variable)


def computed_here(frame: DataFrame) -> DataFrame:
    """Return the same DataFrame; what its columns are made of does not go further up.

    Spark puts what a column holds into the expression that uses it, where that is one, and a UDF's
    rows then wait for its results with what the column is made of.
    """
    name = f"__{uuid.uuid4().hex}"
    return with_opaque(frame, F.lit(0), name).drop(name)
