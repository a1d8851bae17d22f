"""Predict store sales: Kaggle's Rossmann competition, from CSV files to a submission.

There are three steps, and ``--steps`` runs each alone:

* ``prepare``: Spark joins sales, stores, weather and search trends, creates features, and writes
  them as Parquet.
* ``train``: a ``KerasEstimator`` trains a network that embeds each category, on two Horovod ranks.
  The metric is the competition's, the root mean squared percentage error (RMSPE), over the weeks a
  year before the test weeks. The model of the best epoch is saved.
* ``predict``: the saved model predicts the test rows and writes ``submission.csv``.

``--data`` is the folder with Kaggle's files (``train.csv``, ``test.csv``, ``store.csv``) and the
additional files (``store_states.csv``, ``state_names.csv``, ``googletrend.csv``, ``weather.csv``).
Without it, the script generates small files of the same schema, whose noise alone causes an RMSPE
of 0.10.

Run it with ``python examples/rossmann.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import keras
from common import make_parser, start_spark
from keras import ops
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rossmann_data import FILES, INDEXED, LOG_SALES, NUMBERS, make_files, prepare

from hvd_estimators import Store
from hvd_estimators.keras import BestModelCheckpoint, KerasEstimator, KerasModel

STEPS = ("prepare", "train", "predict")


class RMSPE(keras.metrics.Mean):
    """Root mean squared percentage error of sales, from their logarithms."""

    def __init__(self, name: str = "rmspe", **kwargs: object) -> None:
        super().__init__(name=name, **kwargs)

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = 1 - ops.exp(y_pred - y_true)  # (sales - predicted) / sales
        return super().update_state(ops.square(error), sample_weight)

    def result(self):
        return ops.sqrt(super().result())


def make_network(sizes: dict[str, int], mean: float, spread: float) -> keras.Model:
    """Return a network that embeds each category and predicts the logarithm of sales.

    Parameters
    ----------
    sizes : dict of str to int
        Number of values of each category.
    mean, spread : float
        Mean and standard deviation of the label.
    """
    inputs = [keras.Input((1,), name=name) for name in sizes]
    embedded = [
        keras.layers.Embedding(size, min(10, (size + 1) // 2), name=f"embed_{name}")(category)
        for category, (name, size) in zip(inputs, sizes.items(), strict=True)
    ]
    numbers = keras.Input((len(NUMBERS),), name="numbers")
    x = keras.layers.Concatenate()([*map(keras.layers.Flatten(), embedded), numbers])
    for width in (256, 128):
        x = keras.layers.Dense(width, activation="relu")(x)
        x = keras.layers.Dropout(0.1)(x)
    x = keras.layers.Dense(1)(x)
    output = keras.layers.Rescaling(spread, offset=mean, name=LOG_SALES)(x)
    return keras.Model([*inputs, numbers], output)


def rmspe(rows: DataFrame) -> float:
    """Return the error of ``expected``, the prediction of ``log_sales``."""
    error = 1 - F.exp(F.col("expected") - F.col(LOG_SALES))
    return rows.agg(F.sqrt(F.avg(error * error))).head()[0]


def print_errors(train: DataFrame, error: float, history: list[float]) -> None:
    """Print the errors of the network and of the averages by store, weekday and promotion."""
    known = train.where("not is_validation").groupBy("Store", "DayOfWeek", "Promo")
    averages = known.agg(F.avg(LOG_SALES).alias("expected"))
    joined = train.where("is_validation").join(averages, ["Store", "DayOfWeek", "Promo"])
    print("\nRMSPE a year before the test weeks")
    print(f"{'averages':<12}{rmspe(joined):.4f}")
    print(f"{'network':<12}{error:.4f}")
    best = min(range(len(history)), key=history.__getitem__)
    print(f"The best of {len(history)} epochs was {best + 1}, with {history[best]:.4f}.")


def prepare_step(spark: SparkSession, args: argparse.Namespace) -> None:
    """Join the files, and write the training and test rows."""
    folder = args.data
    if folder is None:
        folder = args.output / "data"
        make_files(folder, args.stores, args.seed)
        print(f"No --data: made up {args.stores} stores in {folder}")
    missing = [f"{name}.csv" for name in FILES if not (folder / f"{name}.csv").is_file()]
    if missing:
        raise SystemExit(f"{folder} lacks {', '.join(missing)}.")
    prepared = prepare(spark, folder, args.sample)
    prepared.train.write.mode("overwrite").parquet(str(args.output / "train.parquet"))
    prepared.test.write.mode("overwrite").parquet(str(args.output / "test.parquet"))
    (args.output / "sizes.json").write_text(json.dumps(prepared.sizes))


def read_prepared(spark: SparkSession, output: Path) -> tuple[DataFrame, dict[str, int]]:
    """Return the training rows and the sizes of their categories; print the number of rows."""
    train = spark.read.parquet(str(output / "train.parquet")).cache()
    rows = {
        row["is_validation"]: row["count"]
        for row in train.groupBy("is_validation").count().collect()
    }
    print(f"{rows[False]:,} rows to train on, {rows[True]:,} to validate on")
    return train, json.loads((output / "sizes.json").read_text())


def train_step(spark: SparkSession, args: argparse.Namespace) -> dict[str, list[float]]:
    """Train the network and save the model of the best epoch; return the history."""
    train, sizes = read_prepared(spark, args.output)
    mean, spread = train.agg(F.avg(LOG_SALES), F.stddev(LOG_SALES)).head()
    estimator = KerasEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=make_network(sizes, mean, spread),
        # The learning rate of one rank; training multiplies it by the number of ranks.
        optimizer=keras.optimizers.Adam(args.learning_rate),
        loss="mae",
        metrics=[RMSPE()],
        feature_cols=[*INDEXED, "numbers"],
        label_cols=[LOG_SALES],
        validation="is_validation",
        batch_size=args.batch_size,
        epochs=args.epochs,
        checkpoint_callback=BestModelCheckpoint(monitor="val_rmspe", mode="min"),
        random_seed=args.seed,
        gpus_per_task=args.gpus_per_task,
        verbose=1,
    )
    model = estimator.fit(train)
    model.write().overwrite().save(str(args.output / "model"))

    history = model.getHistory()
    predicted = model.setOutputCols(["expected"]).transform(train.where("is_validation"))
    print_errors(train, rmspe(predicted), history["val_rmspe"])
    return history


def predict_step(spark: SparkSession, args: argparse.Namespace) -> Path:
    """Predict the test rows with the saved model, and write the submission."""
    model = KerasModel.load(str(args.output / "model")).setOutputCols(["predicted"])
    test = spark.read.parquet(str(args.output / "test.parquet"))
    # A closed store sells nothing.
    sales = F.when(F.col("Open"), F.exp("predicted")).otherwise(0.0)
    rows = model.transform(test).select(F.col("Id").cast("int").alias("Id"), sales.alias("Sales"))
    submission = rows.orderBy("Id").toPandas()
    path = args.output / "submission.csv"
    submission.to_csv(path, index=False, float_format="%.2f")
    sold = submission.loc[submission["Sales"] > 0, "Sales"].median()
    print(f"\n{len(submission):,} predictions, {sold:,.0f} in the median of open days: {path}")
    return path


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "rossmann", epochs=6, batch_size=64)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="what to do")
    parser.add_argument("--data", type=Path, help="folder of Kaggle's files (default: made up)")
    parser.add_argument("--stores", type=int, default=30, help="stores to make up")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the stores to keep")
    parser.add_argument("--gpus-per-task", type=int, help="GPUs that a rank asks Spark for")
    return parser.parse_args(argv)


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Run the requested steps."""
    keras.utils.set_random_seed(args.seed)
    steps = {"prepare": prepare_step, "train": train_step, "predict": predict_step}
    for step in STEPS:
        if step in args.steps:
            steps[step](spark, args)


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "rossmann") as session:
        run(session, arguments)
