"""Deep-learning Estimators for Spark ML, trained with Horovod.

The names below are imported on first use. A rank (a plain Python process) can therefore import
this package without PySpark, and the driver can import it without a deep-learning framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators._util.lazy_imports import lazy_names, make_triton_import_safe

if TYPE_CHECKING:
    from hvd_estimators.checkpoints import Checkpoint, load_checkpoint
    from hvd_estimators.launch.api import HorovodRunner, run, run_elastic
    from hvd_estimators.launch.gpus import get_available_devices
    from hvd_estimators.launch.service.events import log_to_driver
    from hvd_estimators.plots import plot_histories
    from hvd_estimators.prepare.dataframe import prepare_data
    from hvd_estimators.prepare.datasets import (
        PreparedDataset,
        clear_prepared_data,
        clear_training_cache,
        get_dataset_properties,
        list_prepared_data,
    )
    from hvd_estimators.prepare.schema import cardinalities
    from hvd_estimators.store import Store

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "HorovodRunner",
    "PreparedDataset",
    "Store",
    "__version__",
    "cardinalities",
    "clear_prepared_data",
    "clear_training_cache",
    "get_available_devices",
    "get_dataset_properties",
    "list_prepared_data",
    "load_checkpoint",
    "log_to_driver",
    "plot_histories",
    "prepare_data",
    "run",
    "run_elastic",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Checkpoint": "hvd_estimators.checkpoints",
        "HorovodRunner": "hvd_estimators.launch.api",
        "PreparedDataset": "hvd_estimators.prepare.datasets",
        "Store": "hvd_estimators.store",
        "cardinalities": "hvd_estimators.prepare.schema",
        "clear_prepared_data": "hvd_estimators.prepare.datasets",
        "clear_training_cache": "hvd_estimators.prepare.datasets",
        "get_available_devices": "hvd_estimators.launch.gpus",
        "get_dataset_properties": "hvd_estimators.prepare.datasets",
        "list_prepared_data": "hvd_estimators.prepare.datasets",
        "load_checkpoint": "hvd_estimators.checkpoints",
        "log_to_driver": "hvd_estimators.launch.service.events",
        "plot_histories": "hvd_estimators.plots",
        "prepare_data": "hvd_estimators.prepare.dataframe",
        "run": "hvd_estimators.launch.api",
        "run_elastic": "hvd_estimators.launch.api",
    },
)

# Runs on import, so that users can import TensorFlow and torch afterwards in either order.
make_triton_import_safe()
