"""Pickling a state's tensors without changes and without a copy."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from typing import Any

import pytest
import torch

from hvd_estimators.launch.service.elastic_state import StatePickler


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    StatePickler(file, protocol=5).dump(value)
    return file.getvalue()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.arange(4.0).bfloat16(),
        torch.arange(4.0).to_sparse(),
        torch.tensor([True, False]),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.layout}",
)
def test_tensors_of_all_kinds_are_restored_unchanged(tensor: torch.Tensor) -> None:
    found = pickle.loads(dumped({"state": [tensor]}))["state"][0]
    assert type(found) is type(tensor)
    assert (found.dtype, found.layout) == (tensor.dtype, tensor.layout)
    assert found.requires_grad == tensor.requires_grad
    assert torch.equal(found.to_dense(), tensor.to_dense())
    if not found.requires_grad and not found.is_sparse:
        found.zero_()  # separate, writable memory


def test_pickling_many_tensors_does_not_buffer_them() -> None:
    class Sink:
        def write(self, data: Any) -> int:
            return memoryview(data).nbytes

    state = [torch.zeros(2**18) for _ in range(32)]
    tracemalloc.start()
    try:
        StatePickler(Sink(), protocol=5).dump(state)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20, f"of {32 * 2**20}"
