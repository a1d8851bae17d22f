"""Table of the public names of ``horovod.spark``: homes in this package, or replacements.

`hvd_estimators.compat` serves these modules, and ``build-horovod --with-compat`` writes them into
the wheel for type checkers. Plain data; imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HOMES", "LEFT_OUT_MODULES", "LEFT_OUT_NAMES"]

_HELPERS = "hvd_estimators.compat.helpers"
_API = "hvd_estimators.launch.api"
_DATASETS = "hvd_estimators.prepare.datasets"
_PETASTORM = "hvd_estimators.loading.petastorm"
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
        _HELPERS,
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

_LAUNCH = "hvd_estimators.run and run_elastic start the ranks: call them instead."
_RANKS = (
    "It was the ranks' program, which fit() sends; train_minibatch_fn, callbacks, data_module and "
    "transformation_fn change what ranks do."
)
_SAVING = (
    "Estimators and models are saved as folders of files, with write(), save(path) and "
    "load(path); a subclass needs no writer or reader of its own."
)
_LOADERS = (
    "Give the estimator data_module='petastorm' or 'arrow', a class derived from "
    "hvd_estimators.loading.readers.DataModule, or, with Lightning, a LightningDataModule class "
    "with DataLoaders of its own."
)
_NVTABULAR = "NVTabular is no longer developed. " + _LOADERS
_TYPES = "fit() and transform() find types and shapes by themselves."
_PREPARED = (
    "hvd_estimators.get_dataset_properties tells rows and columns of what prepare_data has "
    "written, list_prepared_data all of it."
)

LEFT_OUT_MODULES: Mapping[str, str] = {
    "horovod.spark.common.cache": _PREPARED,
    "horovod.spark.common.serialization": _SAVING,
    "horovod.spark.data_loaders": _LOADERS,
    "horovod.spark.driver": _LAUNCH,
    "horovod.spark.gloo_run": _LAUNCH,
    "horovod.spark.keras.bare": "Models of bare Keras went with Keras 2. Make them with Keras 3.",
    "horovod.spark.keras.optimizer": "Optimizers of Keras 3 are taken as they are.",
    "horovod.spark.keras.remote": _RANKS,
    "horovod.spark.keras.tensorflow": "Optimizers of Keras 3 are taken as they are.",
    "horovod.spark.keras.util": _RANKS,
    "horovod.spark.lightning.legacy": (
        "Give LightningEstimator the plain torch.nn.Module itself, with optimizer and loss."
    ),
    "horovod.spark.lightning.remote": _RANKS,
    "horovod.spark.lightning.util": "Pickle modules with cloudpickle, or use torch.save.",
    "horovod.spark.mpi_run": f"Gloo is the controller, not MPI. {_LAUNCH}",
    "horovod.spark.task.gloo_exec_fn": _LAUNCH,
    "horovod.spark.task.mpirun_exec_fn": f"Gloo is the controller, not MPI. {_LAUNCH}",
    "horovod.spark.task.task_service": _LAUNCH,
    "horovod.spark.tensorflow": (
        "There is no data service of TensorFlow here. Its dispatcher and workers can be started "
        "with hvd_estimators.run and horovod.tensorflow.data.compute_service."
    ),
    "horovod.spark.torch.remote": _RANKS,
    "horovod.spark.torch.util": "Pickle modules with cloudpickle, or use torch.save.",
}
"""Replacements of modules that are left out, by module; submodules are included."""

LEFT_OUT_NAMES: Mapping[str, Mapping[str, str]] = {
    "horovod.spark.common.util": {
        **dict.fromkeys(
            (
                *("check_shape_compatibility", "check_validation"),
                *("data_type_to_numpy", "data_type_to_str", "numpy_type_to_str"),
                *("pyarrow_to_spark_data_type", "spark_scalar_to_python_type"),
                *("get_output_cols", "get_spark_df_output_schema", "to_petastorm_fn"),
            ),
            _TYPES,
        ),
        "get_simple_meta_from_parquet": _PREPARED,
        "host_hash": "socket.gethostname() tells hosts apart; ranks are placed by Spark.",
    },
    "horovod.spark.keras.datamodule": {"NVTabularDataModule": _NVTABULAR},
    "horovod.spark.keras.estimator": dict.fromkeys(
        (
            *("KerasEstimatorParamsReadable", "KerasEstimatorParamsReader"),
            *("KerasEstimatorParamsWritable", "KerasEstimatorParamsWriter"),
        ),
        _SAVING,
    ),
    "horovod.spark.lightning.datamodule": {
        "PetastormDataModule": (
            "data_module='petastorm' reads with Petastorm, which is the default where it can be "
            "imported. For loaders of your own derive from LightningDataModule itself."
        )
    },
    "horovod.spark.lightning.estimator": dict.fromkeys(
        (
            *("TorchEstimatorParamsReadable", "TorchEstimatorParamsReader"),
            *("TorchEstimatorParamsWritable", "TorchEstimatorParamsWriter"),
        ),
        _SAVING,
    ),
    "horovod.spark.task": {"task_exec": _LAUNCH},
    "horovod.spark.torch.datamodule": {"MapIterable": _LOADERS, "NVTabularDataModule": _NVTABULAR},
    "horovod.spark.torch.estimator": dict.fromkeys(
        (
            *("TorchEstimatorParamsReadable", "TorchEstimatorParamsReader"),
            *("TorchEstimatorParamsWritable", "TorchEstimatorParamsWriter"),
        ),
        _SAVING,
    ),
}
"""Replacements of names that existing modules leave out, by module and name."""
