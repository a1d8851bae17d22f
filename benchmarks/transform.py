"""Time `transform` against horovod.spark's and a scan of its input alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from pyspark.sql import DataFrame

from benchmarks.common import WIDTH, Net, collect, need_baseline, regression_data, spark_session
from benchmarks.figures import parser, seconds, show_result, show_table
from hvd_estimators.torch import TorchModel

TARGET = 15.0
CHECKED_ROWS = 5000
WARM_UP_ROWS = 4000
TOLERANCE = 1e-5

Transform = Callable[[DataFrame], DataFrame]


def consume(frame: DataFrame) -> None:
    """Compute every row and every column, and keep none."""
    frame.write.format("noop").mode("overwrite").save()


def predictions(transform: Transform, frame: DataFrame) -> np.ndarray:
    """Return the predictions in the order of the rows' ids."""
    rows = transform(frame).select("id", "label__output").collect()
    return np.array([row[1] for row in sorted(rows)])


def largest_difference(transforms: dict[str, Transform], frame: DataFrame, net: Net) -> float:
    """Return how far predictions are from those of the network called in this process."""
    sample = frame.where(f"id < {CHECKED_ROWS}")
    with torch.inference_mode():
        expected = net(torch.from_numpy(collect(sample.orderBy("id")).features)).numpy().ravel()
    return max(
        float(np.abs(predictions(transform, sample) - expected).max())
        for transform in transforms.values()
    )


def main() -> None:
    options_parser = parser(__doc__, rows=400_000, repeats=3)
    options_parser.add_argument("--cores", type=int, default=2, help="task slots")
    options = options_parser.parse_args()
    need_baseline()
    from benchmarks import baseline

    net = Net().eval()
    ours = TorchModel(
        model=net,
        feature_columns=["features"],
        label_columns=["label"],
        input_shapes=[[-1, WIDTH]],
    )
    predict: dict[str, Transform] = {
        "hvd_estimators": ours.transform,
        "horovod.spark": baseline.make_model(net, WIDTH).transform,
    }
    with spark_session(options.cores) as spark:
        # Python workers import torch, and the JVM compiles, before anything is measured.
        warm_up = regression_data(spark, WARM_UP_ROWS)
        measured: dict[str, Transform] = {**predict, "scan alone": lambda frame: frame}
        for transform in measured.values():
            consume(transform(warm_up))
        frame = regression_data(spark, options.rows)
        difference = largest_difference(predict, frame, net)
        times: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(options.repeats):
            for name, transform in measured.items():
                times[name].append(seconds(lambda call=transform: consume(call(frame))))
    figures = {name: {"seconds": min(t), "all_seconds": t} for name, t in times.items()}
    baseline_seconds = figures["horovod.spark"]["seconds"]
    our_seconds = figures["hvd_estimators"]["seconds"]
    show_table(
        f"transform: {options.rows} rows, {options.cores} task slots (best of {options.repeats})",
        ["", "seconds", "rows/s", "of horovod.spark"],
        [
            [name, f["seconds"], int(options.rows / f["seconds"]), f["seconds"] / baseline_seconds]
            for name, f in figures.items()
        ],
    )
    speedup = baseline_seconds / our_seconds
    met, agree = speedup >= TARGET, difference <= TOLERANCE
    print(
        f"\ntransform is {speedup:.1f} times as fast as horovod.spark's; target {TARGET:g}: ",
        end="",
    )
    print("met" if met else "MISSED")
    print(
        f"predictions are within {difference:.1e} of the network's own "
        f"({'agree' if agree else 'DO NOT AGREE'})"
    )
    show_result(
        "transform",
        vars(options),
        {
            "results": figures,
            "speedup": speedup,
            "over_scan": our_seconds / figures["scan alone"]["seconds"],
            "largest_difference": difference,
            "predictions_agree": agree,
            "target_met": met,
        },
    )


if __name__ == "__main__":
    main()
