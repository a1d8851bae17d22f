"""Params of all estimators. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasWeightCol

from hvd_estimators._util.documents import to_python
from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.rank.preemption import callable_check
from hvd_estimators.loading.shuffle import SHUFFLE_BUFFER_BYTES
from hvd_estimators.loggers import Logger
from hvd_estimators.params import (
    boolean,
    column_names,
    input_columns,
    integer,
    keyword_arguments,
    number,
    numbers,
    objects,
    one_of,
    param,
    shapes,
    string,
)
from hvd_estimators.params.model import SharedParams
from hvd_estimators.store import Store
from hvd_estimators.store.base import as_store
from hvd_estimators.training.collectives_choice import COLLECTIVES
from hvd_estimators.training.shard_state import parse_buffer_reduction


def _compressor(name: str, value: Any) -> Any:
    if not all(callable(getattr(value, part, None)) for part in ("compress", "decompress")):
        raise ParamError(
            f"{name}: expected a compressor of Horovod's, found {value!r}. Set one such as "
            "horovod.torch.Compression.fp16."
        )
    return value


def _store(name: str, value: Store | str | PathLike[str]) -> Store:
    return as_store(value)


def _class_weights(name: str, value: Mapping[int, float]) -> dict[int, float]:
    """Accept a dict of class numbers to weights."""
    expected = f"{name}: expected a dict of class number (0, 1, ...) to weight"
    if not isinstance(value, Mapping):
        raise ParamError(f"{expected}, found {value!r}.")
    weights = {}
    for key, weight in to_python(dict(value)).items():
        if not isinstance(key, int) or isinstance(key, bool) or key < 0:
            raise ParamError(f"{expected}, found the class {key!r}.")
        weights[key] = number(0)(f"{name}[{key}]", weight)
    return weights


def _loggers(name: str, value: Iterable[Logger]) -> list[Logger]:
    """Accept a list of loggers."""
    loggers = objects(name, value)
    for entry in loggers:
        if not isinstance(entry, Logger):
            hint = (
                f" Set an object of the class: {entry.__name__}(...)."
                if isinstance(entry, type)
                else " Set WandbLogger(...), CometLogger(...), or your own subclass of Logger."
            )
            raise ParamError(
                f"{name}: expected objects of subclasses of hvd_estimators.loggers.Logger, found "
                f"{entry!r}.{hint}"
            )
    return loggers


class EstimatorParams(SharedParams, HasFeaturesCol, HasLabelCol, HasWeightCol):
    """Params of all estimators."""

    # The model, and the duration of training

    model = param(
        "The model to train, or a function or class that returns it. Required. fit() calls a "
        "function with model_args as keyword arguments, and seeds the initial weights with "
        "random_seed if that is set."
    )
    model_args = param(
        "Dict of keyword arguments for a model that is a function or class. A grid over it tries "
        "several models.",
        default={},
        convert=keyword_arguments,
    )
    optimizer = param(
        "The optimizer. Its learning rate is for one rank. For a torch model, also a function or "
        "class that takes the model's parameters and returns the optimizer."
    )
    learning_rate = param(
        "Learning rate of one rank. It replaces the optimizer's rate in all parameter groups. A "
        "LightningModule has its rate in configure_optimizers().",
        convert=number(0),
    )
    scale_learning_rate = param(
        "Whether training multiplies the learning rate by the number of ranks.",
        default=True,
        convert=boolean,
    )
    loss = param("A loss function, or a list with one per label.")
    loss_weights = param(
        "Weight of each label's loss. Default: 1 / number of labels.", convert=numbers
    )
    metrics = param("Metrics of training and validation.", default=[])
    callbacks = param(
        "Objects whose methods every rank calls with keyword arguments: on_train_begin(module, "
        "optimizer), on_epoch_begin(epoch), on_epoch_end(epoch, logs), on_train_end(). All "
        "methods are optional. Checkpoints contain the tensors and plain values that "
        "state_dict() returns. A resumed run calls load_state_dict(state) after "
        "on_train_begin(), and in the middle of an epoch after on_epoch_begin(), which is "
        "called again. For a callback without state_dict(), checkpoints contain the state of "
        "its attributes that have both methods, such as schedulers.",
        default=[],
        convert=objects,
    )
    buffer_reduction = param(
        "Dict of a buffer's name to its reduction over the ranks: 'mean', 'max', 'min', 'sum' "
        "(of the changes on each rank) or 'rank0'. Ranks reduce at the end of each epoch and "
        "before a validation. Set it for buffers that the model computes from its batches: "
        "{'running_max': 'max'} applies to each buffer of this name. Default: batch normalization "
        "is averaged, and other buffers are rank 0's. Keras has no reductions but the mean.",
        default={},
        convert=parse_buffer_reduction,
    )
    gradient_compression = param("Horovod compressor of gradients.", convert=_compressor)
    batch_size = param("Rows per batch and rank.", default=32, convert=integer(1))
    val_batch_size = param(
        "Rows per validation batch and rank. Default: batch_size.", convert=integer(1)
    )
    epochs = param("Total epochs of the run.", default=1, convert=integer(1))
    resume_stopped = param(
        "Whether to resume a run that a callback has stopped early, up to epochs. Otherwise "
        "fit() returns the run's model. Remove or change the callback that stopped it.",
        default=False,
        convert=boolean,
    )
    train_steps_per_epoch = param(
        "Batches per epoch and rank. Default: enough for each row once.", convert=integer(1)
    )
    validation_steps_per_epoch = param(
        "Validation batches per epoch and rank. Default: enough for each row once.",
        convert=integer(1),
    )
    backward_passes_per_step = param(
        "Batches whose gradients are averaged before each optimizer step.",
        default=1,
        convert=integer(1),
    )
    terminate_on_nan = param(
        "Whether to check after each optimizer step that the loss and all parameters are "
        "finite. If they are not, all ranks fail with a NotFiniteError that names step and "
        "parameter. Checkpoints are from earlier steps.",
        default=False,
        convert=boolean,
    )
    random_seed = param(
        "Seed of the validation split, the order of rows and the framework.", convert=integer(0)
    )
    dry_run = param(
        "Whether the driver tries copies of the model and loss on a few rows before training, "
        "so that wrong shapes end fit() early. Code that cannot run on the driver is tried only "
        "on the ranks.",
        default=True,
        convert=boolean,
    )
    class_weight = param(
        "Dict of class number to weight, for a single label of class numbers or one-hot rows. "
        "In training, a row's weight is its class's weight times sample_weight_col. "
        "Other classes have the weight 1.",
        convert=_class_weights,
    )

    # Columns

    feature_cols = param(
        "Input columns, in the order of the model's inputs. A list of columns within the list is "
        "one input: a matrix of these columns of numbers, named 'features' where inputs have "
        "names. A dict of one name to such a list names it.",
        default=["features"],
        convert=input_columns,
    )
    label_cols = param(
        "Label columns, in the order of the model's outputs. Use [] to train without labels.",
        default=["label"],
        convert=column_names,
    )
    sample_weight_col = param("Column with the weight of each row.", convert=string)
    featuresCol = param(
        "Another name of feature_cols, for a single column.",
        default="features",
        convert=string,
        accessor="FeaturesCol",
        stands_for="feature_cols",
    )
    labelCol = param(
        "Another name of label_cols, for a single column.",
        default="label",
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
        "Shape of each label: the shape of one row, or of a batch with -1 as its first dimension.",
        convert=shapes,
    )
    continuous_cols = param("Continuous columns, passed to a data module.", convert=column_names)
    categorical_cols = param("Categorical columns, passed to a data module.", convert=column_names)

    # Ranks

    num_proc = param(
        "Number of ranks. Default, and 0: the number of task slots.", convert=integer(0)
    )
    max_restarts = param(
        "Maximum number of relaunches after a rank is lost or stalls. A rank is lost if it is "
        "killed, or loses its executor, its peers or its store. A rank stalls if it is stopped "
        "for a minute, or delays the others for half an hour "
        "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS in the ranks' environment sets both limits; 0 "
        "disables the second). A relaunch also follows if no rank has finished a batch or an "
        "epoch for four hours (HVD_ESTIMATORS_HANG_SECONDS). Relaunched ranks resume from the "
        "run's newest checkpoint. They wait for task slots like run_elastic "
        "(HOROVOD_ELASTIC_TIMEOUT, 600 seconds). An exception of the training code ends the "
        "fit. If the run's driver was killed on another machine, fit() waits five minutes for "
        "its run_id.",
        default=0,
        convert=integer(0),
    )
    preemption_check = param(
        "Function without arguments that returns True once the machine on which it runs is about "
        "to go. Each rank calls it every two seconds. When one rank's returns True, all ranks save "
        "a checkpoint after their step and end; with max_restarts, they are relaunched from there. "
        "SIGTERM and Spark's decommissioning (spark.decommission.enabled) need no function.",
        convert=callable_check,
        type="Callable[[], Any]",
    )
    min_num_proc = param(
        "Minimum number of ranks of a relaunch that finds fewer than num_proc task slots. They "
        "do the work of num_proc ranks. Default: num_proc.",
        convert=integer(1),
    )
    backend = param(
        "Object that runs the ranks, instead of num_proc: a Backend, or any object with run(fn, "
        "args, kwargs, env) and num_processes(). It is not saved with the estimator.",
        saved=False,
    )
    resource_profile = param(
        "Resources of the ranks' tasks, as a pyspark.resource.ResourceProfile. So only training "
        "holds GPUs, not the preparation of data. It is not saved with the estimator.",
        type="ResourceProfile",
        saved=False,
    )
    gpus_per_task = param(
        "GPUs of each rank's task. Default: spark.task.resource.gpu.amount.", convert=integer(1)
    )
    cpus_per_task = param(
        "Cores of each rank's task. Default: spark.task.cpus.", convert=integer(1)
    )
    use_gpu = param("Whether ranks with a GPU train on it.", default=True, convert=boolean)
    mp_start_method = param(
        "Start method of multiprocessing in the ranks: 'fork', 'forkserver' or 'spawn'.",
        convert=one_of("fork", "forkserver", "spawn"),
    )
    verbose = param(
        "0 shows nothing, 1 shows progress, 2 also shows the output of ranks.",
        default=1,
        convert=integer(0),
    )
    collectives = param(
        "Library that reduces gradients and values over the ranks: 'horovod', or 'torch' for "
        "torch.distributed, with Gloo on CPUs and NCCL on GPUs (always Gloo for Keras on "
        "TensorFlow). 'auto' stands for Horovod if the driver can import Horovod for its torch or "
        "TensorFlow, and for 'torch' otherwise.",
        default="auto",
        convert=one_of(*COLLECTIVES),
    )

    # Store and run

    store = param(
        "Store that keeps datasets, checkpoints and logs, or its path or URL. Default: Spark's "
        "configuration spark.hvdEstimators.store. Without it, a local master gets a temporary "
        "folder, which is deleted when the program ends.",
        convert=_store,
    )
    run_id = param(
        "Name of the run; one that the store holds is resumed. Default: a new name.", convert=string
    )

    log_to_mlflow = param(
        "Whether a fit logs its params, the metrics of each epoch and the fitted model to MLflow, "
        "if the thread that calls fit() has an active run. Each fit of a grid gets a child run, "
        "without its model.",
        default=True,
        convert=boolean,
    )
    loggers = param(
        "Loggers of experiment trackers, such as hvd_estimators.loggers.WandbLogger, CometLogger "
        "and your own subclasses of Logger. The driver logs losses, metrics, learning rate and "
        "rows per second of each epoch, and the hyperparameters.",
        default=[],
        convert=_loggers,
    )

    # Checkpoints

    checkpoint_every_n_steps = param(
        "Optimizer steps between two checkpoints within epochs, counted over all fits of the run. "
        "An interrupted run loses at most this many steps. These checkpoints count for "
        "keep_checkpoints. Default: checkpoints only at the end of each epoch.",
        convert=integer(1),
    )
    keep_checkpoints = param(
        "Number of a run's newest checkpoints to keep, in addition to the best one by "
        "checkpoint_monitor. If the newest is damaged, a fit resumes from the one before it.",
        default=2,
        convert=integer(1),
    )
    checkpoint_monitor = param(
        "Metric that ranks the checkpoints: a name of getHistory(), with the prefix 'val_' for "
        "validation. Default: 'val_loss', or 'loss' without validation.",
        convert=string,
    )
    checkpoint_mode = param(
        "Whether a lower ('min') or higher ('max') value of checkpoint_monitor is better; "
        "'auto' decides by its name.",
        default="auto",
        convert=one_of("auto", "min", "max"),
    )

    # Writing the data

    validation = param(
        "Fraction of the rows for validation, drawn at random with random_seed; or the name of "
        "a column that is true, or above zero, for validation rows; or a DataFrame of these rows.",
        type="float | str | DataFrame",
    )
    shuffle_on_write = param(
        "Whether a DataFrame's rows are written in random order; no effect if shuffle is False. "
        "With False, writing is faster, and rows are only shuffled in memory when they are "
        "read.",
        default=True,
        convert=boolean,
    )
    partitions_per_process = param(
        "Maximum number of written Parquet files per rank; one for each partition if rows are not "
        "shuffled when written.",
        default=10,
        convert=integer(1),
    )
    compress_sparse_cols = param(
        "Whether vectors are written as indices and values of their nonzero elements.",
        default=False,
        convert=boolean,
    )
    check_finite = param(
        "Whether NaN and infinity are rejected when rows are written.",
        default=False,
        convert=boolean,
    )

    # Reading the data

    shuffle_buffer_size = param(
        "Bytes of rows that each rank holds for shuffling; as much again may go to row groups that "
        f"are read at the same time. Default: {SHUFFLE_BUFFER_BYTES}.",
        convert=integer(0),
        accessor="ShufflingBufferSize",
        aliases=["ShuffleBufferSize"],
    )
    shuffle = param("Whether training rows come in random order.", default=True, convert=boolean)
    train_reader_num_workers = param(
        "Parallel readers of training rows, per rank.",
        default=2,
        convert=integer(1),
        accessor="TrainReaderNumWorker",
        aliases=["TrainReaderNumWorkers"],
    )
    val_reader_num_workers = param(
        "Parallel readers of validation rows, per rank.",
        default=2,
        convert=integer(1),
        accessor="ValReaderNumWorker",
        aliases=["ValReaderNumWorkers"],
    )
    reader_pool_type = param(
        "Kind of parallel readers: 'thread', 'process' (transformations run in processes), or "
        "'dummy' (not parallel).",
        default="thread",
        convert=one_of("thread", "process", "dummy"),
    )
    inmemory_cache_all = param(
        "Whether each rank keeps its rows in memory after the first epoch.",
        default=False,
        convert=boolean,
        accessor="InMemoryCacheAll",
    )
    local_cache_dir = param(
        "Folder on each machine that caches what ranks read of a remote store, for later epochs "
        "and fits, except footers and files of up to 64 KiB. Default: no cache.",
        convert=string,
    )
    local_cache_size = param(
        "Approximate maximum size of a machine's cache in local_cache_dir, in bytes.",
        default=10 * 2**30,
        convert=integer(1),
    )
    data_module = param(
        "Reader of the rows: 'petastorm', 'arrow', or a subclass of "
        "hvd_estimators.loading.readers.DataModule. Default: Petastorm if the driver can "
        "import it, otherwise PyArrow.",
        type="str | type[Any]",
    )
