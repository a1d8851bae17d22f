"""Table of other packages' private names that this package uses for lack of public ones.

``docs/private_names_table.py`` renders it in the documentation. Names in Spark's JVM are in
``tests/spark/test_spark_names.py``.
"""

from __future__ import annotations

from typing import NamedTuple


class Private(NamedTuple):
    """Private names of a class or module.

    Attributes
    ----------
    owner : str
        The module, or the class with its module. If several are given, the first that exists.
    names : str
        Separated by spaces. A final ``*`` matches any suffix.
    why : str
        Their purpose, in whole sentences.
    until : str
        The public name that replaces them, where it exists.
    """

    owner: str
    names: str
    why: str
    until: str = ""


_LOGGING = "trainer.connectors.logger_connector"

TABLE = (
    # Python
    Private(
        "atexit",
        "_run_exitfuncs",
        "A rank ends without tearing the interpreter down, which takes a second.",
    ),
    Private("threading", "_register_atexit", "Stores are written once more when Python exits."),
    # cloudpickle
    Private(
        "cloudpickle.cloudpickle",
        "_DYNAMIC_CLASS_TRACKER_BY_ID _class_setstate _make_skeleton_class _make_skeleton_enum",
        "Loading a pickle keeps the classes that this process defines, as in a notebook.",
    ),
    # PySpark
    Private(
        "pyspark.sql.classic.dataframe.DataFrame pyspark.sql.DataFrame",
        "_jdf",
        "Its plan shows whether it gives the same rows twice, and its session has all settings.",
    ),
    Private(
        "pyspark.SparkContext",
        "_jsc _jvm",
        "They give Hadoop's filesystems, task slots, jobs by tag, failed tasks, and the deletion "
        "of a broadcast variable's file.",
    ),
    Private(
        "pyspark.Broadcast",
        "_jbroadcast _path",
        "A model's variable lives as long as plans need it, and exists once per worker.",
    ),
    Private(
        "pyspark.ml.param.Params",
        "_set _setDefault _resetUid",
        "Params are declared once. PySpark's stages and those of third parties are built with "
        "these.",
    ),
    Private(
        "pyspark.sql.pandas.serializers.ArrowStreamPandasUDFSerializer",
        "arrow_to_pandas",
        "A pandas UDF of PySpark before 4.1 receives Arrow's columns without a conversion.",
        until="pyspark.sql.functions.arrow_udf",
    ),
    # Keras
    Private(
        "keras.callbacks.ModelCheckpoint",
        "_set_monitor_op",
        "Keras calls it at the end of an epoch, and save_freq compares models before.",
    ),
    Private("keras.Model", "_flatten_layers", "It finds all layers, also those in attributes."),
    Private("keras.Model", "_compile_config", "It contains the arguments of compile()."),
    Private(
        "keras.Model",
        "_get_metrics_result_or_logs",
        "The logs of a model's own steps are kept as the steps return them.",
    ),
    Private("keras.Model", "_compile_loss", "It has the means of the outputs' losses."),
    Private(
        "keras.metrics.MeanMetricWrapper",
        "_fn",
        "It is the function that a metric averages, the user's or Keras's.",
    ),
    Private(
        "keras.Optimizer",
        "_learning_rate",
        "It contains a schedule; the public property gives the current value.",
    ),
    Private(
        "keras.Optimizer",
        "_exclude_from_weight_decay _exclude_from_weight_decay_pattern",
        "A copy gets the exclusions, which configs lack.",
    ),
    Private(
        "keras.Optimizer",
        "_trainable_variables",
        "These are the variables that a wrapped optimizer was built for.",
    ),
    Private(
        "keras.Layer",
        "_trainable",
        "A copy gets it without effect on the layers below; the public setter sets theirs, too.",
    ),
    Private(
        "keras.src.losses.losses.LossFunctionWrapper",
        "_fn_kwargs",
        "It has the options of a loss that its config lacks, such as Huber's.",
    ),
    Private("keras.Variable", "_path", "MultiOptimizer selects variables by these names."),
    Private(
        "keras.src.saving.serialization_lib",
        "ObjectSharingScope",
        "A layer that two parts of a model share stays one layer in copies.",
    ),
    Private(
        "keras.src.random.seed_generator",
        "global_seed_generator",
        "It is the generator of keras.random.",
    ),
    # torch
    Private("torch", "_C", "It has the number of the running backward pass, and process groups."),
    Private("torch._C", "_distributed_c10d", "It has the next function."),
    Private(
        "torch._C._distributed_c10d",
        "_create_work_from_future",
        "It makes the result of an asynchronous operation of Horovod's process group.",
    ),
    Private(
        "torch._C",
        "_current_autograd_node",
        "It tells a backward pass within another from one that is not.",
    ),
    Private(
        "torch._dynamo.eval_frame.OptimizedModule",
        "_orig_mod",
        "It is the module before compilation.",
    ),
    Private(
        "torch.autograd.Variable",
        "_execution_engine",
        "It calls a function at the end of a backward pass.",
    ),
    Private(
        "torch.Tensor",
        "_backward_hooks _post_accumulate_grad_hooks",
        "They hold the hooks of parameters, which torch does not pickle.",
    ),
    Private(
        "torch.nn.RNNBase",
        "_flat_weight_refs _init_flat_weights",
        "They refer to the parameters weakly, which torch.utils.swap_tensors rejects.",
    ),
    Private(
        "torch.nn.modules.batchnorm",
        "_NormBase",
        "They find batch normalization of any dimension, and user classes of it.",
    ),
    Private(
        "torch.optim.Optimizer",
        "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
        "They hold the hooks of steps, which torch does not pickle.",
    ),
    # torchmetrics
    Private(
        "torchmetrics.Metric",
        "_computed _update_count",
        "A metric whose states were merged is up to date.",
    ),
    Private(
        "torchmetrics.Metric",
        "_reductions _sync_dist",
        "States of all ranks and of replaced ranks are merged as torchmetrics merges them.",
    ),
    # Lightning
    Private(
        f"pytorch_lightning.{_LOGGING}.result._ResultCollection",
        "_forked_name",
        "It gives the names under which callbacks see values.",
    ),
    Private(
        f"pytorch_lightning.{_LOGGING}.result._ResultMetric",
        "_computed _forward_cache",
        "They are the values of an epoch and of a step, which all ranks reduce together.",
    ),
    Private(
        "pytorch_lightning.Trainer",
        "_results _logger_connector _signal_connector",
        "They serve the same purpose, and let ranks stop together.",
    ),
    Private(
        "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop",
        "_results _batches_that_stepped _num_ready_batches_reached",
        "They are the results of training, the step of its logs, and whether an epoch is complete.",
    ),
    Private(
        "pytorch_lightning.loops.evaluation_loop._EvaluationLoop",
        "_results",
        "They are the results of a validation.",
    ),
    Private(
        "pytorch_lightning.loops.fit_loop._FitLoop",
        "_skip_backward _data_fetcher",
        "They show whether a backward pass follows, and skip the trained batches of a user's "
        "loader.",
    ),
    Private(
        "pytorch_lightning.callbacks.ModelCheckpoint",
        "_fs",
        "It opens the run's folder with the store's options, which no other library gets.",
    ),
    Private(
        "pytorch_lightning.LightningModule",
        "_current_fx_name",
        "Hooks that run again in a resumed epoch can log.",
    ),
    Private(
        "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop",
        "_broadcast_sigterm_tensor",
        "Lightning would exchange a number between ranks for each batch.",
    ),
    Private(
        "pytorch_lightning.strategies.DDPStrategy",
        "_configure_launcher",
        "Lightning's launcher would set the number of threads.",
    ),
    # Horovod
    Private(
        "horovod.torch.elastic.TorchState",
        "_handlers",
        "The saved values of an elastic state outlive the rank.",
    ),
    Private("horovod.common.elastic.ObjectState", "_saved*", "They serve the same purpose."),
    Private(
        "horovod.tensorflow.elastic.TensorFlowState", "_values", "They serve the same purpose."
    ),
    Private(
        "horovod.common.process_sets",
        "_setup",
        "Process sets belong to the framework that trains, whichever others are imported.",
    ),
    Private("horovod.torch.mpi_ops", "_basics", "They serve the same purpose."),
    Private("horovod.tensorflow.mpi_ops", "_basics", "They serve the same purpose."),
)
