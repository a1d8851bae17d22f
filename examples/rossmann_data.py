"""Tables of Kaggle's Rossmann competition: generated files, and features.

`make_files` generates small CSV files with Kaggle's schema, in which sales follow a known rule.
`prepare` joins the files, Kaggle's or generated ones, and returns DataFrames for training a
network. ``rossmann.py`` and ``rossmann_run.py`` use both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

FILES = ("train", "test", "store", "store_states", "state_names", "googletrend", "weather")

CATEGORIES = [
    "Store",
    "State",
    "StoreType",
    "Assortment",
    "DayOfWeek",
    "Year",
    "Month",
    "Day",
    "Week",
    "Promo",
    "StateHoliday",
    "SchoolHoliday",
    "PromoInterval",
    "CompetitionMonths",
    "Promo2Weeks",
    "Events",
]
WEATHER = [
    "Max_TemperatureC",
    "Mean_TemperatureC",
    "Min_TemperatureC",
    "Max_Humidity",
    "Mean_Humidity",
    "Min_Humidity",
    "Max_Wind_SpeedKm_h",
    "Mean_Wind_SpeedKm_h",
    "CloudCover",
]
EVENTS = ["Promo", "StateHoliday", "SchoolHoliday"]
NUMBERS = [
    "CompetitionDistance",
    *WEATHER,
    "trend",
    "trend_de",
    *[f"{side}{event}" for event in EVENTS for side in ("After", "Before")],
]
INDEXED = [f"{name}_index" for name in CATEGORIES]
LOG_SALES = "log_sales"

_STATES = {"Bayern": "BY", "Hessen": "HE", "Niedersachsen": "HB,NI", "Sachsen": "SN"}
_NOISE = 0.1
_HORIZON = 60
"""Days beyond which an event has no effect."""


@dataclass(frozen=True)
class Prepared:
    """Training and test data of a network.

    Attributes
    ----------
    train : DataFrame
        One row per store and day with sales: ``INDEXED``, the vector ``numbers``, ``log_sales`` and
        the boolean ``is_validation``, which is true on the days of ``test`` a year before.
    test : DataFrame
        The rows to predict: the same features, and ``Id``, ``Open``.
    sizes : dict of str to int
        Number of values of each of ``INDEXED``.
    """

    train: DataFrame
    test: DataFrame
    sizes: dict[str, int]


def make_files(folder: Path, stores: int, seed: int) -> None:
    """Generate CSV files with Kaggle's schema, from July 2013 to September 2015.

    A store's sales are its own level times factors of the weekday, a promotion, the weeks before
    Christmas and the temperature, times noise. The noise's logarithm has a standard deviation of
    0.1, so no prediction can have an RMSPE much below that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    states = pd.DataFrame({"StateName": _STATES.keys(), "State": _STATES.values()})
    states.to_csv(folder / "state_names.csv", index=False)
    store = _make_stores(stores, random)
    store.drop(columns=["State", "level"]).to_csv(folder / "store.csv", index=False)
    store[["Store", "State"]].to_csv(folder / "store_states.csv", index=False)

    days = pd.DataFrame({"Date": pd.date_range("2013-07-01", "2015-09-17")})
    weather = days.merge(states[["StateName"]], how="cross").rename(columns={"StateName": "file"})
    season = np.cos((weather["Date"].dt.dayofyear - 200) / 365 * 2 * np.pi)
    mean = np.round(10 + 9 * season + random.normal(0, 3, len(weather)))
    for name, offset in {"Max": 5, "Mean": 0, "Min": -5}.items():
        weather[f"{name}_TemperatureC"] = mean + offset
        weather[f"{name}_Humidity"] = (60 + 2 * offset + random.integers(-9, 9, len(weather))).clip(
            5, 100
        )
    weather["Max_Wind_SpeedKm_h"] = random.integers(10, 60, len(weather))
    weather["Mean_Wind_SpeedKm_h"] = weather["Max_Wind_SpeedKm_h"] // 2
    # Kaggle's file also has days without a reading, and Events are often empty.
    weather["CloudCover"] = np.where(random.random(len(weather)) < 0.1, None, mean.clip(0, 8))
    weather["Events"] = random.choice(["", "Rain", "Fog-Rain", "Snow"], len(weather))
    weather.to_csv(folder / "weather.csv", index=False)

    _make_trend(folder, random)
    _make_sales(folder, days, store, weather, random)


def _make_stores(count: int, random: np.random.Generator) -> pd.DataFrame:
    has_promo2 = random.random(count) < 0.5
    competes = random.random(count) < 0.7
    return pd.DataFrame(
        {
            "Store": np.arange(1, count + 1),
            "StoreType": random.choice(list("dabc"), count),
            "Assortment": random.choice(list("acb"), count),
            "CompetitionDistance": random.integers(1, 200, count) * 50,
            "CompetitionOpenSinceMonth": np.where(competes, random.integers(1, 13, count), None),
            "CompetitionOpenSinceYear": np.where(
                competes, random.integers(2008, 2016, count), None
            ),
            "Promo2": has_promo2.astype(int),
            "Promo2SinceWeek": np.where(has_promo2, random.integers(1, 50, count), None),
            "Promo2SinceYear": np.where(has_promo2, random.integers(2010, 2015, count), None),
            "PromoInterval": np.where(has_promo2, "Feb,May,Aug,Nov", None),
            "State": random.choice(list(_STATES.values()), count),
            "level": random.normal(8.5, 0.35, count),
        }
    )


def _make_trend(folder: Path, random: np.random.Generator) -> None:
    starts = pd.date_range("2013-06-30", "2015-09-13", freq="7D")  # Sundays, as in Google's files
    weeks = [f"{day:%Y-%m-%d} - {day + pd.Timedelta(days=6):%Y-%m-%d}" for day in starts]
    codes = ["", *(f"_{code.split(',')[-1]}" for code in _STATES.values())]
    trend = pd.DataFrame(
        [(f"Rossmann_DE{code}", week) for code in codes for week in weeks], columns=["file", "week"]
    )
    trend["trend"] = random.integers(40, 100, len(trend))
    trend.to_csv(folder / "googletrend.csv", index=False)


def _make_sales(
    folder: Path,
    days: pd.DataFrame,
    store: pd.DataFrame,
    weather: pd.DataFrame,
    random: np.random.Generator,
) -> None:
    rows = days.merge(store[["Store", "State", "level"]], how="cross")
    temperature = weather.assign(State=weather["file"].map(_STATES))
    rows = rows.merge(temperature[["Date", "State", "Mean_TemperatureC"]], on=["Date", "State"])
    date = rows["Date"].dt
    rows["DayOfWeek"] = date.dayofweek + 1
    is_holiday = ((date.month == 12) & date.day.isin([25, 26])) | (date.dayofyear == 1)
    rows["StateHoliday"] = np.where(is_holiday, np.where(date.month == 12, "c", "a"), "0")
    rows["SchoolHoliday"] = date.month.isin([7, 8]).astype(int)
    rows["Promo"] = ((date.isocalendar().week.to_numpy() % 2 == 0) & (date.dayofweek < 5)).astype(
        int
    )
    rows["Open"] = ((date.dayofweek < 6) & ~is_holiday).astype(int)
    weekday = np.array([0.0, 0.2, 0.05, 0.0, 0.0, 0.1, -0.1, 0.0])[rows["DayOfWeek"]]
    christmas = 0.3 * ((date.month == 12) & (date.day < 25))
    rule = rows["level"] + weekday + 0.3 * rows["Promo"] + christmas
    rule += 0.015 * rows["Mean_TemperatureC"] + random.normal(0, _NOISE, len(rows))
    rows["Sales"] = (rows["Open"] * np.exp(rule)).round().astype(int)
    rows["Customers"] = rows["Sales"] // 9
    rows = rows.sort_values(["Date", "Store"], ascending=[False, True])

    given = ["Store", "DayOfWeek", "Date", "Open", "Promo", "StateHoliday", "SchoolHoliday"]
    is_test = rows["Date"] >= "2015-08-01"
    test = rows.loc[is_test, given]
    test.insert(0, "Id", np.arange(1, len(test) + 1))
    test.to_csv(folder / "test.csv", index=False)
    rows.loc[~is_test, [*given, "Sales", "Customers"]].to_csv(folder / "train.csv", index=False)


def prepare(spark: SparkSession, folder: Path, sample: float = 1.0) -> Prepared:
    """Join the seven files and create the features. Everything runs in Spark.

    Parameters
    ----------
    spark : SparkSession
        The session.
    folder : Path
        Folder of the files.
    sample : float
        Share of the stores to keep, in training and test.
    """
    tables = {name: _read(spark, folder / f"{name}.csv") for name in FILES}
    train = tables["train"].withColumn("Id", F.lit(None).cast("string"))
    test = tables["test"].withColumn("Sales", F.lit(None).cast("string"))
    days = train.drop("Customers").unionByName(test)
    if sample < 1:
        days = days.where(F.pmod(F.hash("Store"), F.lit(1000)) < 1000 * sample)
    days = _with_typed_columns(days).cache()
    rows = _with_elapsed_days(days)
    rows = _with_store(rows, tables["store"].join(tables["store_states"], "Store"))
    rows = _with_trend(rows, tables["googletrend"])
    rows = _with_weather(
        rows, tables["weather"].join(_state_of_file(tables["state_names"]), "file")
    )
    rows = rows.cache()
    found, expected = rows.count(), days.count()
    if found != expected:
        raise SystemExit(f"{expected:,} rows of sales became {found:,} when tables were joined.")

    # The vocabularies cover all rows: a test row's values are known in advance.
    indexer = StringIndexer(inputCols=CATEGORIES, outputCols=INDEXED).fit(rows)
    sizes = dict(zip(INDEXED, map(len, indexer.labelsArray), strict=True))
    assembler = VectorAssembler(inputCols=NUMBERS, outputCol="raw_numbers")
    rows = assembler.transform(indexer.transform(rows))
    scaler = StandardScaler(inputCol="raw_numbers", outputCol="numbers", withMean=True)
    rows = scaler.fit(rows).transform(rows)

    is_test = F.col("Id").isNotNull()
    test = rows.where(is_test).select("Id", "Store", "Date", "Open", *INDEXED, "numbers")
    first, last = test.agg(F.min("Date"), F.max("Date")).head()
    last_year = F.date_add("Date", 365).between(F.lit(first), F.lit(last))
    train = rows.where(~is_test & (F.col("Sales") > 0)).select(
        *["Store", "Date", "DayOfWeek", "Promo", *INDEXED, "numbers"],
        F.log("Sales").alias(LOG_SALES),
        last_year.alias("is_validation"),
    )
    return Prepared(train, test, sizes)


def _read(spark: SparkSession, path: Path) -> DataFrame:
    # As strings: Kaggle's StateHoliday holds "0" and "a". Casts set the types where needed.
    return spark.read.csv(str(path), header=True)


def _with_typed_columns(days: DataFrame) -> DataFrame:
    date = F.to_date("Date")
    return days.select(
        "Id",
        "Store",
        date.alias("Date"),
        "DayOfWeek",
        F.year(date).cast("string").alias("Year"),
        F.month(date).cast("string").alias("Month"),
        F.dayofmonth(date).cast("string").alias("Day"),
        F.weekofyear(date).cast("string").alias("Week"),
        # In Kaggle's test rows it is missing for a store that was open.
        F.coalesce(F.col("Open") != "0", F.lit(True)).alias("Open"),
        *[F.when(F.col(name) == "0", "no").otherwise("yes").alias(name) for name in EVENTS],
        F.col("Sales").cast("double").alias("Sales"),
    )


def _with_elapsed_days(rows: DataFrame) -> DataFrame:
    """Add the days since the last and until the next of each kind of event in the store."""
    before = Window.partitionBy("Store").orderBy("Date").rowsBetween(Window.unboundedPreceding, 0)
    after = Window.partitionBy("Store").orderBy("Date").rowsBetween(0, Window.unboundedFollowing)
    for event in EVENTS:
        day = F.when(F.col(event) == "yes", F.col("Date"))
        since = F.datediff("Date", F.last(day, ignorenulls=True).over(before))
        until = F.datediff(F.first(day, ignorenulls=True).over(after), "Date")
        rows = rows.withColumn(f"After{event}", _up_to_horizon(since))
        rows = rows.withColumn(f"Before{event}", _up_to_horizon(until))
    return rows


def _up_to_horizon(days: Column) -> Column:
    return F.least(F.coalesce(days, F.lit(_HORIZON)), F.lit(_HORIZON)).cast("double")


def _with_store(rows: DataFrame, store: DataFrame) -> DataFrame:
    opened = F.make_date(
        _whole("CompetitionOpenSinceYear"), _whole("CompetitionOpenSinceMonth"), F.lit(15)
    )
    first_week = F.make_date(_whole("Promo2SinceYear"), F.lit(1), F.lit(1))
    promo2 = F.date_add(first_week, (_whole("Promo2SinceWeek") - 1) * 7)
    store = store.select(
        "Store",
        "State",
        "StoreType",
        "Assortment",
        F.coalesce("PromoInterval", F.lit("none")).alias("PromoInterval"),
        F.coalesce(F.col("CompetitionDistance").cast("double"), F.lit(1e5)).alias(
            "CompetitionDistance"
        ),
        opened.alias("opened"),
        promo2.alias("promo2"),
    )
    rows = rows.join(store, "Store")
    return (
        rows.withColumn("CompetitionMonths", _elapsed("opened", 30, 24))
        .withColumn("Promo2Weeks", _elapsed("promo2", 7, 25))
        .drop("opened", "promo2")
    )


def _whole(name: str) -> Column:
    # Some copies of Kaggle's files have "9.0", which Spark 4 does not parse as an int.
    return F.col(name).cast("double").cast("int")


def _elapsed(since: str, days: int, most: int) -> Column:
    """Return the number of elapsed periods of ``days`` days, from 0 to ``most``, as a category."""
    passed = F.coalesce(F.floor(F.datediff("Date", since) / days), F.lit(0))
    return F.greatest(F.lit(0), F.least(passed, F.lit(most))).cast("string")


def _with_trend(rows: DataFrame, trend: DataFrame) -> DataFrame:
    """Add how often the name was searched for in the week, in the state and in the country."""
    code = F.regexp_extract("file", "^Rossmann_DE_?(.*)$", 1)
    trend = trend.select(
        F.to_date(F.substring("week", 1, 10)).alias("sunday"),
        # Bremen's stores belong to Lower Saxony's group.
        F.when(code == "NI", "HB,NI").otherwise(code).alias("State"),
        F.col("trend").cast("double").alias("trend"),
    )
    country = trend.where("State = ''").select("sunday", F.col("trend").alias("trend_de"))
    rows = rows.withColumn("sunday", F.date_sub("Date", F.dayofweek("Date") - 1))
    rows = rows.join(trend.where("State <> ''"), ["sunday", "State"], "left")
    return rows.join(country, "sunday", "left").fillna(0.0, ["trend", "trend_de"]).drop("sunday")


def _state_of_file(state_names: DataFrame) -> DataFrame:
    return state_names.select(F.col("StateName").alias("file"), "State")


def _with_weather(rows: DataFrame, weather: DataFrame) -> DataFrame:
    weather = weather.select(
        "State",
        F.to_date("Date").alias("Date"),
        F.coalesce("Events", F.lit("none")).alias("Events"),
        *[F.coalesce(F.col(name).cast("double"), F.lit(0.0)).alias(name) for name in WEATHER],
    )
    return rows.join(weather, ["State", "Date"])
