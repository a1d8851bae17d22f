"""Search learning rates and network widths with Spark's CrossValidator.

A network predicts from ten measurements of cells whether a tumour is benign (scikit-learn's breast
cancer data). Each grid point trains on three folds, with two parallel fits of one rank each. The
rows of a fold are written once for all of them. The baseline is Spark's logistic regression on the
same rows.

Run it with ``python examples/cross_validation.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse

import torch
from common import make_parser, start_spark
from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import StandardScaler, VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator

LABEL = "is benign"
WIDTHS = (4, 32)


def make_network(width: int) -> nn.Module:
    """Return a network of ten numbers to a single score; above 0 means benign."""
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 1))


def read_tumours(spark: SparkSession) -> DataFrame:
    """Return the means of ten measurements of 569 tumours, and the label."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    frame = data.frame.iloc[:, :10]  # columns such as "mean concave points"
    frame[LABEL] = data.target.astype(float)
    return spark.createDataFrame(frame).repartition(2)


def split_tumours(spark: SparkSession, seed: int) -> tuple[DataFrame, DataFrame]:
    """Return training rows and rows held out, with standardized measurements as ``features``."""
    train, held_out = read_tumours(spark).randomSplit([0.75, 0.25], seed=seed)
    measured = [name for name in train.columns if name != LABEL]
    features = Pipeline(
        stages=[
            VectorAssembler(inputCols=measured, outputCol="raw"),
            StandardScaler(inputCol="raw", outputCol="features", withMean=True),
        ]
    ).fit(train)
    return features.transform(train), features.transform(held_out)


def make_search(args: argparse.Namespace) -> CrossValidator:
    """Return the search over learning rates and networks."""
    networks = [make_network(width) for width in WIDTHS]
    optimizers = [torch.optim.Adam(network.parameters()) for network in networks]
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=networks[0],
        optimizer=optimizers[0],
        loss=nn.functional.binary_cross_entropy_with_logits,
        featuresCol="features",
        labelCol=LABEL,
        outputs_are="logits",
        rawPredictionCol="rawPrediction",
        predictionCol="prediction",
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=0,
    )
    rates = [args.learning_rate / 10, args.learning_rate * 10]
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, rates).build()
    # Set a network and its optimizer together: each optimizer holds its network's parameters.
    points = [
        {**point, estimator.model: network, estimator.optimizer: optimizer}
        for point in grid
        for network, optimizer in zip(networks, optimizers, strict=True)
    ]
    return CrossValidator(
        estimator=estimator,
        estimatorParamMaps=points,
        evaluator=BinaryClassificationEvaluator(labelCol=LABEL),
        numFolds=args.folds,
        parallelism=2,
        seed=args.seed,
    )


def print_grid(model: CrossValidatorModel) -> None:
    """Print the mean score of each grid point over the folds."""
    print(f"\n{'learning rate':>14}{'width':>7}   area under ROC")
    for point, score in zip(model.getEstimatorParamMaps(), model.avgMetrics, strict=True):
        values = {param.name: value for param, value in point.items()}
        width = values["model"][0].out_features
        print(f"{values['learning_rate']:>14g}{width:>7}   {score:.4f}")


def run(spark: SparkSession, args: argparse.Namespace) -> dict[str, float]:
    """Search, and return the scores of the best grid point on the test rows."""
    train, held_out = (rows.cache() for rows in split_tumours(spark, args.seed))
    torch.manual_seed(args.seed)
    model = make_search(args).fit(train)
    print_grid(model)
    evaluator = BinaryClassificationEvaluator(labelCol=LABEL)
    linear = LogisticRegression(labelCol=LABEL, regParam=0.01, maxIter=20).fit(train)
    scores = {
        "best network": evaluator.evaluate(model.transform(held_out)),
        "logistic regression": evaluator.evaluate(linear.transform(held_out)),
    }
    print("\nArea under ROC on rows held out")
    for name, score in scores.items():
        print(f"{name:<22}{score:.4f}")
    return scores


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "cross_validation", num_proc=1, epochs=10)
    parser.add_argument("--folds", type=int, default=3, help="parts that the rows are cut into")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "cross_validation") as session:
        run(session, arguments)
