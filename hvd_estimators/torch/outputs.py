"""A module's outputs as one tensor per label."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_estimators.exceptions import ShapeError

__all__ = ["as_list"]

# The names that Hugging Face's models give to their prediction.
_PREDICTION = "logits"


def as_list(outputs: Any, labels: Sequence[str] = ()) -> list[torch.Tensor]:
    """Return a module's outputs as a list, in the order of the labels.

    Parameters
    ----------
    outputs : tensor, sequence, mapping, dataclass or named tuple
        Tensors and sequences are taken in their order. A mapping, a dataclass and a named tuple
        with the labels' names are taken by name; what else they hold is left out. For a single
        label that they do not name, the only tensor in them counts, or ``logits``.
    labels : sequence of str
        Label columns; without them every tensor counts, in its order.

    Raises
    ------
    ShapeError
        If outputs with names lack a label.
    """
    named = _named(outputs)
    if named is None:
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    if not labels:
        return list(tensors.values())
    if all(label in tensors for label in labels):
        return [tensors[label] for label in labels]
    if isinstance(outputs, tuple):
        return list(outputs)
    if len(labels) == 1 and len(tensors) == 1:
        return list(tensors.values())
    if len(labels) == 1 and _PREDICTION in tensors:
        return [tensors[_PREDICTION]]
    missing = [label for label in labels if label not in tensors]
    raise ShapeError(
        f"label_cols: the model returns {type(outputs).__name__} with the outputs "
        f"{', '.join(map(str, tensors)) or 'none'}, and none of them is named {', '.join(missing)}."
        " Name label columns and outputs alike, or return a tuple in the order of label_cols."
    )


def _named(outputs: Any) -> Mapping[Any, Any] | None:
    """Return outputs by name; None if they have no names."""
    if isinstance(outputs, Mapping):
        return outputs
    if dataclasses.is_dataclass(outputs):
        return {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    if isinstance(outputs, tuple) and hasattr(outputs, "_asdict"):
        named: Mapping[str, Any] = outputs._asdict()
        return named
    return None
