"""Delays and CPU time of operations of Horovod as compiled by ``build-horovod``."""

import time

import pytest

from hvd_estimators.launch.local_backend import LocalBackend

RANKS = 3
EACH_CYCLE = 0.3


@pytest.fixture(scope="module")
def backend():
    return LocalBackend(RANKS, verbose=0)


def sequence(count):
    """Return the duration of consecutive allreduces in seconds. Runs on every rank."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.zeros(1), name="tensor")
    started = time.monotonic()
    for _ in range(count):
        hvd.allreduce(torch.zeros(1), name="tensor")
    taken = time.monotonic() - started
    hvd.shutdown()
    return taken


def waiting(seconds):
    """Return the CPU seconds that a rank uses while it waits for another. Runs on every rank."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(seconds)
    before = time.process_time()
    hvd.allreduce(torch.zeros(1), name="tensor")
    used = time.process_time() - before
    hvd.shutdown()
    return used


def test_only_a_set_cycle_time_delays_operations(backend):
    cycle = {"HOROVOD_CYCLE_TIME": str(1000 * EACH_CYCLE)}

    assert min(backend.run(sequence, (4,), env=cycle)) > 3 * EACH_CYCLE
    assert max(backend.run(sequence, (4,))) < 3 * EACH_CYCLE


def test_a_waiting_rank_uses_little_cpu_time(backend):
    used = backend.run(waiting, (2.0,))

    assert used[0] < 0.7
    assert used[2] < 0.7
