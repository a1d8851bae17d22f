"""Values as Python's own, which JSON and ``torch.load`` know. Used on both sides."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["to_python"]


def to_python(value: Any) -> Any:
    """Return a value with Python's numbers for NumPy's scalars, in lists, tuples and dicts, too.

    Lists, tuples and dicts are copied, so that later changes of the given ones are not seen. What
    else is in them, and what is derived from their types, is as it was.

    Parameters
    ----------
    value : object
        Anything.
    """
    if isinstance(value, (np.bool_, np.number, np.str_)):
        return value.item()
    if type(value) is dict:
        return {to_python(key): to_python(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_python, value))
    return value
