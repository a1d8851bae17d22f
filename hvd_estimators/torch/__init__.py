"""PyTorch on Spark: `TorchEstimator` and `TorchModel`.

Imported when first used, so that a rank can import the trainer without PySpark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import DependencyError

if TYPE_CHECKING:
    from hvd_estimators.torch.estimator import TorchEstimator
    from hvd_estimators.torch.model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]

_HOMES = {
    "TorchEstimator": "hvd_estimators.torch.estimator",
    "TorchModel": "hvd_estimators.torch.model",
}


_INSTALL = {"horovod": "hvd-estimators build-horovod", "torch": "pip install torch"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing in _INSTALL:
                raise DependencyError(
                    f"hvd_estimators.torch needs {missing}, which is not installed. Run: "
                    f"{_INSTALL[missing]}"
                ) from error
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
