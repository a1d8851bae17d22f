"""Modules and names of ``horovod.spark`` that this package leaves out, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_estimators.exceptions import LeftOutError

__all__ = ["LEFT_OUT_MODULES", "LEFT_OUT_NAMES", "check_module", "check_name"]

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


def check_module(name: str) -> None:
    """Raise `LeftOutError` if a module is left out."""
    for left_out, instead in LEFT_OUT_MODULES.items():
        if name == left_out or name.startswith(f"{left_out}."):
            raise _error(name, instead)


def check_name(module: str, name: str) -> None:
    """Raise `LeftOutError` if a name of a module is left out, or is a module that is left out."""
    instead = LEFT_OUT_NAMES.get(module, {}).get(name) or LEFT_OUT_MODULES.get(f"{module}.{name}")
    if instead is not None:
        raise _error(f"{module}.{name}", instead)


def _error(name: str, instead: str) -> LeftOutError:
    return LeftOutError(f"hvd_estimators has no {name}. {instead}")
