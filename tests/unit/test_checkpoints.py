"""The checkpoints of a run: which are kept, and which one is gone on from when some are damaged."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import logging
import math
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import FilesystemStore
from hvd_estimators.store.checkpoint_names import pointer_of
from hvd_estimators.store.checkpoints import (
    best_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    positions,
)
from hvd_estimators.training.checkpoints import CheckpointWriter, restore
from hvd_estimators.training.spec import CheckpointOptions, EpochMetrics
from hvd_estimators.training.state import RunState


class Ranks:
    """What a rank hears from rank 0: by default what it says itself."""

    def __init__(self, told: Any = None) -> None:
        self.told = told

    def broadcast(self, value: Any, name: str) -> Any:
        return value if self.told is None else self.told


def state_of(epoch: int, rows: int = 0, loss: float | None = None) -> RunState:
    losses = [1.0 / (n + 1) for n in range(epoch)]
    if loss is not None:
        losses[-1] = loss
    history = tuple(EpochMetrics(n, {"loss": value}) for n, value in enumerate(losses))
    return RunState(epoch, rows, 2, history)


def model_of(epoch: int) -> Callable[[IO[bytes]], None]:
    return lambda file: torch.save({"epoch": epoch, "weight": torch.full((300,), epoch)}, file)


def save(store: Any, *epochs: int, options: CheckpointOptions | None = None) -> None:
    run = store.run_paths("mine")
    with CheckpointWriter(store, run, options or CheckpointOptions("torch")) as writer:
        for epoch in epochs:
            writer.save(state_of(epoch), model_of(epoch))


def restored(store: Any, rank: int = 0, told: Any = None) -> tuple[int, int] | None:
    """Return the epoch by the state, and by the framework's file."""
    loaded: dict[str, Any] = {}

    def load(file: IO[bytes]) -> None:
        loaded.update(torch.load(file, weights_only=True))

    exchange: Any = Ranks(told)
    state = restore(store, store.run_paths("mine"), exchange, rank, load)
    return None if state is None else (state.epoch, loaded["epoch"])


def epochs_in(store: Any) -> list[int]:
    return [info.epoch for info in list_checkpoints(store, store.run_paths("mine"))]


def file_names(store: Any) -> list[str]:
    return store.names(store.get_checkpoint_path("mine"))


def change(store: Any, path: str, content: bytes) -> None:
    store.fs.pipe_file(path, content)


@pytest.fixture(params=["local", "memory"])
def any_store(request: pytest.FixtureRequest, store: Any) -> Any:
    if request.param == "local":
        return store
    return Store.create(f"memory://{uuid.uuid4().hex}")


def test_a_run_goes_on_from_the_newest(any_store: Any) -> None:
    assert restored(any_store) is None
    assert newest_checkpoint(any_store, any_store.run_paths("mine")) is None
    save(any_store, 1, 2, 3)
    assert restored(any_store) == (3, 3)
    newest = newest_checkpoint(any_store, any_store.run_paths("mine"))
    assert newest is not None
    assert (newest.epoch, newest.rows, newest.framework) == (3, 0, "torch")
    assert newest.metrics == {"loss": pytest.approx(1 / 3)}
    assert any_store.get_checkpoints("mine")[-1] == newest.path


def test_where_no_runs_are_kept_there_are_no_checkpoints(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path), save_runs=False)
    assert positions(store, store.run_paths("mine")) == []
    assert restored(store) is None


def test_one_that_is_cut_or_changed_anywhere_is_skipped_for_the_one_before(
    any_store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(any_store, 1, 2)
    older, newest = any_store.get_checkpoints("mine")
    whole = any_store.read(newest)
    lengths = [len(whole) * tenth // 10 for tenth in range(10)]
    cut = [whole[:length] for length in [*lengths, len(whole) - 1]]
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        for place in [*lengths, len(whole) - 1]
    ]
    for content in [*cut, *flipped, whole + b"\0"]:
        change(any_store, newest, content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert restored(any_store) == (1, 1)
        (record,) = caplog.records
        assert repr(newest) in record.getMessage()
        assert f"The one before, {older!r}, is taken" in record.getMessage()
    any_store.delete(newest)
    assert restored(any_store) == (1, 1)
    change(any_store, newest, whole)
    assert restored(any_store) == (2, 2)


@pytest.mark.parametrize("pointer", [b"", b"{", b"[]", b"{}", b"\xff", b'{"format": 2}'])
def test_one_whose_pointer_is_damaged_is_skipped_too(any_store: Any, pointer: bytes) -> None:
    save(any_store, 1, 2)
    change(any_store, pointer_of(any_store.get_checkpoints("mine")[-1]), pointer)
    assert restored(any_store) == (1, 1)
    assert epochs_in(any_store) == [1]
    # Nothing was lost by looking, and the epoch is written anew.
    assert len(file_names(any_store)) == 4
    save(any_store, 2)
    assert restored(any_store) == (2, 2)
    assert epochs_in(any_store) == [1, 2]


def test_one_that_was_not_finished_does_not_exist(any_store: Any) -> None:
    save(any_store, 1, 2)
    any_store.delete(pointer_of(any_store.get_checkpoints("mine")[-1]))
    assert restored(any_store) == (1, 1)
    assert len(any_store.get_checkpoints("mine")) == 1


def test_where_none_is_whole_all_are_named(any_store: Any) -> None:
    save(any_store, 1, 2)
    first, second = any_store.get_checkpoints("mine")
    any_store.delete(first)
    change(any_store, second, b"cut")
    with pytest.raises(StoreError, match=r"'mine'.*Set another run_id.*delete") as raised:
        restored(any_store)
    assert f"{first!r} (there is no such file)" in str(raised.value)
    assert f"{second!r} (it has 3 bytes" in str(raised.value)


def test_one_that_cannot_be_read_is_skipped_where_another_can(
    any_store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(any_store, 1, 2)
    older, newest = any_store.get_checkpoints("mine")
    lost = {newest}
    plain = type(any_store).open

    def open_file(self: Any, path: str) -> Any:
        if path in lost:
            raise StoreError("All DataNodes failed")
        return plain(self, path)

    monkeypatch.setattr(type(any_store), "open", open_file)
    assert restored(any_store) == (1, 1)
    assert f"{newest!r} (All DataNodes failed)" in caplog.text
    # Nothing tells that they are damaged: nobody is to delete them.
    lost.add(older)
    with pytest.raises(StoreError, match=r"^All DataNodes failed$"):
        restored(any_store)
    assert any_store.get_checkpoints("mine") == [older, newest]


def test_one_of_another_model_is_an_error_and_no_damage(any_store: Any) -> None:
    save(any_store, 1, 2)

    def load(file: IO[bytes]) -> None:
        raise KeyError("layer.weight")

    exchange: Any = Ranks()
    with pytest.raises(StoreError, match=r"000002.ckpt' cannot be gone on from: .*layer.weight"):
        restore(any_store, any_store.run_paths("mine"), exchange, 0, load)


def test_every_rank_reads_the_one_that_rank_0_has_found(any_store: Any) -> None:
    save(any_store, 1, 2)
    first, second = list_checkpoints(any_store, any_store.run_paths("mine"))
    assert restored(any_store, rank=1, told=first) == (1, 1)
    change(any_store, second.path, any_store.read(second.path)[::-1])
    with pytest.raises(StoreError, match=r"not the same file on rank 1 and on rank 0 \(its cont"):
        restored(any_store, rank=1, told=second)


def test_epochs_after_a_damaged_one_are_written_anew(any_store: Any) -> None:
    save(any_store, 1, 2, 3, 4, options=CheckpointOptions("torch", keep=4))
    paths = any_store.get_checkpoints("mine")
    for path in paths[2:]:
        change(any_store, path, b"damaged")
    assert restored(any_store) == (2, 2)
    # Nothing is deleted before there is something new.
    assert any_store.get_checkpoints("mine") == paths
    save(any_store, 3)
    assert epochs_in(any_store) == [2, 3]
    assert restored(any_store) == (3, 3)
    assert file_names(any_store) == [
        f"checkpoint-00000{epoch}.{suffix}" for epoch in (2, 3) for suffix in ("ckpt", "json")
    ]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_and_the_best_are_kept(any_store: Any, keep: int) -> None:
    run = any_store.run_paths("mine")
    losses = [0.5, math.nan, 0.2, 0.2, 0.9, 0.8, 0.7]
    saved: list[int] = []
    # In two parts.
    for part in ([1, 2, 3, 4], [5, 6, 7]):
        with CheckpointWriter(any_store, run, CheckpointOptions("torch", keep)) as writer:
            for epoch in part:
                writer.save(state_of(epoch, loss=losses[epoch - 1]), model_of(epoch))
                writer.finish()
                saved.append(epoch)
                best = min(saved, key=lambda e: (losses[e - 1] != losses[e - 1], losses[e - 1], e))
                assert epochs_in(any_store) == sorted({best, *saved[-keep:]})
    found = best_checkpoint(list_checkpoints(any_store, run))
    assert found is not None
    assert (found.epoch, found.monitor, found.mode) == (3, "loss", "min")


def test_what_was_measured_may_be_nan_or_infinite(store: Any) -> None:
    run = store.run_paths("mine")
    with CheckpointWriter(store, run, CheckpointOptions("torch")) as writer:
        for epoch, loss in enumerate([math.inf, math.nan, -math.inf], 1):
            writer.save(state_of(epoch, loss=loss), model_of(epoch))
    found = [info.metrics["loss"] for info in list_checkpoints(store, run)]
    assert math.isnan(found[0])
    assert found[1] == -math.inf
    pointer = Path(pointer_of(store.get_checkpoints("mine")[-1])).read_text()
    # As JSON that others read.
    json.loads(pointer, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"monitor": "val_accuracy"}, 2),
        ({"monitor": "val_accuracy", "mode": "min"}, 1),
        ({"monitor": "odd", "mode": "max"}, 1),
        # Without its prefix, as there is none of training.
        ({"monitor": "accuracy"}, 2),
        ({}, 3),
    ],
)
def test_what_is_best_is_told_by_options(store: Any, options: Any, best: int) -> None:
    accuracies, odd, losses = [0.1, 0.9, 0.5, 0.4], [9, 8, 7, 6], [0.4, 0.3, 0.1, 0.2]
    history: tuple[EpochMetrics, ...] = ()
    run = store.run_paths("mine")
    with CheckpointWriter(store, run, CheckpointOptions("torch", 1, **options)) as writer:
        for epoch in range(4):
            train = {"loss": 1.0 / (epoch + 1), "groups": [{"odd": odd[epoch]}]}
            validation = {"loss": losses[epoch], "val_accuracy": accuracies[epoch]}
            history = (*history, EpochMetrics(epoch, train, validation))
            writer.save(RunState(epoch + 1, 0, 2, history), model_of(epoch))
    assert epochs_in(store) == sorted({best, 4})


def test_a_metric_that_is_not_measured_is_told_after_the_first_epoch_is_kept(store: Any) -> None:
    options = CheckpointOptions("torch", monitor="vall_loss", mode="min")
    with pytest.raises(ParamError, match=r"checkpoint_monitor: found 'vall_loss'.*Set one of"):
        save(store, 1, options=options)
    assert epochs_in(store) == [1]


def test_positions_within_an_epoch_come_between_those_of_epochs(any_store: Any) -> None:
    run = any_store.run_paths("mine")
    with CheckpointWriter(any_store, run, CheckpointOptions("torch", 3)) as writer:
        for epoch, rows in [(1, 0), (1, 48), (1, 144)]:
            writer.save(state_of(epoch, rows), model_of(epoch))
    assert [(i.epoch, i.rows) for i in list_checkpoints(any_store, run)] == [
        *((1, 0), (1, 48), (1, 144))
    ]
    infos = list_checkpoints(any_store, run)
    assert any_store.get_checkpoints("mine") == [info.path for info in infos]
    assert [bool(info.metrics) for info in infos] == [True, False, False]
    assert best_checkpoint(infos) == infos[0]
    save(any_store, 2)
    # The best is none of those within the epoch.
    assert [*positions(any_store, run)] == [(1, 144), (2, 0)]


def test_what_a_killed_rank_has_left_is_deleted_and_files_of_others_are_not(store: Any) -> None:
    folder = Path(store.get_checkpoint_path("mine"))
    save(store, 1)
    others = ["best.ckpt", "kept.keras", "checkpoint-epoch=1.ckpt", ".checkpoint-000001.ckpt"]
    left = ["checkpoint-000007.ckpt", f".checkpoint-000002.ckpt-{uuid.uuid4().hex}"]
    for name in [*others, *left]:
        (folder / name).write_bytes(b"")
    save(store, 2)
    names = {*others, *(f"checkpoint-00000{n}.{s}" for n in (1, 2) for s in ("ckpt", "json"))}
    assert set(file_names(store)) == names


class Slow(FilesystemStore):
    """Its uploads wait until they are let go, and may fail."""

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


def test_training_goes_on_while_a_checkpoint_is_uploaded(slow: Slow) -> None:
    run = slow.run_paths("mine")
    weight = torch.zeros(3)
    with CheckpointWriter(slow, run, CheckpointOptions("torch")) as writer:
        writer.save(state_of(1), lambda file: torch.save({"epoch": 1, "weight": weight}, file))
        # What is saved is what there was then.
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
    # All is there when the block has ended.
    assert epochs_in(slow) == [1, 2]
    assert not writer_threads()
    loaded = torch.load(io.BytesIO(slow.read(slow.get_checkpoints("mine")[0])), weights_only=True)
    assert torch.equal(loaded["weight"], torch.zeros(3))


@pytest.mark.parametrize("ends", ["well", "by an error", "by another save"])
def test_an_upload_that_fails_is_told_and_earlier_ones_stay(
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
            if ends == "by another save":
                writer.save(state_of(4), model_of(4))

    message = r"000003.ckpt' could not be written \(OSError: no space left\).*same run_id goes on"
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


def test_a_model_that_cannot_be_written_leaves_nothing(store: Any) -> None:
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


class ForwardOnly(io.RawIOBase):
    """A file as some remote stores have them: neither read nor sought."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.file.write(data)


def test_files_may_be_written_from_beginning_to_end_only(
    any_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = type(any_store).open_atomic

    @contextlib.contextmanager
    def open_atomic(self: Any, path: str) -> Any:
        with whole(self, path) as file:
            yield ForwardOnly(file)

    monkeypatch.setattr(type(any_store), "open_atomic", open_atomic)
    save(any_store, 1, 2)
    assert restored(any_store) == (2, 2)


def test_a_remote_checkpoint_is_read_once_from_beginning_to_end(monkeypatch: Any) -> None:
    store = Store.create(f"memory://{uuid.uuid4().hex}")
    save(store, 1, 2)
    opened: list[str] = []
    places: list[int] = []
    plain = FilesystemStore.open

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            places.append(self.tell())
            return super().read(size)

        def seek(self, *args: Any) -> int:
            pytest.fail("it was sought")

    def open_watched(self: Any, path: str) -> Any:
        if path.endswith(".json"):
            return plain(self, path)
        opened.append(path)
        return Watched(self.read(path))

    monkeypatch.setattr(FilesystemStore, "open", open_watched)
    assert restored(store) == (2, 2)
    assert opened == [store.get_checkpoints("mine")[-1]]
    assert all(a < b for a, b in itertools.pairwise(places))


class Full(io.BytesIO):
    """A disk with room for a few bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_told_of_where_torch_says_something_else(
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
