"""Blocks of rows on their way to a GPU: once each, the next ones while these are used."""

import numpy as np
import pytest
import torch

from hvd_estimators.loading.batching import cut_chunks
from hvd_estimators.torch import tensors
from hvd_estimators.torch.copies import ahead_of_use, cuda_copies
from hvd_estimators.torch.tensors import tensor_batches

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


def chunks_of(columns, batch_size=7):
    """Cut into chunks of about a tenth."""
    parts = [
        {name: array[i : i + 100] for name, array in columns.items()} for i in range(0, ROWS, 100)
    ]
    for part in parts:
        sizes = [batch_size] * (100 // batch_size) + [100 % batch_size]
        yield from cut_chunks([part], sizes)


def test_copies_begin_one_chunk_before_they_are_used_and_come_in_order():
    events = []

    def copy(blocks):
        events.append(("begin", blocks[0]))
        return lambda: events.append(("wait", blocks[0])) or [f"copy of {blocks[0]}"]

    for what, copies in ahead_of_use(((i, [i]) for i in range(3)), copy):
        events.append(("use", what))
        assert copies == [f"copy of {what}"]

    assert events == [
        ("begin", 0),
        ("begin", 1),
        *[("wait", 0), ("use", 0), ("begin", 2)],
        *[("wait", 1), ("use", 1)],
        *[("wait", 2), ("use", 2)],
    ]


def test_each_block_is_copied_once_whatever_its_columns_and_batches(columns, monkeypatch):
    copied = []

    def copy(blocks):
        copied.append([tuple(block.shape) for block in blocks])
        return lambda: [block.clone() for block in blocks]

    monkeypatch.setattr(tensors, "cuda_copies", lambda device: copy)

    batches = list(tensor_batches(chunks_of(columns), "cuda"))

    # "a" and "b" share a block.
    assert copied == [[(100, 2), (100, 3), (100,)]] * 10
    assert len(batches) == 10 * 15
    for name, array in columns.items():
        whole = torch.cat([batch[name] for batch in batches])
        np.testing.assert_array_equal(whole.numpy(), array)


def test_chunks_are_let_go_when_batches_are_no_longer_wanted(columns, monkeypatch):
    monkeypatch.setattr(tensors, "cuda_copies", lambda device: lambda blocks: lambda: blocks)
    ended = []

    def chunks():
        try:
            yield from chunks_of(columns)
        finally:
            ended.append(True)

    batches = tensor_batches(chunks(), "cuda")
    next(batches)
    batches.close()

    assert ended == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_copies_are_what_was_read(columns):
    batches = list(tensor_batches(chunks_of(columns), "cuda"))

    assert {tensor.device.type for batch in batches for tensor in batch.values()} == {"cuda"}
    for name, array in columns.items():
        whole = torch.cat([batch[name] for batch in batches])
        np.testing.assert_array_equal(whole.cpu().numpy(), array)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_copy_is_not_overwritten_while_a_slow_step_uses_it():
    device = torch.device("cuda", torch.cuda.current_device())
    blocks = ((i, [torch.full((2**20,), float(i))]) for i in range(40))
    work = torch.rand(2048, 2048, device=device)

    sums = []
    for _, (copy,) in ahead_of_use(blocks, cuda_copies(device)):
        for _ in range(5):
            work = torch.tanh(work @ work)
        sums.append(copy.sum())
        del copy

    assert [float(total) / 2**20 for total in sums] == list(range(40))
