"""Errors of a full disk of temporary files."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hvd_estimators import Store
from hvd_estimators.exceptions import ReaderError, StoreError
from hvd_estimators.store import storage_errors
from hvd_estimators.store.checkpoints import CheckpointInfo, open_valid
from hvd_estimators.store.files import copy_from
from hvd_estimators.store.storage_errors import naming_full_disk


def fail(error: Exception) -> None:
    with naming_full_disk():
        raise error


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LATER = ReaderError("A worker process of the reader failed")
LATER.__cause__ = NO_SPACE


@pytest.mark.parametrize(
    "error",
    [
        NO_SPACE,
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("unable to write to file </torch_1>: No space left on device (28)"),
        ReaderError("A worker failed: OSError: [Errno 28] No space left on device: '/tmp/x'"),
        LATER,
    ],
)
def test_errors_of_a_full_disk_name_the_temporary_folder(error: Exception) -> None:
    folder = tempfile.gettempdir()
    with pytest.raises(StoreError, match=rf"{type(error).__name__}.*'{folder}'.*TMPDIR") as caught:
        fail(error)
    assert caught.value.__cause__ is error


def test_the_folder_of_a_named_file_is_named_too() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/models/large.bin")
    with pytest.raises(StoreError, match="Free space in '/data/models'"):
        fail(error)


FAILED_WRITE = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")


def test_a_failed_write_without_a_reason_counts_if_little_space_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_errors, "_free_bytes", lambda folder: 1000)
    with pytest.raises(StoreError, match=r"unexpected pos.*has 0.0 MB left"):
        fail(FAILED_WRITE)
    monkeypatch.setattr(storage_errors, "_free_bytes", lambda folder: 2**40)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        fail(FAILED_WRITE)


@pytest.mark.parametrize("error", [ValueError("wrong"), FileNotFoundError(errno.ENOENT, "gone")])
def test_other_errors_are_not_changed(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert caught.value is error


def test_copies_of_stored_files_on_a_full_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    store = Store.create("memory://full")
    path = f"{store.prefix_path}/large"
    store.fs.pipe_file(path, np.random.default_rng(1).bytes(2 * 2**20))
    with tempfile.TemporaryFile() as file, pytest.raises(StoreError, match=r"(?s)space.*TMPDIR"):
        copy_from(store, path, file)
    info = CheckpointInfo(path, 2 * 2**20, "a", 1, 0, "torch", {})
    # Not a damaged or unreadable checkpoint, for which an earlier one would be used.
    with pytest.raises(StoreError, match="No space is left") as caught, open_valid(store, info):
        pass
    assert type(caught.value) is StoreError
