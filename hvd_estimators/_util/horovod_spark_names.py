"""Public names of ``horovod.spark`` and their homes in this package.

`hvd_estimators.compat` serves these modules, and ``build-horovod --with-compat`` writes them into
the wheel for type checkers. Plain data; imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HOMES"]

_HELPERS = "hvd_estimators.compat.helpers"
_API = "hvd_estimators.launch.api"
_DATASETS = "hvd_estimators.prepare.datasets"
_PETASTORM = "hvd_estimators.loading.petastorm"
_SETTINGS = "hvd_estimators.compat.spark_settings"
_STORE = "hvd_estimators.store"

_BASES = {
    "EstimatorParams": "hvd_estimators.fitting.hooks:EstimatorHooks",
    "HorovodEstimator": "hvd_estimators.estimator",
    "HorovodModel": "hvd_estimators.model",
}
_KERAS = {
    "KerasEstimator": "hvd_estimators.keras.estimator",
    "KerasModel": "hvd_estimators.keras.model",
}
_LIGHTNING = {
    "TorchEstimator": "hvd_estimators.compat.lightning",
    "TorchModel": "hvd_estimators.lightning.model",
}
_TORCH = {
    "TorchEstimator": "hvd_estimators.compat.torch",
    "TorchModel": "hvd_estimators.torch.model",
}
_DEVICES = {"get_available_devices": "hvd_estimators.launch.gpus"}
_RUN = {"run": _API, "run_elastic": _API}

HOMES: Mapping[str, Mapping[str, str]] = {
    "": _RUN,
    "common": {},
    "common.backend": {
        "Backend": "hvd_estimators.launch.backend",
        "SparkBackend": _HELPERS,
        "default_num_proc": _HELPERS,
    },
    "common.constants": dict.fromkeys(
        (
            *("ARRAY", "BYTES_PER_GIB", "CUSTOM_SPARSE", "DENSE_VECTOR", "METRIC_PRINT_FREQUENCY"),
            *("MIXED_SPARSE_DENSE_VECTOR", "NOCHANGE", "PETASTORM_HDFS_DRIVER", "SPARSE_VECTOR"),
            "TOTAL_BUFFER_MEMORY_CAP_GIB",
        ),
        _HELPERS,
    ),
    "common.datamodule": {"DataModule": "hvd_estimators.loading.readers"},
    "common.estimator": {
        **_BASES,
        "ModelParams": "hvd_estimators.model:HorovodModel",
        "SparkBackend": _HELPERS,
    },
    "common.params": {
        "EstimatorParams": _BASES["EstimatorParams"],
        "ModelParams": "hvd_estimators.model:HorovodModel",
    },
    "common.store": {
        "AbstractFilesystemStore": f"{_STORE}:Store",
        **dict.fromkeys(
            ("DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"), _STORE
        ),
    },
    "common.util": {
        "clear_training_cache": _DATASETS,
        "get_dataset_properties": _DATASETS,
        "is_databricks": _HELPERS,
        "prepare_data": "hvd_estimators.prepare.dataframe",
        "to_list": _HELPERS,
    },
    "conf": dict.fromkeys(
        (
            *("SPARK_CONF_ALWAYS_RESTART_FAILED_TASK", "SPARK_CONF_BLACKLIST_DISABLED"),
            *("SPARK_CONF_BLACKLIST_ENABLED", "SPARK_CONF_DEFAULT_VALUES"),
            "SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK",
            "SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR",
            "SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP",
            "SPARK_CONF_DONT_REUSE_FAILING_NODE",
            "SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP",
            "SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK",
            *("SPARK_CONF_MAX_INT", "SPARK_CONF_MAX_INT_MINUS_ONE"),
            "SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK",
            "SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK",
            *("SPARK_CONF_REUSE_FAILED_EXECUTOR", "SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP"),
            *("SPARK_CONF_REUSE_FAILING_NODE", "SPARK_CONF_REUSE_FAILING_NODE_IN_APP"),
            "SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK",
            "SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK",
        ),
        _SETTINGS,
    ),
    "keras": _KERAS,
    "keras.datamodule": {"PetastormDataModule": _PETASTORM},
    "keras.estimator": {**_BASES, **_KERAS},
    "lightning": _LIGHTNING,
    "lightning.datamodule": {},
    "lightning.estimator": {
        **_BASES,
        **_LIGHTNING,
        "MIN_PL_VERSION": "hvd_estimators.compat.lightning",
    },
    "runner": _RUN,
    "task": _DEVICES,
    "task.task_info": _DEVICES,
    "torch": _TORCH,
    "torch.datamodule": {"PetastormDataModule": _PETASTORM},
    "torch.estimator": {**_BASES, **_TORCH},
}
"""Module below ``horovod.spark`` to its names, and each name to ``module`` or ``module:name``."""
