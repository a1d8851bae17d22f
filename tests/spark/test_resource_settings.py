"""Resource settings with several executors per rank or ranks per GPU, for ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers.driver import application

from hvd_estimators.exceptions import ParamError, SlotsError

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.soak]


def sizes(num_proc: int | None, seconds: float = 0.0, cpus: int | None = None) -> list[int]:
    from hvd_estimators import run

    def size() -> int:
        import time

        import horovod.torch as hvd

        hvd.init()
        time.sleep(seconds)
        return int(hvd.size())

    timeout = 20.0 if num_proc == 5 else None
    return run(size, num_proc=num_proc, cpus_per_task=cpus, start_timeout=timeout)


def test_dynamic_allocation_requests_and_holds_executors(tmp_path: Path) -> None:
    dynamic = {
        "enabled": "true",
        "shuffleTracking.enabled": "true",
        "minExecutors": "0",
        "maxExecutors": "2",
        "executorIdleTimeout": "10s",
    }
    settings = {
        "spark.master": "local-cluster[2,2,1024]",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.cores": "2",
        **{f"spark.dynamicAllocation.{name}": value for name, value in dynamic.items()},
    }
    with application(tmp_path, settings) as made:
        assert made.run(sizes, 4) == [4] * 4
        # Longer than the executors' idle timeout.
        assert made.run(sizes, 4, 15.0) == [4] * 4
        # With resources that need new executors.
        assert made.run(sizes, 2, 0.0, 2) == [2] * 2
        with pytest.raises(SlotsError, match=r"has 4\. .*maxExecutors"):
            made.run(sizes, 5)
        with pytest.raises(ParamError, match="Set num_proc"):
            made.run(sizes, None)
