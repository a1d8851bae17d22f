"""Time `transform` of images against forward passes alone and against transferring the images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.by_hand import forward_seconds, map_in_arrow, moved_alone
from benchmarks.transform_times import OF_HAND_WRITTEN, Transform, consume, measure, show, verdict
from hvd_estimators.torch import TorchModel

IMAGE = (3, 64, 64)
BATCH_ROWS = 2**25 // (8 * 3 * 64 * 64)
"""Rows that `transform` passes to the model at a time."""

SHARE_OF_DEEP = 4
"""The deep network takes a hundred times as long, so it gets only one of this many rows."""


NETWORKS = ("three convolutions", "fourteen convolutions")


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


class Residual(torch.nn.Module):
    """Six residual blocks and a number for each class: 0.45 G multiplications an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 64, 3, 2, 1)
        self.first = torch.nn.ModuleList(_block(64) for _ in range(3))
        self.between = torch.nn.Conv2d(64, 128, 3, 2, 1)
        self.second = torch.nn.ModuleList(_block(128) for _ in range(3))
        self.head = torch.nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.stem(images)
        for block in self.first:
            found = torch.relu(found + block(found))
        found = self.between(found)
        for block in self.second:
            found = torch.relu(found + block(found))
        return self.head(found.mean((2, 3)))


def _block(channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, channels, 3, 1, 1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(channels, channels, 3, 1, 1),
    )


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


def of_images(spark: SparkSession, rows: int, cores: int, repeats: int) -> dict[str, Any]:
    """Return the measurements with a small and a deep network, including forward passes alone.

    The target applies to the deep network. The small one computes for less time than Spark takes to
    transfer the images to Python, which is also measured.
    """
    frame = image_data(spark, rows, 4 * cores)
    found: dict[str, Any] = {}
    for name, net, count in (
        (NETWORKS[0], OfImages(), rows),
        (NETWORKS[1], Residual(), rows // SHARE_OF_DEEP),
    ):
        chosen = frame.where(f"id < {count}").repartition(4 * cores).cache()
        chosen.count()
        found[name] = _of_network(spark, name, net.eval(), chosen, count, cores, repeats)
    found["target_met"] = found[NETWORKS[1]]["of_forward"] <= OF_HAND_WRITTEN
    return found


def _of_network(
    spark: SparkSession,
    name: str,
    net: torch.nn.Module,
    frame: DataFrame,
    rows: int,
    cores: int,
    repeats: int,
) -> dict[str, Any]:
    ours = TorchModel(
        model=net,
        feature_columns=["image"],
        label_columns=["label"],
        input_shapes=[[-1, *IMAGE]],
    )
    measured: dict[str, Transform] = {
        "hvd_estimators": ours.transform,
        "mapInArrow": map_in_arrow(spark, net, "image", IMAGE, 10),
        "to Python alone": moved_alone,
        "scan alone": lambda frame: frame,
    }
    for transform in measured.values():
        consume(transform(frame.where("id < 200")))
    forward, figures = [], []
    for _ in range(repeats):
        forward.append(forward_seconds(net, IMAGE, rows, BATCH_ROWS, cores))
        figures.append(measure(measured, frame, 1))
    taken = {name: [turn[name]["seconds"] for turn in figures] for name in measured}
    taken["forward passes alone"] = forward
    best = {name: {"seconds": min(each), "all_seconds": each} for name, each in taken.items()}
    show(f"transform: {rows} images of 64x64x3, {name}, {cores} task slots", best, rows)
    share = best["hvd_estimators"]["seconds"] / min(forward)
    print(
        f"\n{share:.2f} of the forward passes alone ({min(forward):.2f} s); target "
        f"{OF_HAND_WRITTEN} for the deep network: {verdict(share <= OF_HAND_WRITTEN)}"
    )
    return {"results": best, "forward_seconds": min(forward), "of_forward": share}
