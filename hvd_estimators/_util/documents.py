"""Plain values for JSON documents and ``torch.load``, and checks of documents that are read back.

Used on the driver and on workers.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


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
    values: object, types: Mapping[str, type | tuple[type, ...]], required: Iterable[str] = ()
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


def strict_number(value: float) -> float | str:
    """Return a number, or its string if standard JSON cannot represent it."""
    return value if math.isfinite(value) else str(value)


def to_python(value: Any) -> Any:
    """Convert NumPy scalars and integer enums to Python values, also inside collections.

    Lists, tuples and dicts are copied, so later changes to the originals have no effect. Other
    objects, and instances of subclasses of these types, are returned unchanged.

    Parameters
    ----------
    value : object
        Any value.
    """
    if isinstance(value, (np.bool_, np.number, np.str_)):
        return value.item()
    if isinstance(value, enum.IntEnum):
        return int(value)
    if type(value) is dict:
        return {to_python(key): to_python(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_python, value))
    return value
