"""Ranks that are stopped or hang while others wait for them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import ended, pids, wait_until

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend

SOON = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}

pytestmark = pytest.mark.timeout(120)


def test_a_stopped_rank_is_ended_with_its_children_and_named(tmp_path):
    def work(folder):
        rank = os.environ["HOROVOD_RANK"]
        if rank == "0":
            return
        # The rank stops together with its guardian and a child in another session.
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        stopped = [child.pid, os.getppid(), os.getpid()]
        Path(folder, "pids").write_text(" ".join(map(str, stopped)))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(300)

    started = time.monotonic()
    with pytest.raises(WorkerFailedError, match="has been stopped for 2 s") as raised:
        LocalBackend(2, env=SOON).run(work, (str(tmp_path),))

    assert 2 < time.monotonic() - started < 60
    assert (raised.value.rank, raised.value.cause) == (1, "stalled")
    assert raised.value.host in str(raised.value)
    for pid in pids(tmp_path / "pids"):
        wait_until(lambda pid=pid: ended(pid))


def test_a_hanging_rank_is_named_if_the_user_set_a_limit():
    def work():
        import threading

        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(1), name="first")
        if hvd.rank() == 1:
            print("waiting for ever", flush=True)
            threading.Event().wait()
        hvd.allreduce(torch.ones(1), name="second")

    with pytest.raises(WorkerFailedError, match=r"1!: \[allreduce\.second\]") as raised:
        LocalBackend(2, env=SOON).run(work)

    assert (raised.value.rank, raised.value.cause) == (0, "raised")
    assert raised.value.is_transient
