"""Convert NumPy scalars to Python values. Used on the driver and on workers.

JSON and ``torch.load`` support Python's own values only.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def to_python(value: Any) -> Any:
    """Convert NumPy scalars to Python values, also inside lists, tuples and dicts.

    Lists, tuples and dicts are copied, so later changes to the originals have no effect. Other
    objects, and instances of subclasses of these types, are returned unchanged.

    Parameters
    ----------
    value : object
        Any value.
    """
    if isinstance(value, (np.bool_, np.number, np.str_)):
        return value.item()
    if type(value) is dict:
        return {to_python(key): to_python(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_python, value))
    return value
