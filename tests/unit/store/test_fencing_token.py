"""Replaced ranks neither write nor delete checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, Any

import pytest
from saved_checkpoints import epochs_in, file_names, model_of, restored, state_of

from hvd_estimators._util.process_identity import this_process
from hvd_estimators.exceptions import StoreError
from hvd_estimators.fitting.run import Run
from hvd_estimators.store import FilesystemStore
from hvd_estimators.store.leases import FencingToken, LeaseRecord, lease_path, newest_lease
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.spec import CheckpointOptions


def writer_of(store: Any, fence: FencingToken | None) -> CheckpointWriter:
    options = replace(CheckpointOptions("torch", keep=1), fence=fence)
    return CheckpointWriter(store, store.run_paths("mine"), options)


def save(writer: CheckpointWriter, epoch: int, first: Any = None) -> None:
    writer.save(state_of(epoch), model_of(epoch), first)
    writer.finish()


def take_over(store: Any) -> None:
    now = datetime.now(UTC)
    owner = replace(this_process(), machine="elsewhere", host="node7")
    run_path = store.run_paths("mine").run_path
    path = lease_path(run_path, newest_lease(store, run_path)[0] + 1)
    assert store.write_new(path, LeaseRecord(owner, now, now, "another").to_json())


def launch_again(held: Run) -> None:
    held.fencing_token(1)


@pytest.mark.parametrize("by", ["another launch", "another fit"])
def test_ranks_of_an_earlier_launch_write_and_delete_nothing(store: Any, by: str) -> None:
    held = Run(store, store.run_paths("mine"))
    with held:
        fence = held.fencing_token(0)
        assert fence is not None
        uploaded: list[int] = []
        with writer_of(store, fence) as old:
            save(old, 1)
            if by == "another fit":
                take_over(store)
                new, message = None, r"node7.* has taken the run over"
            else:
                new, message = held.fencing_token(1), "launched again in place of this rank"
            with writer_of(store, new) as writer:
                save(writer, 2)
                save(writer, 3)
                files = file_names(store)
                with pytest.raises(StoreError, match=f"000002.ckpt.* not be written.*{message}"):
                    # The old ranks' next checkpoint, of epoch 2, would delete that of epoch 3.
                    save(old, 2, lambda: uploaded.append(2))
                assert not uploaded
                assert file_names(store) == files
                assert epochs_in(store) == [3]
                assert restored(store) == (3, 3)
                save(writer, 4)
                assert epochs_in(store) == [4]


class Slow(FilesystemStore):
    """Store on which another launch replaces the writer during an upload."""

    meanwhile: Callable[[], None] | None = None

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        with super().open_atomic(path) as file:
            yield file
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def test_a_replaced_writers_upload_is_discarded(tmp_path: Any) -> None:
    store = Slow(str(tmp_path))
    held = Run(store, store.run_paths("mine"))
    with held, writer_of(store, held.fencing_token(0)) as old:
        save(old, 1)
        store.meanwhile = lambda: launch_again(held)
        with pytest.raises(StoreError, match="launched again"):
            save(old, 2)
        assert epochs_in(store) == [1]
        assert restored(store) == (1, 1)


def test_a_fit_without_its_lease_may_write_a_last_checkpoint(store: Any) -> None:
    with Run(store, store.run_paths("mine")) as held:
        fence = held.fencing_token(0)
        store.delete(lease_path(store.run_paths("mine").run_path, 1))
        with writer_of(store, fence) as writer:
            save(writer, 1)
        assert epochs_in(store) == [1]


def test_a_driver_that_wakes_up_deletes_nothing_of_the_next_one(store: Any) -> None:
    paths = store.run_paths("mine")
    unfinished = f"{paths.checkpoints_path}/checkpoint-000005.ckpt"
    with contextlib.suppress(KeyError), Run(store, paths) as held, held.without_orphans():
        store.write_text(unfinished, "of the ranks of this driver")
        raise KeyError
    assert not store.exists(unfinished)
    with contextlib.suppress(KeyError), Run(store, paths) as held, held.without_orphans():
        take_over(store)
        store.write_text(unfinished, "of the ranks of the other driver")
        assert not held.lost  # before its next heartbeat
        raise KeyError
    assert store.exists(unfinished)


def test_a_rank_may_write_while_its_driver_releases_the_run(store: Any) -> None:
    with Run(store, store.run_paths("mine")) as held:
        fence = held.fencing_token(0)
        assert fence is not None
        with writer_of(store, fence) as writer:
            save(writer, 1)
    with writer_of(store, fence) as writer:
        save(writer, 2)
    with (
        Run(store, store.run_paths("mine")),
        writer_of(store, fence) as writer,
        pytest.raises(StoreError, match="has taken the run over"),
    ):
        save(writer, 3)
    assert epochs_in(store) == [2]


def test_heartbeats_keep_the_generation_and_respect_other_leases(store: Any) -> None:
    run_path = store.run_paths("mine").run_path
    with Run(store, store.run_paths("mine")) as held:
        fence = held.fencing_token(2)
        assert fence is not None
        assert held._lease is not None
        held._lease.beat()
        fence.check(store)
        assert (fence.generation, newest_lease(store, run_path)[0]) == (2, 2)
        take_over(store)
        stopped = held.fencing_token(3)
        assert stopped is not None
        with pytest.raises(StoreError, match=r"node7.* has taken the run over"):
            stopped.check(store)
        assert held.lost
    generation, claim = newest_lease(store, run_path)
    assert claim is not None
    assert (generation, claim.token) == (3, "another")
