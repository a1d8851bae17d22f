"""Predict with one model in four ways: a batch, a SQL query, a stream, and without Spark.

A small network learns scikit-learn's digits and is saved with its pipeline. The script then loads
it and predicts the same images

* of a DataFrame (``transform``),
* in SQL (``as_udf``),
* of a stream of Parquet files that arrive in a folder, with a checkpoint, so that a restarted query
  predicts only new files,
* in a plain Python process that needs no Spark (``load_predictor``).

All four must agree up to rounding; the script prints the result of the comparison.

Run it with ``python examples/streaming.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from common import make_parser, read_digits, start_spark
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import StringIndexer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator, load_predictor

OUTPUT = "scores"


def train(digits: DataFrame, args: argparse.Namespace) -> Path:
    """Train a pipeline, save it, and return its path."""
    torch.manual_seed(args.seed)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=args.learning_rate),
        loss=nn.functional.cross_entropy,
        feature_cols=["image"],
        label_cols=["digit_index"],
        column_dtypes={"digit_index": "int64"},
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    indexer = StringIndexer(inputCol="digit", outputCol="digit_index", handleInvalid="keep")
    fitted = Pipeline(stages=[indexer, estimator]).fit(digits)
    fitted.stages[-1].setOutputCols([OUTPUT])
    path = args.output / "pipeline"
    fitted.write().overwrite().save(str(path))
    return path


def by_stream(spark: SparkSession, model: PipelineModel, folder: Path, output: Path) -> DataFrame:
    """Predict the files in a folder as a stream; a later call predicts only files added since."""
    schema = spark.read.parquet(str(folder)).schema
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))
    query = (
        model.transform(stream)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(output / "checkpoint"))
        .trigger(availableNow=True)  # leave it out for an endless query
        .start(str(output / "predictions"))
    )
    query.awaitTermination()
    batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    rows = sum(progress["numInputRows"] for progress in batches)
    print(f"stream: {len(batches)} batches of {rows} rows in all")
    return spark.read.parquet(str(output / "predictions"))


def collect(predictions: DataFrame) -> np.ndarray:
    """Return the scores, shape (rows, 10), in the order of the row numbers."""
    rows = predictions.select("row", OUTPUT).orderBy("row").collect()
    # transform returns an ML vector, SQL an array.
    return np.array([list(row[OUTPUT]) for row in rows])


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Train, and predict in each way."""
    digits = read_digits(spark).withColumn("row", F.monotonically_increasing_id()).cache()
    path = train(digits, args)
    model = PipelineModel.load(str(path))

    scores = {"batch": collect(model.transform(digits))}

    model.stages[-1].as_udf("scores_of")
    digits.createOrReplaceTempView("digits")
    scores["SQL"] = collect(spark.sql(f"select row, scores_of(image) as {OUTPUT} from digits"))

    incoming, streamed = args.output / "incoming", args.output / "streamed"
    for folder in (incoming, streamed):
        shutil.rmtree(folder, ignore_errors=True)
    first_half = F.col("row") % 2 == 0
    digits.where(first_half).write.parquet(str(incoming))
    by_stream(spark, model, incoming, streamed)
    digits.where(~first_half).write.mode("append").parquet(str(incoming))
    scores["stream"] = collect(by_stream(spark, model, incoming, streamed))

    # Each stage of a saved pipeline is a separate folder.
    (stage,) = (path / "stages").glob("1_*")
    predictor = load_predictor(str(stage))
    frame = digits.orderBy("row").toPandas()
    images = np.stack([image.toArray() for image in frame["image"]])
    scores["without Spark"] = np.asarray(predictor.predict({"image": images})[OUTPUT])

    indices = model.stages[0].labelsArray[0]
    words = np.array(indices)[scores["batch"].argmax(axis=1)]
    print(f"{np.mean(words == frame['digit']):.1%} of {len(frame)} digits are right")
    for name, found in scores.items():
        same = "the same" if np.allclose(found, scores["batch"], rtol=1e-5) else "DIFFERENT"
        print(f"{name:<14}{found.shape[0]} rows, {same} scores")


if __name__ == "__main__":
    arguments = make_parser(__doc__, "streaming", learning_rate=5e-3).parse_args()
    with start_spark(arguments, "streaming") as session:
        run(session, arguments)
