"""Digests of documents for executors: of bytes and of files."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pyspark import SparkFiles

from hvd_estimators.inference import broadcast
from hvd_estimators.inference.broadcast import Hashed, Parts, as_bytes
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


def _load(folder: str, started: Any, ends: Any) -> None:
    sent = Parts("digest", ())
    with (
        mock.patch.object(SparkFiles, "getRootDirectory", return_value=folder),
        mock.patch.object(broadcast, "_put_together", lambda sent, path: path.write_bytes(b"a")),
        broadcast.received(sent),
    ):
        started.release()
        assert ends.wait(60)


def test_workers_load_a_model_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, ends = context.Semaphore(0), context.Event()
    workers = [context.Process(target=_load, args=(str(tmp_path), started, ends)) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        # All of them have the file before one of them has loaded it.
        assert all(started.acquire(timeout=60) for _ in workers)
    finally:
        ends.set()
        for worker in workers:
            worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
