"""Deep-learning Estimators for Spark ML, trained with Horovod.

The names below are imported when they are first used, so that a rank (a plain Python process)
can import this package without PySpark, and the driver without a deep-learning framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_estimators.data.prepare import prepare_data
    from hvd_estimators.store import Store

__version__ = "0.1.0"
__all__ = ["Store", "__version__", "prepare_data"]

_HOMES = {
    "Store": "hvd_estimators.store",
    "prepare_data": "hvd_estimators.data.prepare",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
