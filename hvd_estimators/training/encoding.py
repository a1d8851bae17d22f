"""Values as JSON and arrays, which can be read without running any code."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_estimators.parquet.columns import Array

__all__ = ["decode", "encode", "is_encodable"]

_REGISTERED = 2
"""The value of ``dtype.isbuiltin`` for types that other packages have added to NumPy."""


def encode(value: Any, arrays: list[Array]) -> Any:
    """Return a value as JSON can hold it; `decode` gives back the same, with all bits of numbers.

    Parameters
    ----------
    value : object
        None, booleans, numbers, text, bytes, NumPy's arrays and scalars, and lists, tuples and
        mappings (which come back as dicts) of these.
    arrays : list of ndarray
        Arrays are added here; the JSON has their positions.

    Raises
    ------
    TypeError
        If the value, or one that it holds, is of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(entry, arrays) for entry in value]
    if type(value) is tuple:
        return {"tuple": [encode(entry, arrays) for entry in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k, arrays), encode(v, arrays)] for k, v in value.items()]}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        dtype, array = value.dtype, np.asarray(value)
        document: dict[str, Any] = {"array": len(arrays), "scalar": isinstance(value, np.generic)}
        if dtype.isbuiltin == _REGISTERED:
            # A .npy file does not record types of other packages (bfloat16, for example).
            document["dtype"] = dtype.name
            array = array.view(f"u{dtype.itemsize}")
        arrays.append(array)
        return document
    raise TypeError(f"expected plain values, found {type(value).__name__}: {value!r:.80}")


def decode(document: Any, arrays: Sequence[Array]) -> Any:
    """Return what `encode` was given."""
    if isinstance(document, list):
        return [decode(entry, arrays) for entry in document]
    if not isinstance(document, dict):
        return document
    if "tuple" in document:
        return tuple(decode(entry, arrays) for entry in document["tuple"])
    if "dict" in document:
        return {decode(k, arrays): decode(v, arrays) for k, v in document["dict"]}
    if "bytes" in document:
        return base64.b64decode(document["bytes"])
    array = arrays[document["array"]]
    if "dtype" in document:
        import ml_dtypes  # the frameworks that use these types bring it

        array = array.view(getattr(ml_dtypes, document["dtype"]))
    return array[()] if document["scalar"] else array


def is_encodable(value: Any) -> bool:
    """Return whether `encode` takes a value."""
    try:
        encode(value, [])
    except TypeError:
        return False
    return True
