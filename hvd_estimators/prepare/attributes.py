"""What ML transformers have noted of columns: how many values a category has, how wide a vector is.

The format is that of Spark's ``org.apache.spark.ml.attribute``, in a column's metadata. Runs on the
driver, and starts no Spark job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

from hvd_estimators.exceptions import ColumnError
from hvd_estimators.prepare.column_names import require_columns, require_frame

__all__ = ["cardinalities", "vector_width"]


def cardinalities(df: DataFrame, columns: Sequence[str]) -> dict[str, int]:
    """Return how many values columns of category indices can take: the rows of their embeddings.

    Runs on the driver, and starts no Spark job: transformers note it in a column's metadata.

    Parameters
    ----------
    df : DataFrame
        What ``StringIndexer``, ``Bucketizer``, ``QuantileDiscretizer`` or another transformer of
        ``pyspark.ml`` has written.
    columns : sequence of str
        Columns of indices, from 0.

    Returns
    -------
    dict of str to int
        The number of values of each column, in the order given. ``handleInvalid="keep"`` of
        ``StringIndexer`` adds one, for values that it has not seen. That of ``Bucketizer`` and
        ``QuantileDiscretizer`` adds a bucket for NaN that Spark does not note: add one yourself.

    Raises
    ------
    ColumnError
        If there is no such column, or if nobody has noted how many values it has.
    ParamError
        If ``df`` is no DataFrame.

    Examples
    --------
    >>> indexed = StringIndexer(inputCol="store", outputCol="store_index").fit(df).transform(df)
    >>> sizes = cardinalities(indexed, ["store_index"])
    >>> embedding = torch.nn.Embedding(sizes["store_index"], 8)
    """
    require_frame("df", df)
    if isinstance(columns, str):
        columns = [columns]
    require_columns(df, "columns", columns)
    return {name: _cardinality(df, name) for name in columns}


def vector_width(df: DataFrame, name: str) -> int | None:
    """Return the width of a column of vectors, where an ML transformer noted it."""
    width = _noted(df, name).get("num_attrs")
    return int(width) if width else None


def _cardinality(df: DataFrame, name: str) -> int:
    noted = _noted(df, name)
    if "vals" in noted:
        return len(noted["vals"])
    if "num_vals" in noted:
        return int(noted["num_vals"])
    if noted.get("type") == "binary":
        return 2
    if "attrs" in noted or "num_attrs" in noted:
        raise ColumnError(
            f"columns: {name!r} is a vector, found {noted.get('num_attrs', 'several')} numbers in "
            "it. Name the columns that it was assembled of."
        )
    raise ColumnError(
        f"columns: expected a column of category indices, but nothing notes how many values "
        f"{name!r} has. Write it with pyspark.ml's StringIndexer, or count them: "
        f"df.agg(F.max({name!r})).first()[0] + 1."
    )


def _noted(df: DataFrame, name: str) -> Mapping[str, Any]:
    noted: Mapping[str, Any] = df.schema[name].metadata.get("ml_attr", {})
    return noted
