"""Time `transform` against horovod.spark's, hand-written inference, and a scan of its input."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from pyspark.sql import DataFrame

from benchmarks.by_hand import in_own_workers, map_in_arrow, predict_batches
from benchmarks.common import HIDDEN, WIDTH, Net, collect, regression_data, spark_session
from benchmarks.figures import Record, parser, show_result
from benchmarks.transform_images import NETWORKS, of_images
from benchmarks.transform_times import (
    OF_HAND_WRITTEN,
    Transform,
    consume,
    measure,
    records_of,
    show,
    verdict,
)
from hvd_estimators.torch import TorchModel

TARGET = 20.0
OWN_WORKERS = "mapInArrow, its own workers"
CHECKED_ROWS = 5000
WARM_UP_ROWS = 20_000
TOLERANCE = 1e-5
OUTPUTS = 16


class Wide(torch.nn.Module):
    """A network 8-64-16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, OUTPUTS)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features.float())


def predictions(transform: Transform, frame: DataFrame) -> np.ndarray:
    """Return the predictions in the order of the rows' ids."""
    rows = sorted(transform(frame).select("id", "label__output").collect())
    return np.array([row[1].toArray() if hasattr(row[1], "toArray") else [row[1]] for row in rows])


def largest_difference(
    transforms: dict[str, Transform], frame: DataFrame, net: torch.nn.Module
) -> float:
    """Return the largest difference from the predictions of the network in this process."""
    sample = frame.where(f"id < {CHECKED_ROWS}")
    with torch.inference_mode():
        expected = net(torch.from_numpy(collect(sample.orderBy("id")).features)).numpy()
    return max(
        float(np.abs(predictions(transform, sample) - expected).max())
        for transform in transforms.values()
    )


def main() -> None:
    options_parser = parser(__doc__, rows=400_000, repeats=3)
    options_parser.add_argument("--cores", type=int, default=2, help="task slots")
    options_parser.add_argument("--images", type=int, default=4000, help="rows of images; 0: none")
    options = options_parser.parse_args()
    has_baseline = importlib.util.find_spec("petastorm") is not None
    given = {"feature_columns": ["features"], "label_columns": ["label"]}
    found: dict[str, Any] = {}
    differences = []
    records: list[Record] = []
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
                OWN_WORKERS: in_own_workers(spark, map_in_arrow(*rivals)),
            }
            if has_baseline and outputs == 1:
                from benchmarks import baseline

                predict["horovod.spark"] = baseline.make_model(net, WIDTH).transform
            measured: dict[str, Transform] = {**predict, "scan alone": lambda frame: frame}
            # Let Python workers import torch and the JVM compile before anything is measured.
            for transform in measured.values():
                consume(transform(warm_up))
            differences.append(largest_difference(predict, frame, net))
            figures = measure(measured, frame, options.repeats)
            title = f"transform: {options.rows} rows, 8-64-{outputs}, {options.cores} task slots"
            share = show(title, figures, options.rows)
            print(
                f"\n{share:.2f} of mapInArrow in the Python workers that ours runs in, which are "
                f"cheaper for it; target {OF_HAND_WRITTEN}: {verdict(share <= OF_HAND_WRITTEN)}"
            )
            met = met and share <= OF_HAND_WRITTEN
            records += records_of(f"8-64-{outputs}", figures)
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
            for name in NETWORKS:
                records += records_of(f"images, {name}", found["images"][name]["results"])
            met = met and found["images"]["target_met"]
    show_result(
        "transform",
        vars(options),
        {
            **found,
            "largest_difference": max(differences),
            "predictions_agree": agree,
            "target_met": met,
        },
        records,
    )


if __name__ == "__main__":
    main()
