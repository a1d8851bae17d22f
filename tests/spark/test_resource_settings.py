"""Resource settings with several executors per rank or ranks per GPU, for ``make soak``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from servers.driver import application
from servers.gpus import gpu_application

from hvd_estimators.exceptions import GpuError, ParamError, SlotsError

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.soak]


def sizes(num_proc: int | None, seconds: float = 0.0, cpus: int | None = None) -> list[int]:
    from hvd_estimators import run

    def size() -> int:
        import time

        import horovod.torch as hvd

        hvd.init()
        time.sleep(seconds)
        return int(hvd.size())

    return run(size, num_proc=num_proc, cpus_per_task=cpus)


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
        with pytest.raises(SlotsError, match=r"maxExecutors is 2\. Set it higher"):
            made.run(sizes, 5)
        with pytest.raises(ParamError, match="Set num_proc"):
            made.run(sizes, None)


def pins(**env: str) -> list[str]:
    from hvd_estimators import run

    return run(lambda: os.environ["CUDA_VISIBLE_DEVICES"], num_proc=4, env=env)


def test_a_setting_that_shares_a_gpu_between_ranks_is_an_error(tmp_path: Path) -> None:
    with gpu_application(tmp_path, spark__task__resource__gpu__amount="0.5") as made:
        with pytest.raises(GpuError, match=r"to 2 ranks.*spark\.task\.resource\.gpu\.amount"):
            made.run(pins)
        assert made.run(lambda: pins(CUDA_VISIBLE_DEVICES="-1")) == ["-1"] * 4
