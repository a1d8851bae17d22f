"""Selecting a module's outputs: one tensor per label, or those that ``outputs`` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_estimators.exceptions import ShapeError

__all__ = ["Selected", "require_tensors", "select_outputs", "selection"]

# The names that Hugging Face's models give to their prediction.
_PREDICTION = "logits"


class Selected(list[Any]):
    """Outputs that `select_outputs` has selected already."""


def select_outputs(
    outputs: Any,
    labels: Sequence[str] = (),
    selection: Sequence[int | str] | None = None,
) -> Selected:
    """Return some of a module's outputs as a list.

    Parameters
    ----------
    outputs : tensor, sequence, mapping, dataclass or named tuple
        What the module returned.
    labels : sequence of str
        The label columns that pair with outputs; empty if none do.
    selection : sequence of (int or str), optional
        Positions or names of the outputs. By default, tensors and sequences are taken in their
        order, without None. Outputs with names are taken by the names of the labels. For a single
        label that they do not name, the only tensor in them counts, or ``logits``. Without labels
        every tensor counts.

    Raises
    ------
    ShapeError
        If there is no such output, or no output for a label.
    """
    if isinstance(outputs, Selected):
        return outputs
    if selection is not None:
        return Selected(_output(outputs, place) for place in selection)
    named = _named(outputs)
    if named is None:
        return Selected(_present(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    if not labels:
        return Selected(tensors.values())
    if all(label in tensors for label in labels):
        return Selected(tensors[label] for label in labels)
    if isinstance(outputs, tuple):
        return Selected(_present(outputs))
    if len(labels) == 1 and len(tensors) == 1:
        return Selected(tensors.values())
    if len(labels) == 1 and _PREDICTION in tensors:
        return Selected([tensors[_PREDICTION]])
    missing = [label for label in labels if label not in tensors]
    raise ShapeError(
        f"label_cols: the model returns {type(outputs).__name__} with the outputs "
        f"{', '.join(map(str, tensors)) or 'none'}, and none of them is named {', '.join(missing)}."
        " Set outputs to the names of one output per label, name label columns and outputs alike, "
        "or return a tuple in the order of label_cols."
    )


def require_tensors(selected: Selected, outputs: Any) -> Selected:
    """Return selected outputs if all of them are tensors.

    Raises
    ------
    ShapeError
        If one is something else.
    """
    for output in selected:
        if not isinstance(output, torch.Tensor):
            raise ShapeError(
                f"label_cols: the model returns {type(outputs).__name__} of "
                f"{type(output).__name__}. Return a tensor per label: alone, in a tuple, or in a "
                "dict or dataclass by name; or set outputs to those that are tensors, such as [0]."
            )
    return selected


def selection(given: Sequence[int | str] | None) -> tuple[int | str, ...] | None:
    """Return the param ``outputs`` as `select_outputs` takes it."""
    return None if given is None else tuple(given)


def _output(outputs: Any, place: int | str) -> Any:
    """Return the output at a position, or of a name."""
    named = _named(outputs)
    if isinstance(place, str):
        if named is not None and place in named:
            return named[place]
        known = "no names" if named is None else f"the names {', '.join(map(str, named))}"
        raise ShapeError(
            f"outputs: found {place!r}, and the model returns {_described(outputs)} with {known}. "
            "Set names that it has, or positions, such as outputs=[0]."
        )
    if named is not None:
        values = list(named.values())
    else:
        values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    if place >= len(values):
        raise ShapeError(
            f"outputs: found position {place}, and the model returns {_described(outputs)}, whose "
            f"positions are 0 to {len(values) - 1}. Set outputs to some of these."
        )
    return values[place]


def _described(outputs: Any) -> str:
    kind = type(outputs).__name__
    sized = isinstance(outputs, (list, tuple, Mapping))
    return f"a {kind} of {len(outputs)}" if sized else f"a {kind}"


def _present(outputs: Sequence[Any]) -> list[Any]:
    """Return outputs without None, which models return for what they were not asked for."""
    return [output for output in outputs if output is not None]


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
