"""Private names of other packages that this one uses where nothing public will do."""

from __future__ import annotations

from typing import NamedTuple


class Private(NamedTuple):
    """Names of a class or module.

    Attributes
    ----------
    owner : str
        The module, or class with its module. Of several, the first that there is.
    names : str
        Separated by spaces.
    why : str
        What they are used for.
    """

    owner: str
    names: str
    why: str


_LOGGING = "trainer.connectors.logger_connector"
_LOGGERS = "pytorch_lightning.loggers"

TABLE = (
    # Python
    Private("argparse", "_SubParsersAction", "the type of what add_subparsers() returns"),
    Private("atexit", "_run_exitfuncs", "a rank ends without taking the interpreter apart"),
    Private("sys", "_current_frames", "where a rank is that makes no progress"),
    Private("threading", "_register_atexit", "stores are reached once more when Python exits"),
    # cloudpickle
    Private(
        "cloudpickle.cloudpickle",
        "_DYNAMIC_CLASS_TRACKER_BY_ID _class_setstate _make_skeleton_class _make_skeleton_enum",
        "classes of a notebook, which loading a pickle in the same process must not change",
    ),
    # PySpark
    Private(
        "pyspark.sql.classic.dataframe.DataFrame pyspark.sql.DataFrame",
        "_jdf",
        "whether a plan gives the same rows twice",
    ),
    Private(
        "pyspark.sql.SparkSession",
        "_jvm _jsparkSession",
        "Hadoop's filesystems, as Spark means a path; all settings of a session",
    ),
    Private(
        "pyspark.SparkContext",
        "_jsc _jvm _gateway",
        "task slots, jobs by their tag, failed tasks; weak references and arrays in the JVM",
    ),
    Private(
        "pyspark.Broadcast",
        "_jbroadcast _path _value",
        "a model's broadcast variable lives as long as plans need it, and once in a worker",
    ),
    Private(
        "pyspark.ml.param.Params",
        "_dummy _paramMap _defaultParamMap _set _setDefault _resetUid",
        "params that are declared once: PySpark's own stages are made with these",
    ),
    # Keras
    Private("keras.Model", "_flatten_layers", "all layers, those in attributes of layers, too"),
    Private("keras.Model", "_compile_config", "what compile() was given"),
    Private(
        "keras.Function",
        "_nodes",
        "the graph of a functional model in files of earlier versions",
    ),
    Private(
        "keras.src.backend.tensorflow.trainer.TensorFlowTrainer",
        "_eval_epoch_iterator",
        "an iterator that evaluate() leaves on a model, and that cannot be sent",
    ),
    Private(
        "keras.Optimizer",
        "_learning_rate",
        "a schedule: the public property gives its value in the current step",
    ),
    Private(
        "keras.Optimizer",
        "_trainable_variables",
        "the variables that a wrapped optimizer was built for",
    ),
    Private(
        "keras.callbacks.EarlyStopping",
        "_set_monitor_op",
        "whether less or more of what a callback monitors is better, as Keras finds out",
    ),
    Private(
        "keras.Layer",
        "_auto_config _build_shapes_dict",
        "constructor arguments that a config leaves out; shapes a layer was built with",
    ),
    Private(
        "keras.layers.BatchNormalization",
        "_moments _reduction_axes",
        "statistics over all ranks (synchronized=True)",
    ),
    Private("keras.Variable", "_path", "names by which MultiOptimizer chooses"),
    Private(
        "keras.src.backend.common.masking",
        "get_keras_mask",
        "rows and steps that a loss leaves out",
    ),
    Private(
        "keras.src.random.seed_generator", "global_seed_generator", "the state of keras.random"
    ),
    # torch
    Private(
        "torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", "the module that was compiled"
    ),
    Private(
        "torch.autograd.Variable", "_execution_engine", "a call when a backward pass is at its end"
    ),
    Private("torch.nn.Module", "_compiled_call_impl", "whether a module was compiled in place"),
    Private(
        "torch.nn.modules.batchnorm",
        "_BatchNorm _NormBase",
        "batch normalization of any dimension, and classes of users that derive from it",
    ),
    # torchmetrics
    Private(
        "torchmetrics.Metric",
        "_computed _update_count _copy_state_dict",
        "a rank without rows leaves no trace; a rank's own value, without waiting for the others",
    ),
    Private(
        "torchmetrics.Metric",
        "_reductions _sync_dist",
        "states of all ranks, or of those that a resumed rank replaces, are merged as torchmetrics "
        "merges them",
    ),
    # Lightning
    Private(
        f"pytorch_lightning.{_LOGGING}.result",
        "_ResultCollection _ResultMetric",
        "logged values that are exact, and reduced where all ranks pass",
    ),
    Private(
        f"pytorch_lightning.{_LOGGING}.result._ResultCollection",
        "_get_cache _forked_name",
        "values that are read before they are reduced, and the names callbacks see",
    ),
    Private(
        f"pytorch_lightning.{_LOGGING}.result._ResultMetric",
        "_forward_cache _computed",
        "the value of the last step, and the value of an epoch",
    ),
    Private(
        f"pytorch_lightning.{_LOGGING}.logger_connector._LoggerConnector",
        "_callback_metrics _first_loop_iter",
        "callbacks that monitor what training logs when a validation is over; values logged within "
        "an epoch that is gone on with are not begun anew",
    ),
    Private(
        "pytorch_lightning.Trainer",
        "_results _logger_connector _checkpoint_connector _signal_connector",
        "the same, a checkpoint at another moment than Lightning's own, and ranks that are asked "
        "to end together and not each by itself",
    ),
    Private(
        "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop",
        "_results",
        "the results of training",
    ),
    Private(
        "pytorch_lightning.loops.loop._Loop",
        "_restarting",
        "a run that goes on steps schedulers and validates as one that was not interrupted",
    ),
    Private(
        "pytorch_lightning.loops.evaluation_loop._EvaluationLoop",
        "_results",
        "the results of a validation",
    ),
    Private(
        "pytorch_lightning.loops.fit_loop._FitLoop",
        "_skip_backward _combined_loader _data_fetcher",
        "whether the next batch is followed by a backward pass; batches of a user's loader that "
        "were trained on before",
    ),
    Private(
        "pytorch_lightning.LightningModule",
        "_current_fx_name",
        "hooks that are called again in an epoch that is resumed can log",
    ),
    Private(
        "pytorch_lightning.strategies.ParallelStrategy",
        "_layer_sync",
        "sync_batchnorm=True is refused with a remedy",
    ),
    Private(f"{_LOGGERS}.TensorBoardLogger", "_root_dir", "logs go to the run's directory"),
    Private(f"{_LOGGERS}.CSVLogger", "_root_dir _save_dir", "logs go to the run's directory"),
    Private(
        f"{_LOGGERS}.MLFlowLogger", "_tracking_uri _mlflow_client", "logs go to the run's directory"
    ),
    # Horovod
    Private(
        "horovod.torch.elastic.TorchState",
        "_handlers",
        "what an elastic state has saved outlives the rank",
    ),
    Private(
        "horovod.common.process_sets",
        "_setup",
        "process sets are those of the framework that trains, whichever others are imported",
    ),
    Private("horovod.torch.mpi_ops", "_basics", "the same"),
    Private("horovod.tensorflow.mpi_ops", "_basics", "the same"),
    Private("horovod.tensorflow.elastic.TensorFlowState", "_values", "the same"),
    # Petastorm
    Private(
        "petastorm.reader.Reader",
        "_filter_row_groups _create_ventilator _workers_pool",
        "row ranges of the plan in place of Petastorm's own sharding",
    ),
    Private(
        "petastorm.workers_pool.ventilator.Ventilator",
        "_ventilate_fn",
        "row ranges of the plan in place of Petastorm's own sharding",
    ),
    Private(
        "petastorm.arrow_reader_worker.ArrowReaderWorker", "_local_cache", "row ranges are cached"
    ),
    Private(
        "petastorm.workers_pool.thread_pool.ThreadPool",
        "_workers _ventilator_queues _ventilator _results_queues _stop_event _stop_aware_put",
        "threads that sleep while they have nothing to do",
    ),
    Private("petastorm.workers_pool.thread_pool.WorkerThread", "_ventilator_queue", "the same"),
    Private(
        "petastorm.workers_pool.process_pool.ProcessPool",
        "_workers _results_receiver_poller _ventilated_items _ventilator_send "
        "_wait_for_workers_to_start _results_receiver _context",
        "an error where a worker process has died, or does not start",
    ),
)
