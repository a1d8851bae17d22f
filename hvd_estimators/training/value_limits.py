"""Labels that are no classes of a model, and ids that an embedding does not have.

Runs on the driver and on the ranks. Imports no PySpark.
"""

from __future__ import annotations

from hvd_estimators.exceptions import DataError


def check_labels(
    name: str, lowest: float, highest: float, classes: int, ignored: float | None = None
) -> None:
    """Check that the range of a label column lies within a model's classes.

    Parameters
    ----------
    name : str
        The label column.
    lowest, highest : float
        Its smallest and its largest number.
    classes : int
        Number of the model's classes.
    ignored : float, optional
        The number that the loss ignores.

    Raises
    ------
    DataError
        If a label is no class.
    """
    for label in (lowest, highest):
        if not 0 <= label < classes and label != ignored:
            raise DataError(
                f"label_cols: {name} holds {label:g}; the model's {classes} outputs are classes 0 "
                f"to {classes - 1}. Number the classes from 0, with pyspark.ml.feature."
                "StringIndexer for example, or give the model an output for each class."
            )


def check_ids(name: str, lowest: float, highest: float, rows: int) -> None:
    """Check that the range of a column lies within the ids of an embedding.

    Raises
    ------
    DataError
        If the embedding lacks an id.
    """
    if lowest < 0 or highest >= rows:
        raise DataError(unknown_ids(name, lowest, highest, rows))


def unknown_ids(name: str, lowest: float, highest: float, rows: int) -> str:
    """Return the message about ids that an embedding does not have."""
    return (
        f"The column {name!r} holds ids from {lowest:g} to {highest:g}, and the model's embedding "
        f"of it has {rows} rows, for ids 0 to {rows - 1}. Give the embedding a row for each id: "
        f"hvd_estimators.cardinalities(df, [{name!r}]) returns how many a StringIndexer made."
    )
