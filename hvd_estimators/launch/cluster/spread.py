"""Call a function with parts of the work in Spark tasks.

Runs on the driver, except where noted.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import cloudpickle
import pyarrow as pa

from hvd_estimators._util.spark_session import current_session
from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.launch.cluster.connect import current_cluster
from hvd_estimators.launch.cluster.jobs import spark_job

A = TypeVar("A")
B = TypeVar("B")


def spread_over_tasks(
    function: Callable[[Sequence[A]], list[B]],
    parts: Sequence[Sequence[A]],
    *,
    description: str,
) -> list[list[B]]:
    """Call a function with each part in Spark's tasks, and return the results in their order.

    Parameters
    ----------
    function : callable
        Serializable by cloudpickle, as are its results. Runs in the tasks, whose Python has this
        package.
    parts : sequence of sequence
        The parts, which pickle serializes.
    description : str
        Shown by Spark.

    Raises
    ------
    HvdEstimatorsError
        The typed error of the first part that has one, or an error of `spark_job`.
    """
    session = current_session()
    rows = [(number, zlib.compress(pickle.dumps(part), 1)) for number, part in enumerate(parts)]
    sent = cloudpickle.dumps(function)

    def call(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run in a task."""
        called = pickle.loads(sent)
        for batch in batches:
            for number, part in zip(*batch.to_pydict().values(), strict=True):
                try:
                    result = called(pickle.loads(zlib.decompress(part)))
                except HvdEstimatorsError as error:
                    # Spark would repeat the task, and show only the error's text.
                    result = error
                packed = zlib.compress(cloudpickle.dumps(result), 1)
                yield pa.RecordBatch.from_pydict(
                    {
                        "number": pa.array([number], pa.int64()),
                        "part": pa.array([packed], pa.binary()),
                    }
                )

    schema = "number long, part binary"
    with spark_job(current_cluster(), description):
        frame = session.createDataFrame(rows, schema)
        collected = frame.mapInArrow(call, schema).collect()
    results = [
        pickle.loads(zlib.decompress(row["part"]))
        for row in sorted(collected, key=lambda row: row["number"])
    ]
    for result in results:
        if isinstance(result, HvdEstimatorsError):
            raise result
    return results
