"""What a checkpoint of torch's or Lightning's holds. Needs neither Horovod nor PySpark."""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch

from hvd_estimators.exceptions import StoreError

__all__ = ["read_content"]


def read_content(file: IO[bytes], safe: bool, custom_objects: Any) -> dict[str, Any]:
    """Return what ``torch.save`` has written, on the CPU.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Run no code from it.
    custom_objects : object
        Not used.

    Raises
    ------
    StoreError
        If it holds more than tensors and plain values, and is to run no code.
    """
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=safe)
    except pickle.UnpicklingError as error:
        raise StoreError(
            "The checkpoint holds more than tensors and plain values, and loading these runs code "
            "from the file. If you trust who wrote it, load it with safe=False."
        ) from error
    return content
