"""Time `prepare_data` and `transform` of 10 to 3,000 columns against a plain write and mapInArrow.

The columns are single numbers, and one matrix is the model's input. With fewer rows than some
thousand, the JVM interprets most of the code that Spark generates for so many columns, and
`prepare_data` writes more files than the plain write does. The ratios are those of one run, in
which the order of the ways rotates.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from pyspark.sql import DataFrame

from benchmarks.common import spark_session
from benchmarks.figures import Record, compared, parser, seconds, show_result, show_table
from hvd_estimators import prepare_data
from hvd_estimators.torch import TorchModel

OVER_PLAIN = 1.5
"""Maximum time of `prepare_data` as a multiple of the plain write's."""

PREPARE, UNSHUFFLED, PLAIN = "prepare_data", "prepare_data, not shuffled", "plain write"
PLAN, TRANSFORM = "transform, planning", "transform"
PLAN_BY_HAND, BY_HAND = "mapInArrow, planning", "mapInArrow"
WIDTHS = (10, 300, 1000, 3000)


def write_rows(folder: Path, rows: int, width: int) -> str:
    """Write columns of 64-bit floats and a label, and return their path."""
    rng = np.random.default_rng(0)
    names = [*(f"c{number}" for number in range(width)), "label"]
    folder.mkdir()
    parquet.write_table(pa.table({n: rng.normal(size=rows) for n in names}), folder / "0.parquet")
    return str(folder)


class Ways:
    """Writers and predictions of the same rows."""

    def __init__(self, frame: DataFrame, width: int, folder: Path) -> None:
        self.frame = frame
        self.width = width
        self.folder = folder
        self.numbers = itertools.count()
        self.names = [f"c{number}" for number in range(width)]
        self.model = TorchModel(
            model=torch.nn.Linear(width, 1),
            feature_columns=[self.names],
            label_columns=["label"],
            input_shapes=[[-1, width]],
            outputCols=["output"],
        )

    def prepare(self, *, shuffle: bool) -> None:
        store = str(self.folder / "store")
        with prepare_data(2, store, self.frame, ["label"], shuffle_on_write=shuffle):
            pass

    def write(self) -> None:
        self.frame.write.parquet(f"file://{self.folder}/{next(self.numbers)}")

    def transform(self) -> DataFrame:
        return self.model.transform(self.frame)

    def by_hand(self) -> DataFrame:
        layer, names = self.model.getModel(), self.names

        def predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                columns = [batch.column(name).to_numpy() for name in names]
                with torch.inference_mode():
                    output = layer(torch.from_numpy(np.stack(columns, axis=1)).float())
                values = pa.array(output.numpy().reshape(-1).astype(np.float64))
                yield pa.RecordBatch.from_arrays([values], ["output"])

        return self.frame.mapInArrow(predict, "output double")

    def predict(self, taken: dict[str, list[float]], plan: str, run: str) -> None:
        """Time the plan and the run of a prediction."""
        make: Callable[[], DataFrame] = self.transform if plan == PLAN else self.by_hand
        made: list[DataFrame] = []
        taken[plan].append(seconds(lambda: made.append(make())))
        output = made[0].select("output").write.format("noop").mode("overwrite")
        taken[run].append(seconds(output.save))

    def predictions(self, frame: DataFrame) -> np.ndarray:
        return np.array([row[0] for row in frame.select("output").collect()])


def measure(ways: Ways, repeats: int) -> dict[str, list[float]]:
    """Prepare and predict in each way in turn."""
    names = (PREPARE, UNSHUFFLED, PLAIN, PLAN, TRANSFORM, PLAN_BY_HAND, BY_HAND)
    taken: dict[str, list[float]] = {name: [] for name in names}
    writes: list[tuple[str, Callable[[], None]]] = [
        (PREPARE, lambda: ways.prepare(shuffle=True)),
        (UNSHUFFLED, lambda: ways.prepare(shuffle=False)),
        (PLAIN, ways.write),
    ]
    for _ in range(repeats):
        for name, way in writes:
            taken[name].append(seconds(way))
        writes.append(writes.pop(0))
        ways.predict(taken, PLAN, TRANSFORM)
        ways.predict(taken, PLAN_BY_HAND, BY_HAND)
        print(", ".join(f"{name}: {each[-1]:.2f} s" for name, each in taken.items()), flush=True)
    return taken


def main() -> None:
    options_parser = parser(__doc__, rows=20_000, repeats=2)
    options_parser.add_argument("--cores", type=int, default=2, help="task slots")
    options_parser.add_argument(
        "--widths", type=int, nargs="+", default=WIDTHS, help="numbers of columns"
    )
    options = options_parser.parse_args()
    found: dict[str, Any] = {}
    records: list[Record] = []
    with (
        spark_session(options.cores) as spark,
        tempfile.TemporaryDirectory(prefix="hvd-estimators-bench-") as name,
    ):
        for number, width in enumerate((min(options.widths), *options.widths)):
            folder = Path(name, str(number))
            folder.mkdir()
            frame = spark.read.parquet(write_rows(folder / "rows", options.rows, width))
            ways = Ways(frame, width, folder)
            if number == 0:
                # Let the JVM compile the shared code before any way is measured.
                measure(ways, 1)
                continue
            agree = np.allclose(
                ways.predictions(ways.transform()), ways.predictions(ways.by_hand()), atol=1e-4
            )
            taken = measure(ways, options.repeats)
            best = {name: min(each) for name, each in taken.items()}
            over_plain = best[PREPARE] / best[PLAIN]
            of_by_hand = best[TRANSFORM] / best[BY_HAND]
            title = f"{width} columns"
            show_table(
                f"{title}: {options.rows} rows, {options.cores} task slots (best of "
                f"{options.repeats})",
                ["", "seconds"],
                [[name, value] for name, value in best.items()],
            )
            met = over_plain <= OVER_PLAIN
            print(
                f"\n{title}: prepare_data takes {over_plain:.2f} times as long as the plain write "
                f"(target {OVER_PLAIN:g}: {'met' if met else 'MISSED'}), and transform "
                f"{of_by_hand:.2f} times as long as mapInArrow; predictions "
                f"{'agree' if agree else 'DO NOT AGREE'}"
            )
            found[title] = {
                "seconds": best,
                "over_plain": over_plain,
                "of_map_in_arrow": of_by_hand,
                "predictions_agree": bool(agree),
                "target_met": met,
            }
            writes = {name: taken[name] for name in (PREPARE, UNSHUFFLED, PLAIN)}
            runs = {name: taken[name] for name in (TRANSFORM, BY_HAND)}
            records += compared(f"{title}, write", writes, "s", PLAIN)
            records += compared(f"{title}, prediction", runs, "s", BY_HAND)
    show_result("columns", vars(options), {"results": found}, records)


if __name__ == "__main__":
    main()
