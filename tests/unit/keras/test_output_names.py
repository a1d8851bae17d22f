"""Matching of labels to outputs; ambiguous names are rejected."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.keras.outputs import Outputs, by_output


def functional(names: list[str], keys: list[str] | None = None) -> keras.Model:
    x = keras.Input((2,))
    outputs = [keras.layers.Dense(i + 1, name=name)(x) for i, name in enumerate(names)]
    return keras.Model(x, dict(zip(keys, outputs, strict=True)) if keys else outputs)


def widths(model: keras.Model, labels: list[str]) -> list[int]:
    """Return the width of each label's output; widths identify the outputs."""
    flat = keras.tree.flatten(model.output)
    return [tensor.shape[-1] for tensor in Outputs.of(model, model.output, labels).select(flat)]


@pytest.mark.parametrize(
    ("names", "keys", "labels", "expected"),
    [
        (["b", "a"], None, ["a", "b"], [2, 1]),
        (["b", "a", "aux"], None, ["a", "b"], [2, 1]),
        (["dense_b", "dense_a"], None, ["a", "b"], [1, 2]),
        (["a", "other"], None, ["a", "y"], [1, 2]),
        (["p", "q"], ["zeta", "alpha"], ["zeta", "alpha"], [1, 2]),
        (["p"], ["out"], ["y"], [1]),
    ],
)
def test_labels_match_outputs_by_name_or_else_by_position(
    names: list[str], keys: list[str] | None, labels: list[str], expected: list[int]
) -> None:
    assert widths(functional(names, keys), labels) == expected


@pytest.mark.parametrize(
    ("names", "keys", "labels", "message"),
    [
        (
            ["p", "q"],
            ["k", "l"],
            ["a", "b"],
            "dict of outputs 'k', 'l'.*label columns are 'a', 'b'",
        ),
        (["a", "b"], ["k", "l"], ["a", "b"], "dict of outputs 'k', 'l'.*rename the columns"),
        (["y", "a"], None, ["a", "z"], "named 'y', 'a'.*columns are 'a', 'z'.*different ways"),
        (["p", "q"], None, ["a"], r"2 outputs \('p', 'q'\), and there are 1 label.*\[0\].*a dict"),
        (["p"], None, ["a", "b"], "1 outputs.*2 label columns: a, b"),
    ],
)
def test_ambiguous_names_are_rejected(
    names: list[str], keys: list[str] | None, labels: list[str], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        widths(functional(names, keys), labels)


def test_outputs_are_selected_by_position_and_by_name() -> None:
    model = functional(["p", "q", "r"])

    def labels_of(labels: list[str], selection: list[int | str]) -> Any:
        found = Outputs.of(model, model.output, labels, selection)
        return found.labels, [t.shape[-1] for t in found.select(keras.tree.flatten(model.output))]

    assert labels_of(["a"], [1]) == ((None, "a", None), [2])
    assert labels_of(["a", "b"], ["r", 0]) == (("b", None, "a"), [3, 1])
    assert labels_of([], ["q", "p"]) == ((None, None, None), [2, 1])
    assert Outputs.of(model, model.output, []).selected == (0, 1, 2)
    with pytest.raises(ShapeError, match=r"outputs: expected one per label, 1, found 2: 'p', 'q'"):
        labels_of(["a"], ["p", "q"])
    for wrong in (3, "x"):
        with pytest.raises(
            ShapeError, match=f"outputs: found {wrong!r}, .*3 outputs .'p', 'q', 'r'"
        ):
            labels_of(["a"], [wrong])


def test_outputs_in_structures_without_names_match_by_position() -> None:
    model = keras.Sequential()
    one = np.zeros((1, 1))
    assert Outputs.of(model, (one, [one, one]), ["c", "a", "b"]).labels == ("c", "a", "b")
    with pytest.raises(ShapeError, match="pair with labels by name"):
        Outputs.of(model, (one, {"b": one, "a": one}), ["c", "a", "b"])


class Pair(NamedTuple):
    b: Any
    a: Any


def test_named_tuple_outputs_match_by_field_or_position() -> None:
    model, outputs = keras.Model(), Pair(np.zeros((3, 1)), np.zeros((3, 2)))

    def found(*labels: str) -> list[int]:
        flat = keras.tree.flatten(outputs)
        chosen = Outputs.of(model, outputs, labels).select(flat)
        return [array.shape[1] for array in chosen]

    assert found("a", "b") == [2, 1]
    assert found("a") == [2]
    assert found("y", "z") == [1, 2]
    with pytest.raises(ShapeError, match="by name and by position they pair in different ways"):
        found("a", "z")


def test_params_name_labels_or_outputs() -> None:
    labels = ["zeta", "alpha"]
    model = functional(["p", "q", "r"], ["zeta", "alpha", "aux"])
    outputs = Outputs.of(model, model.output, labels)

    def spread(given: Any, **options: Any) -> Any:
        return outputs.pack(by_output("loss", given, outputs, labels, **options))

    assert spread("mse") == {"zeta": "mse", "alpha": "mse", "aux": None}
    assert spread(["mse", "mae"]) == {"zeta": "mse", "alpha": "mae", "aux": None}
    assert spread({"alpha": "mae", "aux": "mse"}) == {"zeta": None, "alpha": "mae", "aux": "mse"}
    assert spread({"alpha": 2.0}, missing=1.0) == {"zeta": 1.0, "alpha": 2.0, "aux": 1.0}
    with pytest.raises(ParamError, match=r"loss: no label.*'beta'.*'alpha', 'zeta'.*'aux'"):
        spread({"beta": "mse"})
    with pytest.raises(ParamError, match="loss: expected one per label, 2, found 3"):
        spread(["mse"] * 3)
