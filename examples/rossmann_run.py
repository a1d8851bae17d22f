"""Predict Rossmann's sales with a training function that `hvd_estimators.run` calls on each rank.

The data, the network and the steps are those of ``rossmann.py``. The loop is Keras's, and the
script writes out the parts that Horovod needs: an optimizer that averages gradients, callbacks that
start all ranks from the same weights and average metrics, a warm-up of the learning rate, and each
rank's share of the rows. Rank 0 returns the best model as bytes, and Spark predicts with it.

If Spark has GPUs, ``--gpus task`` reserves one for every task of the application, as is usual in
cluster settings. ``--gpus stage`` reserves one only for the training tasks (stage-level
scheduling), so preparing the data uses all cores. Both work on Standalone, YARN and Kubernetes, and
on a single machine with ``--master 'local-cluster[2,1,1024]'``.

Run it with ``python examples/rossmann_run.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from common import make_parser, start_spark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rossmann import RMSPE, make_network, prepare_step, print_errors, read_prepared, rmspe
from rossmann_data import INDEXED, LOG_SALES

import hvd_estimators

PATIENCE = 5


@dataclass(frozen=True)
class Job:
    """Settings that every rank needs.

    Attributes
    ----------
    data : str
        The Parquet that preparation has written, on storage that all ranks share.
    sizes : dict of str to int
        Number of values of each category.
    mean, spread : float
        Mean and standard deviation of the label.
    epochs, batch_size : int
        Maximum number of passes over the data, and rows of a rank's step.
    learning_rate : float
        Learning rate of one rank.
    seed : int
        Seed of the weights and the order.
    """

    data: str
    sizes: dict[str, int]
    mean: float
    spread: float
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


def train(job: Job) -> tuple[dict[str, list[float]], list[str], bytes]:
    """Train the network. Runs on every rank; the caller uses the result of rank 0.

    Returns
    -------
    history : dict of str to list of float
        Losses and metrics of each epoch.
    gpus : list of str
        The GPUs that Spark has assigned to the rank's task.
    model : bytes
        The ``.keras`` file of the best epoch; empty except on rank 0.
    """
    import tempfile

    import horovod.tensorflow as hvd
    import keras
    import pyarrow.parquet as pq
    import tensorflow as tf

    from hvd_estimators import get_available_devices
    from hvd_estimators.compat.callbacks import LearningRateWarmupCallback
    from hvd_estimators.keras import BroadcastCallback, DistributedOptimizer, MetricAverageCallback

    hvd.init()
    # A rank sees only its own GPU. Without this, TensorFlow would reserve all of its memory.
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    keras.utils.set_random_seed(job.seed + hvd.rank())

    # Each rank takes every size-th row, and as many rows as the others: a rank with one more step
    # would wait for the others indefinitely.
    frame = pq.read_table(job.data).to_pandas()
    parts = [frame[frame["is_validation"] == part] for part in (False, True)]
    training, validation = (
        columns_of(part[: len(part) // hvd.size() * hvd.size()].iloc[hvd.rank() :: hvd.size()])
        for part in parts
    )

    model = make_network(job.sizes, job.mean, job.spread)
    model.compile(
        DistributedOptimizer(keras.optimizers.Adam(job.learning_rate * hvd.size())),
        loss="mae",
        metrics=[RMSPE()],
        jit_compile=False,  # Horovod's operations cannot be compiled by XLA
    )
    path = Path(tempfile.mkdtemp()) / "best.keras"
    # Average metrics before the callbacks that use them, so that all ranks act the same.
    callbacks = [
        BroadcastCallback(),
        MetricAverageCallback(),
        LearningRateWarmupCallback(job.learning_rate * hvd.size(), warmup_epochs=2),
        keras.callbacks.ReduceLROnPlateau("val_rmspe", patience=3, mode="min"),
        keras.callbacks.EarlyStopping("val_rmspe", patience=PATIENCE, mode="min"),
        keras.callbacks.TerminateOnNaN(),
    ]
    if hvd.rank() == 0:
        callbacks.append(
            keras.callbacks.ModelCheckpoint(
                str(path), monitor="val_rmspe", mode="min", save_best_only=True
            )
        )
    fitted = model.fit(
        *training,
        validation_data=validation,
        batch_size=job.batch_size,
        epochs=job.epochs,
        callbacks=callbacks,
        verbose=0,
    )
    best = path.read_bytes() if hvd.rank() == 0 else b""
    return fitted.history, get_available_devices(), best


def columns_of(frame: pd.DataFrame) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the network's inputs and labels."""
    inputs = {name: frame[name].to_numpy("float32")[:, None] for name in INDEXED}
    inputs["numbers"] = vectors(frame["numbers"])
    labels = frame[LOG_SALES] if LOG_SALES in frame else pd.Series(dtype="float32")
    # In the shape of the network's output: with (rows,), a metric would subtract all pairs of rows.
    return inputs, labels.to_numpy("float32")[:, None]


def vectors(column: pd.Series) -> np.ndarray:
    """Convert dense ML vectors to an array: Parquet holds them as structs, UDFs as objects."""
    rows = [row["values"] if isinstance(row, dict) else row.toArray() for row in column]
    return np.array(rows, "float32")


def predict(rows: DataFrame, model: bytes) -> DataFrame:
    """Add the column ``expected``. Each of Spark's tasks loads the model once."""

    def predict_batches(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        import tempfile

        import keras

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "best.keras"
            path.write_bytes(model)
            network = keras.models.load_model(path, compile=False)
        for frame in frames:
            output = network.predict_on_batch(columns_of(frame)[0])
            kept = frame.drop(columns=["numbers"])
            yield kept.assign(expected=output[:, 0].astype(float))

    schema = rows.drop("numbers").withColumn("expected", F.lit(0.0)).schema
    return rows.mapInPandas(predict_batches, schema)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "rossmann_run", epochs=8, batch_size=64)
    parser.add_argument("--data", type=Path, help="folder of Kaggle's files (default: made up)")
    parser.add_argument("--stores", type=int, default=30, help="stores to make up")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the stores to keep")
    parser.add_argument(
        "--gpus",
        choices=("none", "task", "stage"),
        default="none",
        help="whether every task holds a GPU, or those that train",
    )
    parser.add_argument("--gpus-per-executor", type=int, default=1, help="GPUs of an executor")
    parser.add_argument(
        "--gpu-discovery-script",
        type=Path,
        default=Path(__file__).with_name("find_gpus.sh"),
        help="tells Spark which GPUs a machine has",
    )
    return parser.parse_args(argv)


def gpu_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the Spark settings that schedule GPUs."""
    if args.gpus == "none":
        return {}
    script, amount = str(args.gpu_discovery_script.resolve()), str(args.gpus_per_executor)
    settings = {
        "spark.executor.resource.gpu.amount": amount,
        "spark.executor.resource.gpu.discoveryScript": script,
    }
    if args.master.startswith("local-cluster"):
        # Settings of the workers; on other clusters, the workers are started with them.
        settings["spark.worker.resource.gpu.amount"] = amount
        settings["spark.worker.resource.gpu.discoveryScript"] = script
    if args.gpus == "task":
        settings["spark.task.resource.gpu.amount"] = "1"
    return settings


def run(spark: SparkSession, args: argparse.Namespace) -> dict[str, list[float]]:
    """Prepare, train and predict; return the history."""
    prepare_step(spark, args)
    rows, sizes = read_prepared(spark, args.output)
    mean, spread = rows.agg(F.avg(LOG_SALES), F.stddev(LOG_SALES)).head()
    job = Job(
        data=str(args.output / "train.parquet"),
        sizes=sizes,
        mean=mean,
        spread=spread,
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    results = hvd_estimators.run(
        train,
        args=(job,),
        num_proc=args.num_proc,
        gpus_per_task=1 if args.gpus == "stage" else None,
        env={"TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    for rank, (_, gpus, _) in enumerate(results):
        print(f"rank {rank}: {'GPU ' + ', '.join(gpus) if gpus else 'no GPU'}")
    history, _, model = results[0]
    validated = predict(rows.where("is_validation"), model)
    print_errors(rows, rmspe(validated), history["val_rmspe"])

    test = spark.read.parquet(str(args.output / "test.parquet"))
    sales = F.when(F.col("Open"), F.exp("expected")).otherwise(0.0)
    predicted = predict(test, model).select(
        F.col("Id").cast("int").alias("Id"), sales.alias("Sales")
    )
    submission = predicted.orderBy("Id").toPandas()
    path = args.output / "submission.csv"
    submission.to_csv(path, index=False, float_format="%.2f")
    print(f"\n{len(submission):,} predictions: {path}")
    return history


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "rossmann_run", **gpu_settings(arguments)) as session:
        run(session, arguments)
