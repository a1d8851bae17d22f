"""`LightningEstimator`: trains a LightningModule on a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_estimators.fitting.run import RunResults
from hvd_estimators.lightning.framework import LightningFramework
from hvd_estimators.lightning.model import LightningModel
from hvd_estimators.params import boolean, integer, keyword_arguments, objects, param
from hvd_estimators.torch import estimator as torch_estimator
from hvd_estimators.torch.serialization import dump_module, load_module, load_trained

if TYPE_CHECKING:
    from hvd_estimators.lightning.signatures import LightningEstimatorSignatures
else:
    LightningEstimatorSignatures = torch_estimator.TorchEstimator


class LightningEstimator(LightningEstimatorSignatures):
    """Spark ML estimator that trains a LightningModule, data-parallel, one process per rank.

    ``fit(df)`` writes the needed columns as Parquet to the store, trains on ``num_proc`` Spark
    tasks with Lightning's Trainer, and returns a `LightningModel`. Runs on the driver.

    ``training_step`` and ``validation_step`` get each batch as a dict of column name to tensor,
    rows first. Tensors have the dtypes of the stored columns, unless ``column_dtypes`` names
    others. A module that reads ``sample_weight_col`` should return ``(weight * loss).mean()``,
    which is the definition that the other estimators use.

    `TorchEstimator` trains a plain ``torch.nn.Module`` with an optimizer and a loss.

    An epoch trains on every row once. Optimizers step with their learning rates multiplied by the
    number of ranks. In automatic and in manual optimization, each step uses the gradient of the
    mean over the global batch. Each rank needs a row in each step and in validation.

    Values that are logged for an epoch are reduced over the ranks by rows, with or without
    ``sync_dist``. Therefore callbacks see the same values on every rank. With a ``ModelCheckpoint``
    that has a ``monitor``, `fit` returns the best weights instead of the last. Its files are
    written to the run's directory in the store.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError
        Before training, if params, columns, shapes, rows, store or cluster are not usable.
    WorkerFailedError
        If a rank fails.
    """

    framework_class = LightningFramework

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
        "Lightning profiler, or 'simple', 'advanced' or 'pytorch'; it writes to the run's logs."
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

    def _trained(self, run_results: RunResults) -> tuple[Any, Any, dict[str, Any]]:
        given = self.getOrDefault("model")
        module, _ = load_trained(run_results.state, lambda: load_module(dump_module(given)))
        return module, None, {}

    def get_model_class(self) -> type[LightningModel]:
        """Return the class of the model that `fit` returns. Subclasses may override it."""
        return LightningModel


TorchEstimator = LightningEstimator
