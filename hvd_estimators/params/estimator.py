"""Params of all estimators, in one mixin for each purpose. Runs on the driver."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.loading.readers import check_data_module
from hvd_estimators.loading.shuffle import SHUFFLE_BUFFER_BYTES
from hvd_estimators.params import (
    DeclaredParams,
    boolean,
    column_names,
    integer,
    number,
    numbers,
    objects,
    one_of,
    param,
    shapes,
    string,
)
from hvd_estimators.training.buffer_reduction import parse_buffer_reduction
from hvd_estimators.training.monitoring import check_monitor, mode_of
from hvd_estimators.training.spec import CheckpointOptions

__all__ = [
    "CheckpointParams",
    "ColumnParams",
    "RankParams",
    "ReadingParams",
    "TrainingParams",
    "WritingParams",
]

_COLUMNS = (
    *("feature_cols", "label_cols", "sample_weight_col"),
    *("categorical_cols", "continuous_cols"),
)


class ColumnParams(DeclaredParams):
    """Params for feature, label and sample weight columns."""

    feature_cols = param("Input columns, in the order of the model's inputs.", convert=column_names)
    label_cols = param(
        "Label columns, in the order of the model's outputs; [] to train without labels.",
        convert=column_names,
    )
    sample_weight_col = param("Column of the rows' weights.", convert=string)
    featuresCol = param(
        "Another name of feature_cols, for a single one.",
        convert=string,
        accessor="FeaturesCol",
        stands_for="feature_cols",
    )
    labelCol = param(
        "Another name of label_cols, for a single one.",
        convert=string,
        accessor="LabelCol",
        stands_for="label_cols",
    )
    weightCol = param(
        "Another name of sample_weight_col.",
        convert=string,
        accessor="WeightCol",
        stands_for="sample_weight_col",
    )
    label_shapes = param(
        "Shape of each label: of one row, or with -1 for the rows of a batch first.", convert=shapes
    )
    continuous_cols = param("Continuous columns, passed to a data module.", convert=column_names)
    categorical_cols = param("Categorical columns, passed to a data module.", convert=column_names)

    def _all_feature_cols(self) -> list[str]:
        """Return the input columns, followed by the additional columns of a data module."""
        wanted = [
            *self.getOrDefault("feature_cols"),
            *(self.getOrDefault("categorical_cols") or []),
            *(self.getOrDefault("continuous_cols") or []),
        ]
        return list(dict.fromkeys(wanted))

    def _needed_columns(self) -> list[str]:
        """Return the columns that training reads."""
        weight = self.getOrDefault("sample_weight_col")
        wanted = [*self._all_feature_cols(), *self.getOrDefault("label_cols")]
        return list(dict.fromkeys([*wanted, *([weight] if weight else [])]))

    @contextlib.contextmanager
    def _naming_params(self) -> Iterator[None]:
        """Add the param that names a column to errors about this column."""
        try:
            yield
        except (ColumnError, DataError) as error:
            message = str(error)
            for param in _COLUMNS:
                given = self.getOrDefault(param) or []
                names = [given] if isinstance(given, str) else given
                if any(f"olumn {name!r}" in message for name in names):
                    if not re.match(r"\w+:", message):
                        error.args = (f"{param}: {message}", *error.args[1:])
                    break
            raise

    def _text_cols(self) -> Mapping[str, bool]:
        """Return the feature columns that may be text; the value is True if bytes are text, too.

        Override this hook for a framework whose models accept text.
        """
        return {}


def _compressor(name: str, value: Any) -> Any:
    if not all(callable(getattr(value, part, None)) for part in ("compress", "decompress")):
        raise ParamError(
            f"{name}: expected a compressor of Horovod's, found {value!r}. Set one such as "
            "horovod.torch.Compression.fp16."
        )
    return value


class TrainingParams(DeclaredParams):
    """Params for the model, optimizer, loss and duration of training."""

    model = param("The model to train. Required.")
    optimizer = param("The optimizer. Its learning rate is for one rank.")
    learning_rate = param(
        "Learning rate of one rank, instead of the optimizer's (in all its groups of "
        "parameters). A LightningModule has to have it as learning_rate or lr, itself or in its "
        "hparams, as Lightning's own tuner wants it.",
        convert=number(0),
    )
    scale_learning_rate = param(
        "Multiply the learning rate by the number of ranks for training.",
        default=True,
        convert=boolean,
    )
    loss = param("A loss function, or a list with one per label.")
    loss_weights = param("Weight of each label's loss. Default: 1 / labels.", convert=numbers)
    metrics = param("Metrics to measure in training and validation.", default=[])
    callbacks = param(
        "Objects whose methods are called on every rank, with keyword arguments: "
        "on_train_begin(module, optimizer), on_epoch_begin(epoch), on_epoch_end(epoch, logs), "
        "on_train_end(), as far as they have them. What state_dict() returns, tensors and plain "
        "values, is kept with the run; load_state_dict(state) gets it after on_train_begin() where "
        "a run goes on (within an epoch after on_epoch_begin(), which is called again). Of a "
        "callback without state_dict(), what it holds in its attributes and has these two methods "
        "is kept: schedulers, for example.",
        default=[],
        convert=objects,
    )
    buffer_reduction = param(
        "Buffer to how it is reduced over the ranks at the end of each epoch and before a "
        "validation: 'mean', 'max', 'min', 'sum' (of what each rank has added) or 'rank0'. For "
        "buffers that the model computes from its batches; {'running_max': 'max'} is each buffer "
        "of this name. In Keras the name is that of a variable that is not trained. Default: "
        "statistics of batch normalization are averaged; other buffers are rank 0's in torch and "
        "Lightning, and averaged in Keras.",
        default={},
        convert=parse_buffer_reduction,
    )
    gradient_compression = param("Horovod compressor of gradients.", convert=_compressor)
    batch_size = param("Rows of a batch, on each rank.", default=32, convert=integer(1))
    val_batch_size = param(
        "Rows of a validation batch, on each rank. Default: batch_size.", convert=integer(1)
    )
    epochs = param("Epochs of the whole run.", default=1, convert=integer(1))
    resume_stopped = param(
        "Whether to go on with a run that a callback has stopped early, as far as epochs says. "
        "Otherwise its model is returned as it is. Leave out or change what has stopped it.",
        default=False,
        convert=boolean,
    )
    train_steps_per_epoch = param(
        "Batches of an epoch on each rank. Default: as many as hold every row once.",
        convert=integer(1),
    )
    validation_steps_per_epoch = param(
        "Validation batches of an epoch on each rank. Default: as many as hold every row once.",
        convert=integer(1),
    )
    backward_passes_per_step = param(
        "Batches whose gradients are averaged before one step of the optimizer.",
        default=1,
        convert=integer(1),
    )
    terminate_on_nan = param(
        "Whether to look after each optimizer step if a loss or a parameter is NaN or infinite, "
        "and to fail then, on all ranks, with a NotFiniteError that names step and parameter. The "
        "checkpoints are of steps before.",
        default=False,
        convert=boolean,
    )
    random_seed = param(
        "Seed of the validation split, the rows' order and the framework.", convert=integer(0)
    )
    dry_run = param(
        "Whether the driver tries model and loss on a few rows before training, on copies, so that "
        "shapes that do not fit end fit() early. What cannot run there is left to the ranks.",
        default=True,
        convert=boolean,
    )

    def _check_loss_weights(self, labels: int) -> None:
        """Check that there are as many loss weights as labels."""
        weights = self.getOrDefault("loss_weights")
        if isinstance(weights, list) and len(weights) != labels:
            raise ParamError(
                f"loss_weights: expected one per label, {labels}, found {len(weights)}."
            )


_LEAST_BUFFER_BYTES = 2**20


class ReadingParams(DeclaredParams):
    """Params for reading, shuffling and caching rows."""

    shuffle_buffer_size = param(
        "Bytes of rows that each rank holds for shuffling; as much again may go to row groups that "
        f"are read at the same time. Default: {SHUFFLE_BUFFER_BYTES}.",
        convert=integer(0),
        accessor="ShufflingBufferSize",
        aliases=["ShuffleBufferSize"],
    )
    shuffle = param("Whether training rows come in random order.", default=True, convert=boolean)
    train_reader_num_workers = param(
        "Readers that work in parallel.",
        default=2,
        convert=integer(1),
        accessor="TrainReaderNumWorker",
        aliases=["TrainReaderNumWorkers"],
    )
    val_reader_num_workers = param(
        "Readers of validation rows that work in parallel.",
        default=2,
        convert=integer(1),
        accessor="ValReaderNumWorker",
        aliases=["ValReaderNumWorkers"],
    )
    reader_pool_type = param(
        "How readers work in parallel: 'thread', 'process' or 'dummy' (not at all).",
        default="thread",
        convert=one_of("thread", "process", "dummy"),
    )
    inmemory_cache_all = param(
        "Keep each rank's rows in memory after the first epoch.",
        default=False,
        convert=boolean,
        accessor="InMemoryCacheAll",
    )
    cache_type = param(
        "'local-disk' keeps what is read from a remote store on the rank's disk, for the epochs "
        "that follow, and deletes it at the end. Petastorm only.",
        default="null",
        convert=one_of("null", "local-disk"),
    )
    cache_location = param(
        "Directory, on every machine, of the disk cache. Default: that of temporary files.",
        convert=string,
    )
    cache_size_limit = param(
        "Bytes, about, that each rank keeps in the disk cache.",
        default=10 * 2**30,
        convert=integer(1),
    )
    data_module = param(
        "What reads the rows: 'petastorm', 'arrow', or a class derived from "
        "hvd_estimators.loading.readers.DataModule. Default: Petastorm where it can be imported, "
        "PyArrow otherwise.",
    )

    def _shuffle_buffer_bytes(self) -> int:
        given: int | None = self.getOrDefault("shuffle_buffer_size")
        return SHUFFLE_BUFFER_BYTES if given is None else given

    def _check_reading(self) -> None:
        """Check that the data module is usable and the shuffle buffer is large enough."""
        module = self.getOrDefault("data_module")
        check_data_module(module)
        if self.getOrDefault("cache_type") != "null" and module != "petastorm":
            raise ParamError(
                f"cache_type: only Petastorm caches on disk, found data_module={module!r}. Set "
                "data_module='petastorm', or leave cache_type out."
            )
        buffer_bytes = self._shuffle_buffer_bytes()
        if buffer_bytes < _LEAST_BUFFER_BYTES:
            raise ParamError(
                f"shuffle_buffer_size: expected bytes, {_LEAST_BUFFER_BYTES} or more, found "
                f"{buffer_bytes}, which may have been meant as rows. Set bytes, or leave it out "
                f"for {SHUFFLE_BUFFER_BYTES}; shuffle=False turns shuffling off."
            )


class WritingParams(DeclaredParams):
    """Params for selecting validation rows and for writing the data."""

    validation = param(
        "Fraction of the rows to validate on (chosen at random, by the seed), or name of a column "
        "that is true, or above zero, for them."
    )
    shuffle_on_write = param(
        "Write a DataFrame's rows in random order; without effect if shuffle is False. If this is "
        "False they are written faster, and mixed as they are read, as far as memory allows.",
        default=True,
        convert=boolean,
    )
    partitions_per_process = param(
        "At most as many Parquet files per rank are written.", default=10, convert=integer(1)
    )
    compress_sparse_cols = param(
        "Write vectors as indices and values of what is not zero.", default=False, convert=boolean
    )
    check_finite = param(
        "Refuse NaN and infinity when the rows are written.", default=False, convert=boolean
    )


class CheckpointParams(DeclaredParams):
    """Params for writing, keeping and ranking checkpoints."""

    checkpoint_every_n_steps = param(
        "Optimizer steps, counted over the whole run, after which a checkpoint is written within "
        "an epoch, too: a run that is interrupted loses no more than these. They count for "
        "keep_checkpoints as others do. Default: at the end of each epoch only.",
        convert=integer(1),
    )
    keep_checkpoints = param(
        "How many of a run's newest checkpoints are kept. The best by checkpoint_monitor is kept, "
        "too. If the newest is damaged, a fit goes on from the one before.",
        default=2,
        convert=integer(1),
    )
    checkpoint_monitor = param(
        "What tells which checkpoint is best: a name of getHistory(), with 'val_' before it for "
        "validation. Default: 'val_loss', or 'loss' without validation.",
        convert=string,
    )
    checkpoint_mode = param(
        "Whether less ('min') or more ('max') of checkpoint_monitor is better; 'auto' tells by its "
        "name.",
        default="auto",
        convert=one_of("auto", "min", "max"),
    )

    def _checkpoint_options(self, framework: str) -> CheckpointOptions:
        """Return the checkpoint options for the ranks."""
        get = self.getOrDefault
        return CheckpointOptions(
            framework,
            get("keep_checkpoints"),
            self._monitor(),
            get("checkpoint_mode"),
            get("checkpoint_every_n_steps"),
        )

    def _monitor(self) -> str | None:
        """Return the monitored metric. Subclasses override this to translate old metric names."""
        monitor: str | None = self.getOrDefault("checkpoint_monitor")
        return monitor

    def _check_checkpoints(self) -> None:
        """Check that the monitored metric has a direction: less or more is better."""
        monitor = self._monitor()
        if monitor is not None:
            mode_of(monitor, self.getOrDefault("checkpoint_mode"))

    def _check_monitor(self, names: Sequence[str] | None, has_validation: bool) -> None:
        """Check that the monitored metric is measured, if the measured metrics are known.

        Parameters
        ----------
        names : sequence of str or None
            Names of the training metrics; None if only the ranks know them.
        has_validation : bool
            Whether there is validation.

        Raises
        ------
        ParamError
            If the metric is not measured.
        """
        monitor = self._monitor()
        if monitor is None:
            return
        if monitor.startswith("val_") and not has_validation:
            raise ParamError(
                f"checkpoint_monitor: found {monitor!r}, and there are no rows for validation. Set "
                "validation, or a metric of training."
            )
        if names is not None:
            of_validation = [f"val_{name}" for name in names] if has_validation else []
            check_monitor(monitor, [*names, *of_validation])


class RankParams(DeclaredParams):
    """Params for the number of ranks, their backend, resources and output."""

    num_proc = param(
        "Number of ranks. Default, and 0: as many as there are task slots.", convert=integer(0)
    )
    max_restarts = param(
        "How often the ranks are launched again where one is lost: killed, without its executor, "
        "its peers or its store; or stalled: stopped for a minute, or holding up the others for "
        "half an hour (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS in the ranks' environment sets another "
        "limit for both, 0 none for the latter); or all of them without a batch or an end of an "
        "epoch for four hours (HVD_ESTIMATORS_HANG_SECONDS). They go on from the run's newest "
        "checkpoint. Task slots for them are waited for as run_elastic does "
        "(HOROVOD_ELASTIC_TIMEOUT, 600 seconds). An exception of the training code ends the fit. "
        "A run_id whose driver was killed on another machine is waited for, for five minutes.",
        default=0,
        convert=integer(0),
    )
    min_num_proc = param(
        "Fewest ranks of a restart, where there are fewer task slots than num_proc; they train "
        "what num_proc ranks do. Default: num_proc.",
        convert=integer(1),
    )
    backend = param(
        "What runs the ranks, instead of num_proc: a Backend, or any object with run(fn, args, "
        "kwargs, env) and num_processes(). It is not saved with the estimator.",
        saved=False,
    )
    resource_profile = param(
        "What the tasks of ranks ask for, a pyspark.resource.ResourceProfile, so that training "
        "gets GPUs that preparing the data did not hold. It is not saved with the estimator.",
        saved=False,
    )
    gpus_per_task = param(
        "GPUs of each rank's task. Default: spark.task.resource.gpu.amount.", convert=integer(1)
    )
    cpus_per_task = param(
        "Cores of each rank's task. Default: spark.task.cpus.", convert=integer(1)
    )
    use_gpu = param("Train on GPUs where ranks have one.", default=True, convert=boolean)
    mp_start_method = param(
        "Start method of multiprocessing in the ranks: 'fork', 'forkserver' or 'spawn'.",
        convert=one_of("fork", "forkserver", "spawn"),
    )
    verbose = param(
        "0 is silent, 1 shows progress, 2 also what the ranks print.", default=1, convert=integer(0)
    )

    def _get_or_create_backend(self) -> Any:
        """Return the backend that is set, or a backend with ``num_proc`` Spark tasks.

        Subclasses may override this method and return any object with ``run(fn, args, kwargs,
        env)`` and ``num_processes()``.
        """
        backend, num_proc = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        names = ("resource_profile", "gpus_per_task", "cpus_per_task")
        resources = {name: self.getOrDefault(name) for name in names}
        if backend is None:
            return SparkBackend(num_proc, verbose=self.getOrDefault("verbose"), **resources)
        for name, value in {"num_proc": num_proc, **resources}.items():
            if value is not None:
                raise ParamError(
                    f"backend and {name} are both set. Set {name} on the backend only."
                )
        return backend
