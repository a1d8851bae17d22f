"""Table of the public names of ``horovod.spark``: homes in this package, or replacements.

`hvd_estimators.compat` serves these modules. Plain data; imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_HELPERS = "hvd_estimators.compat.helpers"
_API = "hvd_estimators.launch.api"
_DATASETS = "hvd_estimators.prepare.datasets"
_PETASTORM = "hvd_estimators.loading.petastorm"
_STORE = "hvd_estimators.store"

_BASES = {
    "EstimatorParams": "hvd_estimators.estimator",
    "HorovodEstimator": "hvd_estimators.estimator",
    "HorovodModel": "hvd_estimators.model",
}
_KERAS = {
    "KerasEstimator": "hvd_estimators.compat.keras",
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

_LAUNCH = "Call hvd_estimators.run or run_elastic, which start the ranks."
_RANKS = (
    "It was the ranks' program, which fit() now sends. To change the ranks' training, set "
    "train_minibatch_fn, callbacks, data_module or transformation_fn."
)
_SAVING = (
    "Use write(), save(path) and load(path), which store estimators and models as folders. "
    "Subclasses inherit these methods."
)
_LOADERS = (
    "Set the estimator's data_module to 'petastorm', 'arrow' or a class derived from "
    "hvd_estimators.loading.readers.DataModule. With Lightning, it can also be a "
    "LightningDataModule class with its own DataLoaders."
)
_NVTABULAR = "NVTabular is no longer developed. " + _LOADERS
_TYPES = "fit() and transform() determine types and shapes."
_PREPARED = (
    "hvd_estimators.get_dataset_properties returns the rows and columns of a prepared dataset, "
    "and list_prepared_data lists all of them."
)

LEFT_OUT_MODULES: Mapping[str, str] = {
    "horovod.spark.common.cache": _PREPARED,
    "horovod.spark.common.serialization": _SAVING,
    "horovod.spark.data_loaders": _LOADERS,
    "horovod.spark.driver": _LAUNCH,
    "horovod.spark.gloo_run": _LAUNCH,
    "horovod.spark.keras.bare": "Models of bare Keras need Keras 2. Create them with Keras 3.",
    "horovod.spark.keras.optimizer": "Estimators accept optimizers of Keras 3 unchanged.",
    "horovod.spark.keras.remote": _RANKS,
    "horovod.spark.keras.tensorflow": "Estimators accept optimizers of Keras 3 unchanged.",
    "horovod.spark.keras.util": _RANKS,
    "horovod.spark.lightning.legacy": "TorchEstimator trains a torch.nn.Module.",
    "horovod.spark.lightning.remote": _RANKS,
    "horovod.spark.lightning.util": "Pickle modules with cloudpickle, or use torch.save.",
    "horovod.spark.mpi_run": f"Gloo is the controller, not MPI. {_LAUNCH}",
    "horovod.spark.task.gloo_exec_fn": _LAUNCH,
    "horovod.spark.task.mpirun_exec_fn": f"Gloo is the controller, not MPI. {_LAUNCH}",
    "horovod.spark.task.task_service": _LAUNCH,
    "horovod.spark.tensorflow": (
        "This package has no TensorFlow data service. Start its dispatcher and workers with "
        "hvd_estimators.run and horovod.tensorflow.data.compute_service."
    ),
    "horovod.spark.torch.remote": _RANKS,
    "horovod.spark.torch.util": "Pickle modules with cloudpickle, or use torch.save.",
}
"""Replacements of modules that are left out, by module; submodules are included."""

_PERSISTENCE_SUFFIXES = ("Readable", "Reader", "Writable", "Writer")

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
        "host_hash": "Use socket.gethostname() to identify hosts; Spark places the ranks.",
    },
    "horovod.spark.keras.datamodule": {"NVTabularDataModule": _NVTABULAR},
    "horovod.spark.keras.estimator": {
        f"KerasEstimatorParams{suffix}": _SAVING for suffix in _PERSISTENCE_SUFFIXES
    },
    "horovod.spark.lightning.datamodule": {
        "PetastormDataModule": (
            "Set data_module='petastorm' to read with Petastorm, the default if it is installed. "
            "For your own loaders, derive a class from LightningDataModule."
        )
    },
    "horovod.spark.lightning.estimator": {
        f"TorchEstimatorParams{suffix}": _SAVING for suffix in _PERSISTENCE_SUFFIXES
    },
    "horovod.spark.task": {"task_exec": _LAUNCH},
    "horovod.spark.torch.datamodule": {"MapIterable": _LOADERS, "NVTabularDataModule": _NVTABULAR},
    "horovod.spark.torch.estimator": {
        f"TorchEstimatorParams{suffix}": _SAVING for suffix in _PERSISTENCE_SUFFIXES
    },
}
"""Replacements of names that existing modules leave out, by module and name."""
