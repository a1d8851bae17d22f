"""Deep-learning Estimators for Spark ML, trained with Horovod.

The names below are imported when they are first used, so that a rank (a plain Python process)
can import this package without PySpark, and the driver without a deep-learning framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators.lazy import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.data.catalog import PreparedDataset, list_prepared_data
    from hvd_estimators.data.prepare import prepare_data
    from hvd_estimators.data.prepared import clear_prepared_data, clear_training_cache
    from hvd_estimators.data.properties import get_dataset_properties
    from hvd_estimators.store import Store

__version__ = "0.1.0"
__all__ = [
    "PreparedDataset",
    "Store",
    "__version__",
    "clear_prepared_data",
    "clear_training_cache",
    "get_dataset_properties",
    "list_prepared_data",
    "prepare_data",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "PreparedDataset": "hvd_estimators.data.catalog",
        "Store": "hvd_estimators.store",
        "clear_prepared_data": "hvd_estimators.data.prepared",
        "clear_training_cache": "hvd_estimators.data.prepared",
        "get_dataset_properties": "hvd_estimators.data.properties",
        "list_prepared_data": "hvd_estimators.data.catalog",
        "prepare_data": "hvd_estimators.data.prepare",
    },
)
