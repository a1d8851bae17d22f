"""Names of ``horovod.spark`` that this package leaves out, and their replacements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_estimators._util.lazy_imports import lazy_names
from hvd_estimators.exceptions import LeftOutError, did_you_mean

__all__ = ["LEFT_OUT_MODULES", "LEFT_OUT_NAMES", "check_module", "left_out_names"]

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

_OURS = "hvd_estimators.compat.spark"


def check_module(name: str) -> None:
    """Raise `LeftOutError` if a module is left out."""
    for left_out, instead in LEFT_OUT_MODULES.items():
        if name == left_out or name.startswith(f"{left_out}."):
            raise _error(name, instead)


def left_out_names(
    module: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module that replaces one of Horovod's.

    Parameters
    ----------
    module : str
        The module's ``__name__``.
    homes : mapping, optional
        Name to the module that provides the name on first use.

    Raises
    ------
    LeftOutError
        By ``__getattr__``, for names of ``horovod.spark`` that this package leaves out.
    AttributeError
        By ``__getattr__``, for names that ``horovod.spark`` did not have.
    """
    theirs = "horovod.spark" + module.removeprefix(_OURS)
    names = LEFT_OUT_NAMES.get(theirs, {})
    get, listed = lazy_names(module, homes or {})

    def get_or_explain(name: str) -> Any:
        if name in names:
            raise _error(f"{theirs}.{name}", names[name])
        if f"{theirs}.{name}" in LEFT_OUT_MODULES:
            raise _error(f"{theirs}.{name}", LEFT_OUT_MODULES[f"{theirs}.{name}"])
        try:
            return get(name)
        except AttributeError:
            hint = did_you_mean(name, listed())
            raise AttributeError(f"module {theirs!r} has no attribute {name!r}.{hint}") from None

    return get_or_explain, listed


def _error(name: str, instead: str) -> LeftOutError:
    return LeftOutError(f"hvd_estimators has no {name}. {instead}")
