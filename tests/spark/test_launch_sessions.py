"""Repeated launches in one session, as in notebooks: no resource grows."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from typing import Any

import psutil
import pytest
from processes import wait_until

from hvd_estimators.launch.spark_backend import SparkBackend

pytestmark = [pytest.mark.spark, pytest.mark.once]


def reduce_and_tell() -> tuple[float, int]:
    """Return the sum over ranks of 1, and the guardian's parent."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    found = float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
    hvd.shutdown()
    return found, psutil.Process(os.getppid()).ppid()


def held() -> dict[str, int]:
    """Count the threads, descriptors and temporary folders of this process."""
    descriptors = [
        os.readlink(path)
        for path in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
        if os.path.lexists(path)
    ]
    names = os.listdir(tempfile.gettempdir())
    return {
        "threads": threading.active_count(),
        "sockets": sum(name.startswith("socket:") for name in descriptors),
        "descriptors": len(descriptors),
        "folders of ranks": sum(name.startswith("hvd-estimators-rank") for name in names),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked, and counted, on Linux only")
@pytest.mark.parametrize(
    "times", [5, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_repeated_launches_leak_nothing(spark: Any, times: int) -> None:
    backend = SparkBackend(2)
    memory, forked_by, before = [], set(), {}
    for number in range(times):
        # The first launches leave modules, Py4J's connections and the JVM's classes behind.
        if number == 2:
            before = held()
        for total, parent in backend.run(reduce_and_tell):
            assert total == 2.0
            forked_by.add(parent)
        memory.append(psutil.Process().memory_info().rss / 2**20)
    assert len(forked_by) == 1
    (parent,) = forked_by
    process = psutil.Process(parent)
    assert process.num_fds() < 20
    # The last rank's guardian may be about to end.
    wait_until(lambda: not process.children(recursive=True))
    wait_until(lambda: all(count <= before[kind] for kind, count in held().items()))
    assert memory[-1] < memory[1] + 30, memory


def test_without_warm_starts_ranks_are_not_forked(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guardians_command() -> list[str]:
        return psutil.Process(os.getppid()).cmdline()

    (forked,) = SparkBackend(1).run(guardians_command)
    assert ("--warm" in forked) == (sys.platform == "linux")
    (fresh,) = SparkBackend(1, warm_start=False).run(guardians_command)
    assert "--warm" not in fresh
    monkeypatch.setenv("HVD_ESTIMATORS_WARM_START", "0")
    (fresh,) = SparkBackend(1).run(guardians_command)
    assert "--warm" not in fresh


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_ranks_are_forked_from_the_process_that_was_warmed_up(spark: Any) -> None:
    def guardians_parent() -> int:
        return psutil.Process(os.getppid()).ppid()

    def warm_processes() -> set[int]:
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "hvd-warm" and process.environ().get("OF_THIS") == "test":
                    found.add(process.pid)
        return found

    backend, env = SparkBackend(2), {"OF_THIS": "test"}
    with backend.warming_up(guardians_parent, env=env):
        wait_until(lambda: len(warm_processes()) == 1)
    begun = warm_processes()
    assert set(backend.run(guardians_parent, env=env)) == begun
    # The next fit uses the same process.
    jobs = spark.sparkContext.statusTracker().getJobIdsForGroup(None)
    with backend.warming_up(guardians_parent, env=env):
        pass
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == jobs
    (parent,) = begun
    psutil.Process(parent).kill()
