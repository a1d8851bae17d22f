"""Checkpoints are written during training, and are complete on every store."""

from __future__ import annotations

import contextlib
import errno
import io
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from saved_checkpoints import epochs_in, file_names, model_of, restored, save, state_of

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import FilesystemStore
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.spec import CheckpointOptions
from hvd_estimators.training.step_control import interrupted


class Slow(FilesystemStore):
    """Store whose uploads wait for a test, and may fail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.free = threading.Event()
        self.started: list[str] = []
        self.error: Exception | None = None

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        with super().open_atomic(path) as file:
            yield file
            if path.endswith(".ckpt"):
                self.started.append(path)
                assert self.free.wait(60)
                if self.error is not None:
                    raise self.error


@pytest.fixture
def slow() -> Slow:
    return Slow(f"memory://{uuid.uuid4().hex}")


def writer_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("hvd_estimators checkpoint")]


def test_training_continues_during_an_upload(slow: Slow) -> None:
    run = slow.run_paths("mine")
    weight = torch.zeros(3)
    with CheckpointWriter(slow, run, CheckpointOptions("torch")) as writer:
        writer.save(state_of(1), lambda file: torch.save({"epoch": 1, "weight": weight}, file))
        # Later changes do not affect the checkpoint.
        weight += 1
        assert epochs_in(slow) == []
        second = threading.Thread(target=writer.save, args=(state_of(2), model_of(2)))
        second.start()
        # The second waits for the first.
        second.join(0.2)
        assert second.is_alive()
        assert len(slow.started) <= 1
        slow.free.set()
        second.join(60)
        assert epochs_in(slow)[0] == 1
    # The end of the block waits for all uploads.
    assert epochs_in(slow) == [1, 2]
    assert not writer_threads()
    loaded = torch.load(io.BytesIO(slow.read(slow.get_checkpoints("mine")[0])), weights_only=True)
    assert torch.equal(loaded["weight"], torch.zeros(3))


@pytest.mark.parametrize("ends", ["well", "by an error", "by another save", "on request"])
def test_failed_uploads_are_reported_and_keep_earlier_checkpoints(
    slow: Slow, ends: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = slow.run_paths("mine")
    slow.free.set()
    save(slow, 1, 2)

    def train() -> None:
        with CheckpointWriter(slow, run, CheckpointOptions("torch")) as writer:
            slow.error = OSError("no space left")
            writer.save(state_of(3), model_of(3))
            if ends == "by an error":
                raise ZeroDivisionError
            if ends == "on request":
                raise interrupted(3, 0, saved=True)
            if ends == "by another save":
                writer.save(state_of(4), model_of(4))

    message = r"000003.ckpt' could not be written \(OSError: no space left\).*same run_id resumes"
    expected: type[Exception] = ZeroDivisionError if ends == "by an error" else StoreError
    with pytest.raises(expected, match=message if expected is StoreError else "^$"):
        train()
    assert ("no space left" in caplog.text) == (ends == "by an error")
    assert epochs_in(slow) == [1, 2]
    assert restored(slow) == (2, 2)
    assert not writer_threads()
    assert list(tmp_path.iterdir()) == []
    slow.error = None
    save(slow, 3)
    assert epochs_in(slow) == [2, 3]


def test_failed_writes_leave_nothing(store: Any) -> None:
    save(store, 1)

    def write(file: IO[bytes]) -> None:
        file.write(b"the beginning")
        raise TypeError("cannot be saved")

    with (
        pytest.raises(TypeError, match="cannot be saved"),
        CheckpointWriter(store, store.run_paths("mine"), CheckpointOptions("torch")) as writer,
    ):
        writer.save(state_of(2), write)
    assert len(file_names(store)) == 2


class Full(io.BytesIO):
    """File on a disk with space for a few bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_reported_despite_torchs_own_error(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def open_atomic(self: Any, path: str) -> Any:
        with whole(self, path):
            yield Full()

    save(store, 1)
    whole = type(store).open_atomic
    monkeypatch.setattr(type(store), "open_atomic", open_atomic)
    with pytest.raises(StoreError, match=r"000002.ckpt' could not be written .*no space left"):
        save(store, 2)
    monkeypatch.undo()
    assert restored(store) == (1, 1)
    assert len(file_names(store)) == 2
