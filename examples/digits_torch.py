"""Classify images of digits with TorchEstimator in a Spark ML pipeline.

The labels are words ("zero", "one", ...). ``StringIndexer`` numbers them by frequency, the network
learns the numbers, and ``IndexToString`` converts them back to words. A fifth of scikit-learn's
images is the test set, which Spark's evaluators score.

Run it with ``python examples/digits_torch.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse

import torch
from common import make_parser, read_digits, start_spark
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import IndexToString, StringIndexer
from pyspark.sql import SparkSession
from torch import nn

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator


def make_network() -> nn.Module:
    """Return a network of images, shape (batch, 1, 8, 8), to scores of ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


def make_pipeline(labels: list[str], args: argparse.Namespace) -> Pipeline:
    """Return the pipeline of indexer, network and words."""
    network = make_network()
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=args.learning_rate),
        loss=nn.functional.cross_entropy,
        feature_cols=["image"],
        label_cols=["digit_index"],
        input_shapes=[[-1, 1, 8, 8]],
        column_dtypes={"digit_index": "int64"},
        outputs_are="logits",
        predictionCol="prediction",
        probabilityCol="probability",
        validation=0.1,
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    indexer = StringIndexer(inputCol="digit", outputCol="digit_index")
    words = IndexToString(inputCol="prediction", outputCol="predicted_digit", labels=labels)
    return Pipeline(stages=[indexer, estimator, words])


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train and score; return the accuracy on the test images."""
    train, held_out = read_digits(spark).randomSplit([0.8, 0.2], seed=args.seed)
    torch.manual_seed(args.seed)
    indexer = StringIndexer(inputCol="digit", outputCol="digit_index").fit(train)
    model = make_pipeline(indexer.labels, args).fit(train)

    predictions = model.transform(held_out).cache()
    scores = {
        metric: MulticlassClassificationEvaluator(
            labelCol="digit_index", metricName=metric
        ).evaluate(predictions)
        for metric in ("accuracy", "logLoss")
    }
    print(f"\n{predictions.count()} images held out: {scores}")
    print("Most frequent mistakes:")
    mistakes = predictions.where("digit <> predicted_digit").groupBy("digit", "predicted_digit")
    mistakes.count().orderBy("count", "digit", ascending=[False, True]).show(3)
    return scores["accuracy"]


if __name__ == "__main__":
    arguments = make_parser(__doc__, "digits_torch", epochs=8).parse_args()
    with start_spark(arguments, "digits_torch") as session:
        run(session, arguments)
