"""Time `transform` against horovod.spark's, inference written by hand, and a scan of its input."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.by_hand import forward_seconds, map_in_arrow, predict_batches
from benchmarks.common import HIDDEN, WIDTH, Net, collect, regression_data, spark_session
from benchmarks.figures import parser, seconds, show_result, show_table
from hvd_estimators.torch import TorchModel

TARGET = 20.0
OF_HAND_WRITTEN = 1.1
CHECKED_ROWS = 5000
WARM_UP_ROWS = 20_000
TOLERANCE = 1e-5
OUTPUTS = 16
IMAGE = (3, 64, 64)
IMAGE_BYTES = 8 * 3 * 64 * 64

Transform = Callable[[DataFrame], DataFrame]


class Wide(torch.nn.Module):
    """8-64-16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, OUTPUTS)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features.float())


class OfImages(torch.nn.Module):
    """Three convolutions and a number for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, 2, 1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, 2, 1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, 2, 1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(64 * 64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def consume(frame: DataFrame) -> None:
    """Compute every row and every column, and keep none."""
    frame.write.format("noop").mode("overwrite").save()


def image_data(spark: SparkSession, rows: int, partitions: int) -> DataFrame:
    """Return ``id, image``: arrays of floats, cached."""
    pixel = F.lit(1.0).cast("float")
    items = F.transform(
        F.array_repeat(pixel, int(np.prod(IMAGE))),
        lambda one, index: (one * ((F.col("id") * 31 + index) % 255) / 255).cast("float"),
    )
    frame = spark.range(0, rows, 1, partitions).select("id", items.alias("image")).cache()
    frame.count()
    return frame


def predictions(transform: Transform, frame: DataFrame) -> np.ndarray:
    """Return the predictions in the order of the rows' ids."""
    rows = sorted(transform(frame).select("id", "label__output").collect())
    return np.array([row[1].toArray() if hasattr(row[1], "toArray") else [row[1]] for row in rows])


def largest_difference(
    transforms: dict[str, Transform], frame: DataFrame, net: torch.nn.Module
) -> float:
    """Return how far predictions are from those of the network called in this process."""
    sample = frame.where(f"id < {CHECKED_ROWS}")
    with torch.inference_mode():
        expected = net(torch.from_numpy(collect(sample.orderBy("id")).features)).numpy()
    return max(
        float(np.abs(predictions(transform, sample) - expected).max())
        for transform in transforms.values()
    )


def measure(measured: dict[str, Transform], frame: DataFrame, repeats: int) -> dict[str, Any]:
    """Return the seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repeats):
        for name, transform in measured.items():
            times[name].append(seconds(lambda call=transform: consume(call(frame))))
    return {name: {"seconds": min(t), "all_seconds": t} for name, t in times.items()}


def show(title: str, figures: dict[str, Any], rows: int) -> float:
    """Print a table, and return our time as a share of that of a hand-written `mapInArrow`."""
    by_hand = figures["mapInArrow"]["seconds"]
    show_table(
        title,
        ["", "seconds", "rows/s", "of mapInArrow"],
        [
            [name, f["seconds"], int(rows / f["seconds"]), f["seconds"] / by_hand]
            for name, f in figures.items()
        ],
    )
    return float(figures["hvd_estimators"]["seconds"] / by_hand)


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def main() -> None:
    options_parser = parser(__doc__, rows=400_000, repeats=3)
    options_parser.add_argument("--cores", type=int, default=2, help="task slots")
    options_parser.add_argument("--images", type=int, default=4000, help="rows of images; 0: none")
    options = options_parser.parse_args()
    has_baseline = importlib.util.find_spec("petastorm") is not None
    given = {"feature_columns": ["features"], "label_columns": ["label"]}
    found: dict[str, Any] = {}
    differences = []
    met = True
    with spark_session(options.cores) as spark:
        warm_up = regression_data(spark, WARM_UP_ROWS)
        frame = regression_data(spark, options.rows)
        for outputs in (1, OUTPUTS):
            net = (Net() if outputs == 1 else Wide()).eval()
            ours = TorchModel(model=net, input_shapes=[[-1, WIDTH]], **given)
            rivals = (spark, net, "features", (WIDTH,), outputs)
            predict: dict[str, Transform] = {
                "hvd_estimators": ours.transform,
                "mapInArrow": map_in_arrow(*rivals),
                "predict_batch_udf": predict_batches(*rivals),
            }
            if has_baseline and outputs == 1:
                from benchmarks import baseline

                predict["horovod.spark"] = baseline.make_model(net, WIDTH).transform
            measured: dict[str, Transform] = {**predict, "scan alone": lambda frame: frame}
            # Python workers import torch, and the JVM compiles, before anything is measured.
            for transform in measured.values():
                consume(transform(warm_up))
            differences.append(largest_difference(predict, frame, net))
            figures = measure(measured, frame, options.repeats)
            title = f"transform: {options.rows} rows, 8-64-{outputs}, {options.cores} task slots"
            share = show(title, figures, options.rows)
            print(f"\n{share:.2f} of mapInArrow; target 1.1: {verdict(share <= OF_HAND_WRITTEN)}")
            met = met and share <= OF_HAND_WRITTEN
            found[f"8-64-{outputs}"] = {"results": figures, "of_map_in_arrow": share}
            if "horovod.spark" in figures:
                speedup = figures["horovod.spark"]["seconds"] / figures["hvd_estimators"]["seconds"]
                print(
                    f"{speedup:.1f} times as fast as horovod.spark's; target {TARGET:g}: "
                    f"{verdict(speedup >= TARGET)}"
                )
                found["speedup"] = speedup
                met = met and speedup >= TARGET
        agree = max(differences) <= TOLERANCE
        print(
            f"predictions are within {max(differences):.1e} of the networks' own "
            f"({'agree' if agree else 'DO NOT AGREE'})"
        )
        if options.images:
            found["images"] = of_images(spark, options.images, options.cores, options.repeats)
            met = met and found["images"]["of_forward"] <= OF_HAND_WRITTEN
    show_result(
        "transform",
        vars(options),
        {
            **found,
            "largest_difference": max(differences),
            "predictions_agree": agree,
            "target_met": met,
        },
    )


def of_images(spark: SparkSession, rows: int, cores: int, repeats: int) -> dict[str, Any]:
    """Return what is measured with images, beside forward passes alone."""
    net = OfImages().eval()
    ours = TorchModel(
        model=net,
        feature_columns=["image"],
        label_columns=["label"],
        input_shapes=[[-1, *IMAGE]],
    )
    measured: dict[str, Transform] = {
        "hvd_estimators": ours.transform,
        "mapInArrow": map_in_arrow(spark, net, "image", IMAGE, 10),
        "scan alone": lambda frame: frame,
    }
    frame = image_data(spark, rows, 4 * cores)
    for transform in measured.values():
        consume(transform(frame.where("id < 200")))
    batch_rows = 2**25 // IMAGE_BYTES
    forward, figures = [], []
    for _ in range(repeats):
        forward.append(forward_seconds(net, IMAGE, rows, batch_rows, cores))
        figures.append(measure(measured, frame, 1))
    best = {
        name: min((turn[name] for turn in figures), key=lambda entry: entry["seconds"])
        for name in measured
    }
    show(f"transform: {rows} images of 64x64x3, {cores} task slots", best, rows)
    share = best["hvd_estimators"]["seconds"] / min(forward)
    print(
        f"\n{share:.2f} of the forward passes alone ({min(forward):.2f} s); target "
        f"{OF_HAND_WRITTEN}: {verdict(share <= OF_HAND_WRITTEN)}"
    )
    return {"results": best, "forward_seconds": min(forward), "of_forward": share}


if __name__ == "__main__":
    main()
