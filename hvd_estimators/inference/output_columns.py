"""Names of the columns that `transform` adds for a model's outputs. Imports no PySpark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["output_columns"]


def output_columns(get: Callable[[str], Any]) -> list[str]:
    """Return the names of the output columns, as set or by default.

    The default for an output that pairs with a label is ``<label>__output``. Others are named after
    ``outputs``: ``<name>__output``, or ``output_<position>``, or ``output`` for a single one.

    Parameters
    ----------
    get : callable
        The name of a model's param to its value.
    """
    given = get("outputCols")
    if given:
        return list(given)
    selected = get("outputs")
    if selected is None and get("label_columns") is None:
        return []
    labels = get("label_columns") or []
    if selected is None and labels and get("loss_form") != "joint":
        return [f"{label}__output" for label in labels]
    if selected is None:
        shapes = get("output_shapes")
        selected = range(1 if shapes is None else len(shapes))
    if len(selected) == len(labels):
        return [f"{label}__output" for label in labels]
    single = len(selected) == 1
    return [
        f"{place}__output" if isinstance(place, str) else "output" if single else f"output_{place}"
        for place in selected
    ]
