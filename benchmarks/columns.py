"""Time `transform` of 10 to 3,000 columns against a mapInArrow that stacks the same columns.

The columns are single numbers, and one matrix of them is the model's input. There are few rows, so
that the cost of a column counts. The times include planning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from pyspark.sql import DataFrame

from benchmarks.common import consume, spark_and_folder
from benchmarks.figures import Record, compared, in_turns, options, show_result
from hvd_estimators.torch import TorchModel

OURS, BY_HAND = "transform", "mapInArrow"


def write_rows(folder: Path, rows: int, width: int) -> str:
    """Write columns of 64-bit floats, and return their path."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    table = pa.table({f"c{number}": rng.normal(size=rows) for number in range(width)})
    parquet.write_table(table, folder / "0.parquet")
    return str(folder)


def predictions_of(frame: DataFrame, width: int) -> dict[str, Callable[[], DataFrame]]:
    """Return the two ways to predict with the same layer."""
    names = [f"c{number}" for number in range(width)]
    model = TorchModel(
        model=torch.nn.Linear(width, 1),
        feature_columns=[names],
        label_columns=["label"],
        input_shapes=[[-1, width]],
        outputCols=["output"],
    )
    layer = model.getModel()

    def predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [batch.column(name).to_numpy() for name in names]
            with torch.inference_mode():
                output = layer(torch.from_numpy(np.stack(columns, axis=1)).float())
            values = pa.array(output.numpy().reshape(-1).astype(np.float64))
            yield pa.RecordBatch.from_arrays([values], ["output"])

    return {
        OURS: lambda: model.transform(frame).select("output"),
        BY_HAND: lambda: frame.mapInArrow(predict, "output double"),
    }


def main() -> None:
    given = options(__doc__, rows=20_000, repeats=2, cores=2, widths=(10, 300, 1000, 3000))
    records: list[Record] = []
    with spark_and_folder(given.cores) as (spark, folder):
        for width in given.widths:
            frame = spark.read.parquet(write_rows(folder / str(width), given.rows, width))
            ways = predictions_of(frame, width)
            ours, by_hand = (np.array([r[0] for r in way().collect()]) for way in ways.values())
            np.testing.assert_allclose(ours, by_hand, atol=1e-4)
            consumed = {name: lambda way=way: consume(way()) for name, way in ways.items()}
            taken = in_turns(consumed, given.repeats, warm_up=1)
            records += compared(f"{width} columns, prediction", taken, "s", BY_HAND)
    show_result("columns", vars(given), records)


if __name__ == "__main__":
    main()
