"""Logs of ranks in a store: bounded, also of killed ranks, without the store's secrets."""

import os
import pickle
import signal
import sys
import threading

import cloudpickle
import pytest

from hvd_estimators import Store
from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank import rank_logs
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.rank_logs import HALF_CHARS, RankLog, RankLogs, logging_ranks

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LINE = f"{'x' * 98}\n"


@pytest.fixture
def logs(store):
    return RankLogs(store, f"{store.folder}/logs")


def content(logs, rank=0):
    return logs.store.read(logs.path(rank)).decode()


def chat():
    """Print 30 MB on rank 0, and some lines on the others; rank 1 then kills itself."""
    rank = int(os.environ["HOROVOD_RANK"])
    print("the first line of rank", rank, flush=True)
    if rank == 0:
        for _ in range(300):
            sys.stdout.write(LINE * 1000)
    print("the last line of rank", rank, file=sys.stderr, flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        raise ValueError("bad rows")


def test_a_chatty_rank_stays_within_the_bound_and_a_killed_one_leaves_its_log(logs, monkeypatch):
    # All three ranks end by themselves.
    monkeypatch.setattr("hvd_estimators.launch.rank.supervisor._GRACE_SECONDS", 60)

    with logging_ranks(logs), pytest.raises(WorkerFailedError):
        LocalBackend(3, verbose=0).run(chat)

    chatty, killed, failed = (content(logs, rank) for rank in range(3))
    assert len(chatty) <= 2 * HALF_CHARS + 200
    assert chatty.startswith(f"the first line of rank 0\n{LINE}")
    gap = next(line for line in chatty.splitlines() if "left out" in line)
    count = int(gap.split()[1].replace(",", ""))
    assert chatty.count(LINE) + count == 300_000
    assert "the last line of rank 0\n[rank 0 on" in chatty
    assert chatty.endswith(" has ended]\n")

    assert killed.startswith("the first line of rank 1\nthe last line of rank 1\n[rank 1 on ")
    assert "SIGKILL" in killed.splitlines()[-1]
    assert "ValueError: bad rows\n[rank 2 on " in failed


def test_without_a_folder_ranks_log_nowhere(store):
    LocalBackend(1, verbose=0).run(print, ("said",))

    assert not store.names(store.folder)


def test_secrets_of_the_store_and_urls_are_masked(tmp_path):
    store = Store.create(str(tmp_path), storage_options={"token": "very-secret"})
    logs = RankLogs(store, f"{store.folder}/logs")
    with RankLog(pickle.dumps(logs), 0) as log:
        log.add(["uses very-secret\n", "opens s3://user:password@host/x\n"])

    assert content(logs) == "uses ***\nopens s3://***@host/x\n"
    assert "very-secret" not in repr(logs)


def test_a_log_is_written_while_its_rank_runs(logs, monkeypatch):
    monkeypatch.setattr(rank_logs, "_WRITE_SECONDS", 0.01)
    written = threading.Event()
    before = logs.store.write_text

    def write_text(path, text):
        before(path, text)
        written.set()

    monkeypatch.setattr(logs.store, "write_text", write_text)
    with RankLog(logs, 0) as log:
        log.add(["early\n"])
        assert written.wait(30)
        assert content(logs) == "early\n"


def test_a_store_that_fails_or_hangs_does_not_end_the_rank(logs, monkeypatch, caplog):
    monkeypatch.setattr(rank_logs, "_CLOSE_SECONDS", 0.1)
    released = threading.Event()

    def fail(path, text):
        raise OSError("no space left")

    monkeypatch.setattr(logs.store, "write_text", fail)
    with RankLog(logs, 0) as log:
        log.add_outcome(RankOutcome(0, "here", b""))
    assert "The log of rank 0 could not be written: no space left" in caplog.text

    monkeypatch.setattr(logs.store, "write_text", lambda path, text: released.wait(60))
    with RankLog(logs, 0) as log:
        log.add(["said\n"])
    released.set()
