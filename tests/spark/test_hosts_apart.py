"""A lost network link between two hosts."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from processes import wait_until
from two_hosts import Cluster

from hvd_estimators.exceptions import WorkerFailedError

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.once]


@pytest.fixture
def cluster(two_hosts: Cluster) -> Cluster:
    return two_hosts


def reduce_until(path: str) -> tuple[int, float]:
    """Reduce until a file exists; write this rank's steps beside that file."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    place, own = Path(path), Path(f"{path}.{hvd.rank()}")
    steps, total = 0, torch.zeros(2)
    while not total[1]:
        here = torch.tensor([hvd.rank() + 1.0, float(place.exists())])
        total = hvd.allreduce(here, op=hvd.Sum)
        steps += 1
        partial = own.with_name(f"{own.name}.partial")
        partial.write_text(str(steps))
        partial.rename(own)
        time.sleep(0.02)
    return steps, float(total[0])


def run_job(path: str) -> list[tuple[int, float]]:
    from hvd_estimators.launch.spark_backend import SparkBackend

    return SparkBackend(2).run(reduce_until, (path,))


def steps(end: Path, rank: int) -> int:
    """Return how often a rank has reduced."""
    own = Path(f"{end}.{rank}")
    return int(own.read_text()) if own.exists() else 0


@pytest.mark.soak
def test_a_lost_link_ends_the_job_and_is_reported(cluster: Cluster) -> None:
    end = cluster.folder / "lost"
    job = cluster.submit(run_job, str(end))
    wait_until(lambda: min(steps(end, 0), steps(end, 1)) >= 5, 60)
    started = time.monotonic()

    cluster.second.set_link("down")
    try:
        time.sleep(75)
    finally:
        cluster.second.set_link("up")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        job.result(60)
    error = raised.value

    assert time.monotonic() - started < 120
    assert isinstance(error, WorkerFailedError), error
    # Spark's own limit is equally long, and may expire first.
    if error.rank is None:
        assert "An executor, or its Python process, has ended" in str(error)
    else:
        assert re.search(r"rank [01] on \S+ has not (answered|been heard of) for 6\d s", str(error))
        assert error.rank in (0, 1)
