"""Lightning's params. Runs on the driver."""

from __future__ import annotations

from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning.loggers import PROFILERS
from hvd_estimators.params import boolean, integer, keyword_arguments, objects, param
from hvd_estimators.torch.estimator import TorchEstimator


def _profiler(name: str, value: Any) -> Any:
    if isinstance(value, str) and value not in PROFILERS:
        raise ParamError(
            f"{name}: expected a Profiler or one of {', '.join(map(repr, PROFILERS))}, found "
            f"{value!r}."
        )
    return value


class LightningParams(TorchEstimator):
    """Params of Lightning's Trainer and of the module that it trains."""

    callbacks = param("Lightning callbacks.", default=[], convert=objects)
    num_gpus = param(
        "GPUs per rank: 0 or 1. Default: 1 if the rank has a GPU.",
        convert=integer(0),
        accessor="NumGPUs",
    )
    logger = param(
        "Lightning logger, or a list of loggers; they write to the run's logs. Default: "
        "TensorBoard, or CSV files if TensorBoard is not installed. False disables logging. An "
        "MLflow logger writes to the run's logs only if it uses a folder and the store is "
        "local; otherwise it keeps its server or database."
    )
    log_every_n_steps = param(
        "Steps between two records of the loggers.", default=50, convert=integer(1)
    )
    profiler = param(
        "Lightning profiler, or 'simple', 'advanced' or 'pytorch'; it writes to the run's logs.",
        convert=_profiler,
    )
    trainer_args = param(
        "Further arguments of Lightning's Trainer. They replace the estimator's arguments.",
        convert=keyword_arguments,
    )
    data_module = param(
        "Reader of the rows: 'petastorm', 'arrow', a subclass of "
        "hvd_estimators.loading.readers.DataModule, or a LightningDataModule class. Default: "
        "Petastorm if the driver can import it, otherwise PyArrow.",
        type="str | type[Any]",
    )
    loader_num_epochs = param(
        "Epochs that a LightningDataModule's reader reads, passed to it as num_reader_epochs. "
        "Default: no end, like the built-in readers.",
        convert=integer(1),
    )
    debug_data_loader = param("Passed to a LightningDataModule.", default=False, convert=boolean)
    train_async_data_loader_queue_size = param(
        "Passed to a LightningDataModule. The built-in readers read a bounded number of bytes "
        "ahead."
    )
    val_async_data_loader_queue_size = param(
        "Passed to a LightningDataModule; see train_async_data_loader_queue_size."
    )
