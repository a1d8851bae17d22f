"""JSON documents that a store holds and this package reads back: parsing and checks of types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def parse_object(content: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises
    ------
    ValueError
        If the content is not JSON, not an object, or nested too deeply.
    """
    try:
        document = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, found {type(document).__name__}")
    return document


def check_types(
    values: object,
    types: Mapping[str, type | tuple[type, ...]],
    required: Iterable[str] = (),
) -> None:
    """Check the types of some values of an object in a document.

    Parameters
    ----------
    values : object
        The object, as it was parsed.
    types : mapping
        Key to the type or types of its value. Other keys are not checked.
    required : iterable of str
        Keys that must exist.

    Raises
    ------
    ValueError
        If it is not an object, if a key is missing, or if a value has another type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, found {values!r:.100}")
    for name in required:
        if name not in values:
            raise ValueError(f"{name} is missing")
    for name, kind in types.items():
        value = values.get(name)
        is_bool = isinstance(value, bool) and kind is not bool
        if name in values and (is_bool or not isinstance(value, kind)):
            raise ValueError(f"{name}: found {value!r:.100}")
