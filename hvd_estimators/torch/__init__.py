"""PyTorch on Spark: `TorchEstimator` and `TorchModel`.

Imported when first used, so that a rank can import the trainer without PySpark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_estimators.torch.estimator import TorchEstimator
    from hvd_estimators.torch.model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]

_HOMES = {
    "TorchEstimator": "hvd_estimators.torch.estimator",
    "TorchModel": "hvd_estimators.torch.model",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
