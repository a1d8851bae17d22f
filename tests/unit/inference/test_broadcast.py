"""Digests of documents for executors: of bytes and of files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from hvd_estimators.inference.broadcast import Hashed, as_bytes
from hvd_estimators.torch import serialization
from hvd_estimators.torch.serialization import module_payload


def test_bytes_and_files_have_the_same_digest(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    (tmp_path / "file").write_bytes(content)

    for document in (content, tmp_path / "file"):
        hashed = Hashed.of(document)
        assert (hashed.size, hashed.digest) == (100_000, hashlib.sha256(content).hexdigest())
        assert as_bytes(document) == content


@pytest.mark.parametrize("is_script", [False, True])
def test_equal_large_modules_have_equal_digests_and_changes_are_detected(
    is_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "_LARGE_BYTES", 0)
    module: torch.nn.Module = torch.nn.Linear(200, 200)
    if is_script:
        module = torch.jit.script(module)
    hashed = Hashed.of(module_payload(module))
    assert os.path.exists(hashed.document)
    assert Hashed.of(module_payload(module)).digest == hashed.digest
    loaded = serialization.load_module(hashed.document)
    torch.testing.assert_close(loaded.weight, module.weight, rtol=0, atol=0)

    # A change through NumPy, which the tensor's version counter does not record.
    module.weight.data.numpy()[0, 0] += 1
    assert Hashed.of(module_payload(module)).digest != hashed.digest
