"""Reading of saved models and checkpoints, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import IO, Any

import torch

from hvd_estimators.exceptions import StoreError
from hvd_estimators.inference.batch import Resources
from hvd_estimators.inference.standalone import predictor_loader
from hvd_estimators.saving.saved import Saved
from hvd_estimators.torch.predictor import TorchPredictor, transform_spec

__all__ = ["load_predictor", "read_content"]


def read_content(file: IO[bytes], safe: bool, custom_objects: Any) -> dict[str, Any]:
    """Read a ``torch.save`` file, on the CPU.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Run no code from the file.
    custom_objects : object
        Not used.

    Raises
    ------
    StoreError
        If ``safe`` is set and the file holds more than tensors and plain values.
    """
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=safe)
    except pickle.UnpicklingError as error:
        raise StoreError(
            "The checkpoint holds more than tensors and plain values, and loading these runs code "
            "from the file. If you trust its author, load it with safe=False."
        ) from error
    return content


def _load(saved: Saved, resources: Resources) -> tuple[TorchPredictor, Sequence[str]]:
    precision = saved.get("inference_precision") or "float32"
    spec = transform_spec(saved.get)
    return TorchPredictor(saved.file("model"), spec, precision, resources), ()


load_predictor = predictor_loader("TorchModel", _load)
