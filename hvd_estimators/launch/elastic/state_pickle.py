"""Pickles of a rank's state in which tensors are not copied. Runs on the worker."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle

__all__ = ["StatePickler"]


class StatePickler(cloudpickle.Pickler):
    """Pickles torch's tensors as the NumPy arrays that share their memory.

    torch makes bytes of each, of which pickle lets go only when all has been written.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled; called by pickle."""
        # Without an import of torch, which is there if its tensors are.
        if (type(obj).__module__, type(obj).__qualname__) == ("torch", "Tensor"):
            array = _array_of(obj)
            if array is not None:
                return sys.modules["torch"].from_numpy, (array,)
        return super().reducer_override(obj)


def _array_of(tensor: Any) -> Any:
    """Return the array that shares a tensor's memory; None where there is none."""
    if tensor.requires_grad or not tensor.is_contiguous():
        return None
    try:
        return tensor.numpy()
    # On a GPU, sparse, or of a type that NumPy does not have.
    except (TypeError, RuntimeError):
        return None
