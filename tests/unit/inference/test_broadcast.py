"""Digests of documents for executors: of bytes, of files, and of unwritten files."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import IO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators._util.temp_files import LazyFile
from hvd_estimators.exceptions import PredictionError
from hvd_estimators.inference import broadcast
from hvd_estimators.inference.broadcast import Digests, Hashed, as_bytes, digests_of, part_of
from hvd_estimators.torch import serialization
from hvd_estimators.torch.serialization import module_payload


def expected(content: bytes, part_bytes: int) -> tuple[str, ...]:
    starts = range(0, len(content), part_bytes)
    return tuple(hashlib.sha256(content[i : i + part_bytes]).hexdigest() for i in starts)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_digests_do_not_depend_on_the_sizes_of_writes(pieces: list[bytes], part_bytes: int) -> None:
    digests = Digests(part_bytes)
    digests.write(b"what a first try left")
    digests.seek(0)
    digests.truncate()
    for piece in pieces:
        assert digests.write(memoryview(piece)) == len(piece)

    content = b"".join(pieces)
    assert digests.size == len(content)
    assert digests.parts == expected(content, part_bytes)
    found = [part_of(content, i * part_bytes, part_bytes) for i in range(len(digests.parts))]
    assert b"".join(found) == content


def test_bytes_files_and_unwritten_files_have_the_same_digests(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    (tmp_path / "file").write_bytes(content)

    def write(file: IO[bytes]) -> None:
        for start in range(0, len(content), 7_777):
            file.write(content[start : start + 7_777])

    lazy = LazyFile(write)
    for document in (content, tmp_path / "file", lazy):
        digests = digests_of(document, 30_000)
        assert (digests.size, digests.parts) == (100_000, expected(content, 30_000))
    assert not os.path.exists(lazy.path)
    assert part_of(lazy, 90_000, 30_000) == content[90_000:]
    assert as_bytes(lazy) == content


@pytest.mark.parametrize("is_script", [False, True])
def test_large_modules_are_hashed_without_a_file_and_changes_detected(
    is_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "_LARGE_BYTES", 0)
    monkeypatch.setattr(broadcast, "PART_BYTES", 50_000)
    module: torch.nn.Module = torch.nn.Linear(200, 200)
    if is_script:
        module = torch.jit.script(module)
    hashed = Hashed.of(module_payload(module))
    assert isinstance(hashed.document, LazyFile)
    assert not os.path.exists(hashed.document.path)
    same = Hashed.of(module_payload(module))
    assert same.digest == hashed.digest

    # The parts match the digests, and form a module.
    content = b"".join(same.part(index) for index in range(len(same.digests)))
    assert (len(content), expected(content, 50_000)) == (same.size, same.digests)
    loaded = serialization.load_module(content)
    torch.testing.assert_close(loaded.weight, module.weight, rtol=0, atol=0)

    # A change through NumPy, which the tensor's version counter does not record.
    module.weight.data.numpy()[0, 0] += 1
    assert Hashed.of(module_payload(module)).digest != hashed.digest
    with pytest.raises(PredictionError, match="changed while it was sent"):
        [hashed.part(index) for index in range(len(hashed.digests))]


def test_failed_writes_are_retried_at_the_next_use() -> None:
    contents = iter([OSError(28, "No space left on device"), b"content"])

    def write(file: IO[bytes]) -> None:
        found = next(contents)
        file.write(b"half of it")
        if isinstance(found, OSError):
            raise found
        file.seek(0)
        file.truncate()
        file.write(found)

    lazy = LazyFile(write)
    with pytest.raises(OSError, match="No space left"):
        os.fspath(lazy)
    assert Path(lazy).read_bytes() == b"content"


def test_hashed_content_cannot_be_read_back() -> None:
    with pytest.raises(io.UnsupportedOperation):
        Digests(1).seek(1)
