"""Time `transform` against horovod.spark's, hand-written inference, and a scan of its input.

Images go through three convolutions. They are compared with hand-written inference, too, and with
only transferring them to Python. The JVM compiles the code of each way for about ten turns.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.by_hand import in_own_workers, map_in_arrow, moved_alone
from benchmarks.common import WIDTH, Net, collect, consume, regression_data, spark_and_folder
from benchmarks.figures import compared, in_turns, options, show_result
from hvd_estimators.torch import TorchModel

BY_HAND = "mapInArrow"
IMAGE, OUTPUTS = (3, 64, 64), 10
CHECKED_ROWS = 5000
WARM_UP_ROWS = 20_000
TOLERANCE = 1e-5
SHARE_OF_TURNS = 5
"""horovod.spark, which takes more than 20 times as long, has one of this many turns."""

Transform = Callable[[DataFrame], DataFrame]


def measure(
    ways: dict[str, Transform], warm_up: DataFrame, frame: DataFrame, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of each way."""
    # Let Python workers import torch and the JVM compile before anything is measured.
    for way in ways.values():
        consume(way(warm_up))
    return in_turns({n: functools.partial(_run, way, frame) for n, way in ways.items()}, repeats)


def _run(way: Transform, frame: DataFrame) -> None:
    consume(way(frame))


def of_rows(spark: SparkSession, rows: int, repeats: int) -> dict[str, list[float]]:
    """Measure a network 8-64-1; predictions must be those of the network in this process."""
    net = Net().eval()
    by_hand = map_in_arrow(spark, net, "features", (WIDTH,), 1)
    ours = TorchModel(
        model=net, feature_columns=["features"], label_columns=["label"], input_shapes=[[-1, WIDTH]]
    )
    ways: dict[str, Transform] = {
        "hvd_estimators": ours.transform,
        BY_HAND: by_hand,
        "mapInArrow, its own workers": in_own_workers(spark, by_hand),
    }
    slow: dict[str, Transform] = {}
    if importlib.util.find_spec("petastorm") is not None:
        from benchmarks import baseline

        slow["horovod.spark"] = baseline.make_model(net, WIDTH).transform
    frame = regression_data(spark, rows)
    sample = frame.where(f"id < {CHECKED_ROWS}")
    with torch.inference_mode():
        expected = net(torch.from_numpy(collect(sample.orderBy("id")).features)).numpy()
    for way in (*ways.values(), *slow.values()):
        found = sorted(way(sample).select("id", "label__output").collect())
        values = [row[1].toArray() if hasattr(row[1], "toArray") else [row[1]] for row in found]
        np.testing.assert_allclose(np.array(values), expected, atol=TOLERANCE)
    ways["scan alone"] = lambda frame: frame
    warm_up = regression_data(spark, WARM_UP_ROWS)
    few = max(1, repeats // SHARE_OF_TURNS)
    return {**measure(ways, warm_up, frame, repeats), **measure(slow, warm_up, frame, few)}


def convolutions() -> torch.nn.Module:
    """Return three convolutions and a number for each class."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, 2, 1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, 2, 1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, 2, 1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 64, OUTPUTS),
    )


def image_data(spark: SparkSession, rows: int, tasks: int) -> DataFrame:
    """Return ``id, image``: arrays of floats, cached."""
    pixel = F.lit(1.0).cast("float")
    items = F.transform(
        F.array_repeat(pixel, int(np.prod(IMAGE))),
        lambda one, index: (one * ((F.col("id") * 31 + index) % 255) / 255).cast("float"),
    )
    frame = spark.range(0, rows, 1, 4 * tasks).select("id", items.alias("image")).cache()
    frame.count()
    return frame


def of_images(
    spark: SparkSession, net: torch.nn.Module, frame: DataFrame, repeats: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Measure a network with ten outputs."""
    ours = TorchModel(
        model=net, feature_columns=["image"], label_columns=["label"], input_shapes=[[-1, *IMAGE]]
    )
    ways: dict[str, Transform] = {
        "hvd_estimators": ours.transform,
        BY_HAND: map_in_arrow(spark, net, "image", IMAGE, OUTPUTS, device),
        "to Python alone": moved_alone,
        "scan alone": lambda frame: frame,
    }
    return measure(ways, frame.where("id < 200"), frame, repeats)


def main() -> None:
    given = options(__doc__, rows=400_000, images=4000, repeats=15, cores=2)
    with spark_and_folder(given.cores) as (spark, _):
        rows = of_rows(spark, given.rows, given.repeats)
        frame = image_data(spark, given.images, given.cores)
        images = of_images(spark, convolutions().eval(), frame, given.repeats)
    records = [
        *compared("8-64-1", rows, "s", BY_HAND),
        *compared("images, three convolutions", images, "s", BY_HAND),
    ]
    show_result("transform", vars(given), records)


if __name__ == "__main__":
    main()
