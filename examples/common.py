"""Shared command-line options, Spark session and digit images of the examples."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession

# TensorFlow logs an error if there is no GPU. Spark's tasks and the ranks inherit this setting.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def make_parser(doc: str, name: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples share.

    Parameters
    ----------
    doc : str
        The script's docstring, whose first line becomes the description.
    name : str
        Prefix of the results folder.
    **defaults
        Defaults of options that differ from the shared ones.
    """
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--num-proc", type=int, default=2, help="ranks")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a rank's step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of one rank")
    parser.add_argument("--seed", type=int, default=1, help="seed of data, weights and order")
    parser.add_argument("--master", default="local[2]", help="Spark master, a task slot per rank")
    parser.add_argument(
        "--output", type=folder, default=folder(f"{name}_output"), help="folder for the results"
    )
    parser.set_defaults(**defaults)
    return parser


def folder(path: str) -> Path:
    """Return an absolute path, because Spark and the ranks have different working directories."""
    return Path(path).absolute()


def start_spark(args: argparse.Namespace, name: str, **settings: str) -> SparkSession:
    """Start a quiet session whose tasks use the Python that runs this script."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if "SPARK_HOME" not in os.environ:  # a distribution of Spark has its own settings
        os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "spark_conf"))
    # In a pipe or file, too, the lines of this program and of its fits stay in order.
    sys.stdout.reconfigure(line_buffering=True)
    args.output.mkdir(parents=True, exist_ok=True)
    settings = {
        "spark.sql.shuffle.partitions": "4",
        "spark.ui.showConsoleProgress": "false",
        **settings,
    }
    builder = SparkSession.builder.master(args.master).appName(name)
    spark = builder.config(map=settings).getOrCreate()
    # Spark's tasks also load models and functions from modules beside a script.
    for module in Path(__file__).parent.glob("*.py"):
        spark.sparkContext.addPyFile(str(module))
    return spark


def read_digits(spark: SparkSession) -> DataFrame:
    """Return scikit-learn's 1,797 images of 8 x 8: a vector ``image`` and a word ``digit``."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = [
        (Vectors.dense(image / 16), DIGITS[digit])
        for image, digit in zip(data.data, data.target, strict=True)
    ]
    return spark.createDataFrame(rows, ["image", "digit"]).repartition(4)
