"""Selection of the checkpoint to resume from when some are damaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from saved_checkpoints import Ranks, change, epochs_in, file_names, restored, save

from hvd_estimators import Store
from hvd_estimators.exceptions import StoreError, StoreUnavailableError
from hvd_estimators.store.checkpoints import list_checkpoints, positions
from hvd_estimators.store.paths import manifest_of
from hvd_estimators.training.checkpoint_writer import restore
from hvd_estimators.training.spec import CheckpointOptions


def test_runs_resume_from_the_newest_checkpoint(any_store: Any) -> None:
    assert restored(any_store) is None
    save(any_store, 1, 2, 3)
    assert restored(any_store) == (3, 3)
    newest = list_checkpoints(any_store, any_store.run_paths("mine"))[-1]
    assert (newest.epoch, newest.rows, newest.framework) == (3, 0, "torch")
    assert newest.metrics == {"loss": pytest.approx(1 / 3)}
    assert any_store.get_checkpoints("mine")[-1] == newest.path


def test_stores_without_runs_have_no_checkpoints(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path), save_runs=False)
    assert positions(store, store.run_paths("mine")) == []
    assert restored(store) is None


def test_truncated_or_corrupted_checkpoints_are_skipped(
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
def test_checkpoints_with_a_corrupted_manifest_are_skipped(any_store: Any, pointer: bytes) -> None:
    save(any_store, 1, 2)
    change(any_store, manifest_of(any_store.get_checkpoints("mine")[-1]), pointer)
    assert restored(any_store) == (1, 1)
    assert epochs_in(any_store) == [1]
    # Searching deletes nothing, and the epoch can be written again.
    assert len(file_names(any_store)) == 4
    save(any_store, 2)
    assert restored(any_store) == (2, 2)
    assert epochs_in(any_store) == [1, 2]


def test_unfinished_checkpoints_are_ignored(any_store: Any) -> None:
    save(any_store, 1, 2)
    any_store.delete(manifest_of(any_store.get_checkpoints("mine")[-1]))
    assert restored(any_store) == (1, 1)
    assert len(any_store.get_checkpoints("mine")) == 1


def test_the_error_lists_all_checkpoints_if_none_is_valid(any_store: Any) -> None:
    save(any_store, 1, 2)
    first, second = any_store.get_checkpoints("mine")
    any_store.delete(first)
    change(any_store, second, b"cut")
    with pytest.raises(StoreError, match=r"'mine'.*Set another run_id.*delete") as raised:
        restored(any_store)
    assert f"{first!r} (there is no such file)" in str(raised.value)
    assert f"{second!r} (it has 3 bytes" in str(raised.value)


def test_unreadable_checkpoints_are_skipped_if_another_is_readable(
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
    # Both checkpoints may be intact, so the error must not suggest deleting them.
    lost.add(older)
    with pytest.raises(StoreError, match=r"^All DataNodes failed$"):
        restored(any_store)
    assert any_store.get_checkpoints("mine") == [older, newest]


def test_no_earlier_checkpoint_is_taken_while_the_store_does_not_answer(
    any_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run would delete the newest one, which may be intact."""
    save(any_store, 1, 2)
    newest = any_store.get_checkpoints("mine")[-1]
    plain = type(any_store).open

    def open_file(self: Any, path: str) -> Any:
        if path == newest:
            raise StoreUnavailableError("timed out")
        return plain(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(type(any_store), "open", open_file)
        with pytest.raises(StoreUnavailableError, match=r"^timed out$"):
            restored(any_store)
    assert restored(any_store) == (2, 2)


def test_a_checkpoint_of_another_model_is_an_error(any_store: Any) -> None:
    save(any_store, 1, 2)

    def load(file: IO[bytes]) -> None:
        raise KeyError("layer.weight")

    exchange: Any = Ranks()
    with pytest.raises(StoreError, match=r"000002.ckpt' cannot be resumed: .*layer.weight"):
        restore(any_store, any_store.run_paths("mine"), exchange, 0, load)


class Refusing(torch.nn.Module):
    """Module with a mistake in its own code."""

    def get_extra_state(self) -> Any:
        return {"words": 3}

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError(f"no vocabulary of {state['words']} words")


def test_an_error_of_the_users_code_is_not_called_damage(any_store: Any) -> None:
    save(any_store, 1, 2)
    module = Refusing()
    exchange: Any = Ranks()

    def load(file: IO[bytes]) -> None:
        module.load_state_dict(module.state_dict())

    with pytest.raises(StoreError, match=r"RuntimeError: no vocabulary of 3 words") as raised:
        restore(any_store, any_store.run_paths("mine"), exchange, 0, load)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert "its file is intact" in str(raised.value)
    assert "damaged" not in str(raised.value)
    assert "delete" not in str(raised.value)


def test_memory_that_runs_out_is_not_called_damage(any_store: Any) -> None:
    save(any_store, 1, 2)
    exchange: Any = Ranks()

    def on_gpu(file: IO[bytes]) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def on_cpu(file: IO[bytes]) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    for load, told in ((on_gpu, "memory of a GPU ran out"), (on_cpu, "^Memory ran out")):
        with pytest.raises(MemoryError, match=told):
            restore(any_store, any_store.run_paths("mine"), exchange, 0, load)


def test_every_rank_reads_the_checkpoint_found_by_rank_0(any_store: Any) -> None:
    save(any_store, 1, 2)
    first, second = list_checkpoints(any_store, any_store.run_paths("mine"))
    assert restored(any_store, rank=1, told=first) == (1, 1)
    change(any_store, second.path, any_store.read(second.path)[::-1])
    with pytest.raises(StoreError, match=r"not the same file on rank 1 and on rank 0 \(its cont"):
        restored(any_store, rank=1, told=second)


def test_epochs_after_a_damaged_checkpoint_are_rewritten(any_store: Any) -> None:
    save(any_store, 1, 2, 3, 4, options=CheckpointOptions("torch", keep=4))
    paths = any_store.get_checkpoints("mine")
    for path in paths[2:]:
        change(any_store, path, b"damaged")
    assert restored(any_store) == (2, 2)
    # Nothing is deleted before a new checkpoint exists.
    assert any_store.get_checkpoints("mine") == paths
    save(any_store, 3)
    assert epochs_in(any_store) == [2, 3]
    assert restored(any_store) == (3, 3)
    assert file_names(any_store) == [
        f"checkpoint-00000{epoch}.{suffix}" for epoch in (2, 3) for suffix in ("ckpt", "json")
    ]
