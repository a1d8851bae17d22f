"""Transfer of blocks of rows to a GPU: once each, ahead of their use."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
import torch

from hvd_estimators.loading.shuffle import stream_batches
from hvd_estimators.torch import tensors
from hvd_estimators.torch.tensors import ahead_of_use, cuda_copies, gpu_memory, tensor_batches

ROWS = 1000


@pytest.fixture
def columns():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=ROWS),
        "vector": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "b": rng.normal(size=ROWS),
        "count": np.arange(ROWS),
    }


def chunks_of(columns, batch_size=7, memory=None):
    """Cut columns into chunks of about a tenth."""
    parts = [
        {name: array[i : i + 100] for name, array in columns.items()} for i in range(0, ROWS, 100)
    ]
    for part in parts:
        sizes = [batch_size] * (100 // batch_size) + [100 % batch_size]
        yield from stream_batches([part], sizes, memory=memory)


def test_another_thread_copies_ahead_and_keeps_the_order():
    begun = [threading.Event() for _ in range(5)]
    threads = set()

    def copy(blocks):
        begun[blocks[0]].set()
        threads.add(threading.get_ident())
        return lambda: [f"copy of {blocks[0]}"]

    source = ((i, [i]) for i in range(5))
    with contextlib.closing(ahead_of_use(source, copy)) as blocks:
        for what, copies in blocks:
            assert copies == [f"copy of {what}"]
            if what < 4:
                assert begun[what + 1].wait(timeout=30)  # not requested yet
    assert what == 4
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_at_most_three_copied_blocks_are_held():
    begun = []

    def copy(blocks):
        begun.append(blocks[0])
        return lambda: blocks

    with contextlib.closing(ahead_of_use(((i, [i]) for i in range(100)), copy)) as blocks:
        for what, _ in itertools.islice(blocks, 50):
            # One in use, one in the queue, and one held by the thread.
            assert begun[-1] <= what + 3


def test_no_chunk_is_read_ahead_after_the_last_batch(columns, monkeypatch):
    monkeypatch.setattr(tensors, "cuda_copies", lambda device: lambda blocks: lambda: blocks)
    is_beyond = threading.Event()

    def chunks():
        yield from itertools.islice(chunks_of(columns), 2)
        is_beyond.set()
        yield from itertools.islice(chunks_of(columns), 1)

    with contextlib.closing(tensor_batches(chunks(), "cuda", 30)) as batches:
        assert len(list(itertools.islice(batches, 30))) == 30
        assert not is_beyond.wait(0.3)
        # A further batch is read on demand.
        np.testing.assert_array_equal(next(batches)["a"].numpy(), columns["a"][:7])
        assert is_beyond.is_set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("locked", [False, True])
def test_copies_on_a_gpu_equal_the_rows_read(columns, locked):
    memory = gpu_memory(torch.device("cuda")) if locked else None
    batches = list(tensor_batches(chunks_of(columns, memory=memory), "cuda"))

    assert {tensor.device.type for batch in batches for tensor in batch.values()} == {"cuda"}
    for name, array in columns.items():
        whole = torch.cat([batch[name] for batch in batches])
        np.testing.assert_array_equal(whole.cpu().numpy(), array)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_memory_is_not_reused_while_a_slow_step_needs_it():
    device = torch.device("cuda", torch.cuda.current_device())
    memory = gpu_memory(device)
    work = torch.rand(2048, 2048, device=device)

    def blocks():
        for i in range(40):
            array = memory.empty((2**20,), np.dtype(np.float32))
            array[:] = i
            block = torch.from_numpy(array)
            assert block.is_pinned()
            yield i, [block]
            del array, block

    sums = []
    with contextlib.closing(ahead_of_use(blocks(), cuda_copies(device))) as copies:
        for _, (copy,) in copies:
            for _ in range(5):
                work = torch.tanh(work @ work)
            sums.append(copy.sum())
            del copy

    assert [float(total) / 2**20 for total in sums] == list(range(40))
