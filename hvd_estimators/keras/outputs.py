"""Pair a model's outputs with labels, by name if the outputs have names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from hvd_estimators.exceptions import ParamError, ShapeError


def symbolic(model: keras.Model, side: str) -> Any:
    """Return the symbolic "input" or "output" of a model in its structure, or None."""
    if isinstance(model, keras.Sequential):
        tensors = getattr(model, f"{side}s", None)
        return tensors[0] if tensors else None
    try:
        return getattr(model, side)
    except (AttributeError, ValueError):
        return None


@dataclass(frozen=True)
class Outputs:
    """A model's outputs and their labels.

    Attributes
    ----------
    structure : int, or nested structure of int
        The outputs in the model's structure, each replaced by its position in the flat list. Keras
        flattens a dict by its sorted keys.
    names : tuple of (str or None)
        Name of each output, in flat order: its dict key, its named-tuple field, or the name of its
        layer; None if it has no name.
    labels : tuple of (str or None)
        Label of each output, in flat order; None for an auxiliary output, which has no label.
    selected : tuple of int
        Positions of the outputs that are predictions: selected by ``outputs``, else outputs of
        the labels in label order, else all.
    """

    structure: Any
    names: tuple[str | None, ...]
    labels: tuple[str | None, ...]
    selected: tuple[int, ...] = ()

    @staticmethod
    def of(
        model: keras.Model,
        outputs: Any,
        label_cols: Sequence[str],
        selection: Sequence[int | str] | None = None,
    ) -> Outputs:
        """Find the label for each output.

        A single output pairs with a single label, regardless of the names. Otherwise the structure
        decides:

        - Outputs in a dict pair with the labels that are their keys.
        - Outputs in a named tuple pair by field, and outputs in a functional model's list by layer,
          if every label has such a name. Otherwise these outputs pair by position.

        Parameters
        ----------
        model : keras.Model
            The model.
        outputs : tensor, or nested structure of tensors
            The model's outputs, symbolic or not.
        label_cols : sequence of str
            The labels; empty if labels do not pair with outputs.
        selection : sequence of (int or str), optional
            Positions or names of the outputs that pair with the labels, in label order.

        Raises
        ------
        ShapeError
            If labels and outputs cannot be paired, or the model lacks a selected output.
        """
        flat = keras.tree.flatten(outputs)
        structure = keras.tree.pack_sequence_as(outputs, list(range(len(flat))))
        names: tuple[str | None, ...] = (None,) * len(flat)
        if symbolic(model, "output") is not None:
            names = tuple(getattr(model, "output_names", names))
        keys = _keys(structure)
        names = (_fields(structure) or names) if keys is None else keys
        described = Outputs(structure, names, (None,) * len(flat), tuple(range(len(flat))))
        if selection is not None:
            return described._with_selection(list(label_cols), selection)
        return described._with_labels(list(label_cols), has_keys=keys is not None)

    def _with_selection(self, label_cols: list[str], selection: Sequence[int | str]) -> Outputs:
        selected = tuple(map(self._position, selection))
        if label_cols and len(selected) != len(label_cols):
            raise ShapeError(
                f"outputs: expected one per label, {len(label_cols)}, found {len(selected)}: "
                f"{_listed(selection)}. Set outputs in the order of label_cols."
            )
        labels: list[str | None] = [None] * len(self.labels)
        for label, position in zip(label_cols, selected, strict=False):
            labels[position] = label
        return replace(self, labels=tuple(labels), selected=selected)

    def _position(self, given: int | str) -> int:
        """Return the flat position of an output, given its position or name."""
        if isinstance(given, int) and given < len(self.names):
            return given
        if isinstance(given, str) and given in self.names:
            return self.names.index(given)
        named = "" if None in self.names else f" ({_listed(self.names)})"
        raise ShapeError(
            f"outputs: found {given!r}, and the model has {len(self.names)} outputs{named}. Set "
            f"positions from 0 to {len(self.names) - 1}, or names."
        )

    def _with_labels(self, label_cols: list[str], has_keys: bool) -> Outputs:
        def paired(labels: Sequence[str | None]) -> Outputs:
            positions = tuple(labels.index(label) for label in label_cols)
            selected = positions or self.selected
            return replace(self, labels=tuple(labels), selected=selected)

        count = len(self.names)
        if count == len(label_cols) == 1:
            return paired(label_cols)
        label_names = set(label_cols)
        if label_names <= set(self.names):
            return paired([name if name in label_names else None for name in self.names])
        if has_keys or _holds_dict(self.structure):
            raise ShapeError(
                f"the model returns a dict of outputs {_listed(self.names)}, and the "
                f"label columns are {_listed(label_cols)}. Outputs in a dict pair with labels by "
                "name: return a flat dict whose keys are the label columns, or rename the columns.",
                param="label_cols",
            )
        if count != len(label_cols):
            named = f" ({_listed(self.names)})" if None not in self.names else ""
            raise ShapeError(
                f"the model has {count} outputs{named}, and there are "
                f"{len(label_cols)} label columns: {', '.join(label_cols)}. Set one label column "
                "per output. If some outputs have no label, set outputs to those that have one, "
                "such as [0], or let the model return a dict with the label columns as keys.",
                param="label_cols",
            )
        displaced = [
            label
            for label, name in zip(label_cols, self.names, strict=True)
            if label != name and (label in self.names or name in label_names)
        ]
        if displaced:
            raise ShapeError(
                f"the model's outputs are named {_listed(self.names)}, and the label "
                f"columns are {_listed(label_cols)}: by name and by position they pair in "
                "different ways. Name either all output layers after label columns, or no output "
                "layer.",
                param="label_cols",
            )
        return paired(label_cols)

    @property
    def auxiliary(self) -> bool:
        """Return whether there are outputs without a label."""
        return None in self.labels

    def position(self, label: str) -> int:
        """Return the flat position of a label's output."""
        return self.labels.index(label)

    def pack(self, values: Sequence[Any]) -> Any:
        """Return values, one per output in flat order, in the structure of the outputs."""
        return keras.tree.map_structure(lambda position: values[position], self.structure)

    def select(self, flat: Sequence[Any]) -> list[Any]:
        """Return the values of the selected outputs from the values of all outputs."""
        return [flat[position] for position in self.selected]


def by_output(
    param: str,
    given: Any,
    outputs: Outputs,
    label_cols: Sequence[str],
    *,
    missing: Any = None,
    list_is_value: bool = False,
) -> list[Any]:
    """Return a param's value for each output, in flat order.

    Parameters
    ----------
    param : str
        The param, for messages.
    given : object
        A dict with names of labels or outputs as keys, a list with one entry per label, or one
        value for all labels.
    outputs : Outputs
        The outputs.
    label_cols : sequence of str
        The labels, in the order of a list.
    missing : object
        Value for outputs that a dict does not name, or that have no label.
    list_is_value : bool
        Whether a list is one value for all labels.

    Raises
    ------
    ParamError
        If a key is not a name of a label or output, or a list has another length.
    """
    values = [missing] * len(outputs.labels)
    if isinstance(given, Mapping):
        for key, value in given.items():
            values[_position(param, key, outputs)] = value
    elif isinstance(given, (list, tuple)) and not list_is_value:
        if len(given) != len(label_cols):
            raise ParamError(
                f"{param}: expected one per label, {len(label_cols)}, found {len(given)}. Set a "
                f"list in the order of label_cols, or a dict with {_listed(label_cols)} as keys."
            )
        for label, value in zip(label_cols, given, strict=True):
            values[outputs.position(label)] = value
    else:
        values = [missing if label is None else given for label in outputs.labels]
    return values


def _position(param: str, key: Any, outputs: Outputs) -> int:
    for names in (outputs.labels, outputs.names):
        if key is not None and key in names:
            return names.index(key)
    named = "" if None in outputs.names else f", and the outputs are {_listed(outputs.names)}"
    raise ParamError(
        f"{param}: no label or output is named {key!r}. The label columns are "
        f"{_listed([label for label in outputs.labels if label is not None])}{named}."
    )


def _keys(structure: Any) -> tuple[str, ...] | None:
    """Return the keys of a flat dict, in the order of their outputs; None for others."""
    if not isinstance(structure, Mapping) or any(map(keras.tree.is_nested, structure.values())):
        return None
    return tuple(sorted(structure, key=lambda key: structure[key]))


def _fields(structure: Any) -> tuple[str, ...] | None:
    """Return a flat named tuple's fields, which may differ from the labels; None for others."""
    fields = getattr(structure, "_fields", None)
    if fields is None or any(map(keras.tree.is_nested, structure)):
        return None
    return tuple(fields)


def _holds_dict(structure: Any) -> bool:
    if isinstance(structure, Mapping):
        return True
    return isinstance(structure, (list, tuple)) and any(map(_holds_dict, structure))


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(repr(name) for name in names)
