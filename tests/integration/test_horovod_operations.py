"""Operations of Horovod as compiled by ``build-horovod``, compared with NumPy.

The patched background thread sleeps until tensors arrive. Results must not depend on timing.
"""

import threading
import time

import numpy as np
import pytest

from hvd_estimators.launch.local_backend import LocalBackend

RANKS = 3
TENSORS = 40
# Ranks exchange at most this many bytes of all of them directly; longer tensors take a ring.
DIRECT_BYTES = 256 * 1024
EACH_CYCLE = 0.3


@pytest.fixture(scope="module")
def backend():
    return LocalBackend(RANKS, verbose=0)


def values(rank, name, shape=(7,)):
    """Return a rank's numbers for an operation: integers, whose sums are exact in any order."""
    seed = np.random.SeedSequence([rank, *name.encode()])
    return np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.float32)


def of_all(name, shape=(7,), ranks=range(RANKS)):
    return np.stack([values(rank, name, shape) for rank in ranks])


def equal(result, expected):
    np.testing.assert_array_equal(np.asarray(result), expected)


def torch_program():
    """Run each operation of torch's Horovod, and compare its result. Runs on every rank."""
    import horovod.torch as hvd
    import torch

    outer = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[outer])
    rank = hvd.rank()

    def own(name, shape=(7,)):
        return torch.from_numpy(values(rank, name, shape))

    # The ranks add tensors, and wait for them, in different orders.
    order = np.random.default_rng(rank).permutation(TENSORS)
    handles = {i: hvd.allreduce_async(own(f"sum{i}"), name=f"sum{i}", op=hvd.Sum) for i in order}
    for i in np.random.default_rng(rank + 10).permutation(TENSORS):
        equal(hvd.synchronize(handles[i]), of_all(f"sum{i}").sum(0))
    # A tensor that other ranks add much later, and one that is polled.
    time.sleep(0.05 * rank)
    equal(hvd.allreduce(own("late"), name="late", op=hvd.Sum), of_all("late").sum(0))
    handle = hvd.allreduce_async(own("polled"), name="polled", op=hvd.Max)
    while not hvd.poll(handle):
        time.sleep(0.001)
    equal(hvd.synchronize(handle), of_all("polled").max(0))
    # Tensors below and above the size up to which ranks exchange them directly.
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
        most = DIRECT_BYTES // (RANKS * dtype.itemsize)
        for length in (1, most, most + 1):
            for op in ("Sum", "Min", "Max", "Product"):
                name = f"{dtype} {length} {op}"
                numbers = [np.abs(values(r, name, length)).astype(int) % 5 for r in range(RANKS)]
                tensor = torch.from_numpy(numbers[rank]).to(dtype)
                reduced = hvd.allreduce(tensor, name=name, op=getattr(hvd, op))
                assert reduced.dtype == dtype
                equal(reduced, getattr(np, op.lower().replace("product", "prod"))(numbers, axis=0))
    # Sums that rounding makes depend on their order have the same bits on all ranks.
    uneven = 1 / own("uneven", (1000,)).add(0.5)
    sums = hvd.allreduce(uneven, name="uneven", op=hvd.Sum)
    equal(hvd.broadcast(sums, root_rank=0, name="bits of sums"), sums)
    np.testing.assert_allclose(
        sums, (1 / (of_all("uneven", (1000,)) + np.float64(0.5))).sum(0), rtol=1e-5, atol=1e-6
    )
    # Two threads that add and wait concurrently.
    results = {}

    def reduce(name):
        for i in range(TENSORS):
            key = f"{name}{i}"
            results[key] = hvd.allreduce(own(key), name=key, op=hvd.Sum)

    threads = [threading.Thread(target=reduce, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 * TENSORS
    for key, result in results.items():
        equal(result, of_all(key).sum(0))
    # Groups of tensors, and tensors of different lengths.
    grouped = hvd.grouped_allreduce([own(f"g{i}") for i in range(5)], name="group", op=hvd.Sum)
    for i, result in enumerate(grouped):
        equal(result, of_all(f"g{i}").sum(0))
    rows = [values(r, "rows", (r + 1, 2)) for r in range(RANKS)]
    equal(hvd.allgather(torch.from_numpy(rows[rank]), name="rows"), np.concatenate(rows))
    equal(hvd.broadcast(own("root"), root_rank=1, name="root"), values(1, "root"))
    received, splits = hvd.alltoall(
        own("parts", (6,)), torch.tensor([1, 2, 3], dtype=torch.int32), name="parts"
    )
    start = [0, 1, 3, 6]
    parts = [values(r, "parts", (6,))[start[rank] : start[rank + 1]] for r in range(RANKS)]
    equal(received, np.concatenate(parts))
    equal(splits, [rank + 1] * RANKS)
    scattered = hvd.reducescatter(own("scattered", (RANKS, 4)), name="scattered", op=hvd.Sum)
    equal(scattered, of_all("scattered", (RANKS, 4)).sum(0)[rank : rank + 1])
    hvd.barrier()
    # A process set with an idle rank, and one that is added later.
    if rank != 1:
        reduced = hvd.allreduce(own("outer"), name="outer", op=hvd.Sum, process_set=outer)
        equal(reduced, of_all("outer", ranks=(0, 2)).sum(0))
    inner = hvd.add_process_set([0, 1])
    if rank != 2:
        reduced = hvd.allreduce(own("inner"), name="inner", op=hvd.Sum, process_set=inner)
        equal(reduced, of_all("inner", ranks=(0, 1)).sum(0))
    hvd.remove_process_set(inner)
    # An error reaches all ranks, and the next operation works.
    with pytest.raises(Exception, match=r"(?i)mismatch"):
        hvd.allreduce(torch.zeros(rank + 1), name="mismatched")
    equal(hvd.allreduce(own("next"), name="next", op=hvd.Sum), of_all("next").sum(0))
    # Ranks that have joined count as zeros.
    for i in range(rank + 1):
        reduced = hvd.allreduce(own(f"step{i}"), name=f"step{i}", op=hvd.Sum)
        equal(reduced, of_all(f"step{i}", ranks=range(i, RANKS)).sum(0))
    assert hvd.join() == RANKS - 1
    hvd.shutdown()
    # Again in the same process.
    hvd.init()
    equal(hvd.allreduce(own("again"), name="again", op=hvd.Sum), of_all("again").sum(0))
    hvd.shutdown()
    return rank


def tensorflow_program():
    """Run operations of TensorFlow's Horovod, eagerly and in a graph. Runs on every rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rank = hvd.rank()

    def own(name):
        return tf.constant(values(rank, name))

    @tf.function
    def sums():
        return [hvd.allreduce(own(f"sum{i}"), name=f"sum{i}", op=hvd.Sum) for i in range(TENSORS)]

    for _ in range(3):
        for i, result in enumerate(sums()):
            equal(result, of_all(f"sum{i}").sum(0))
    time.sleep(0.05 * rank)
    equal(hvd.allreduce(own("eager"), name="eager", op=hvd.Sum), of_all("eager").sum(0))
    for i, result in enumerate(hvd.grouped_allreduce([own("g0"), own("g1")], op=hvd.Sum)):
        equal(result, of_all(f"g{i}").sum(0))
    equal(hvd.allgather(own("rows"), name="rows"), of_all("rows").reshape(-1))
    received, _ = hvd.alltoall(own("parts"), tf.constant([1, 2, 4]), name="parts")
    start = [0, 1, 3, 7]
    parts = [values(r, "parts")[start[rank] : start[rank + 1]] for r in range(RANKS)]
    equal(received, np.concatenate(parts))
    assert hvd.join() in range(RANKS)
    hvd.shutdown()
    return rank


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


@pytest.mark.parametrize("program", [torch_program, tensorflow_program])
def test_every_operation_matches_numpy(backend, program):
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1" if program is torch_program else None}

    assert backend.run(program, env=env) == list(range(RANKS))


def test_only_a_set_cycle_time_delays_operations(backend):
    cycle = {"HOROVOD_CYCLE_TIME": str(1000 * EACH_CYCLE)}

    assert min(backend.run(sequence, (4,), env=cycle)) > 3 * EACH_CYCLE
    assert max(backend.run(sequence, (4,))) < 3 * EACH_CYCLE


def test_a_waiting_rank_uses_little_cpu_time(backend):
    used = backend.run(waiting, (2.0,))

    assert used[0] < 0.7
    assert used[2] < 0.7
