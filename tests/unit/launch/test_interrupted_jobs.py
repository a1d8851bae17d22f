"""Ends of Spark jobs: an interrupt of the driver that waits, a cancel, and a limit."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from hvd_estimators.exceptions import SlotsError
from hvd_estimators.launch.cluster import capacity, jobs
from hvd_estimators.launch.cluster.jobs import barrier_job, interruptible

pytestmark = pytest.mark.timeout(60)


class FakeCluster:
    """An application whose job is unknown until somebody has tried to cancel it."""

    profile = None

    def __init__(self):
        self.cancels = threading.Semaphore(0)
        self.states = []
        self.thread = lambda run: threading.Thread(target=run, daemon=True)
        self.context = SimpleNamespace(parallelize=lambda *_: SimpleNamespace(foreach=self.run))

    def tagged(self, *_):
        return threading.Lock()

    def accept_barrier_jobs(self):
        pass

    def task_slots(self):
        return 0

    def started_tasks(self, tag):
        return 0

    def slots_beside(self, tag, shared_tag):
        return None

    def cancel(self, tag):
        self.cancels.release()

    def run(self, *_):
        self.states.append("pickled" if self.cancels.acquire(timeout=20) else "not cancelled")
        self.states.append("cancelled" if self.cancels.acquire(timeout=5) else "not cancelled")
        raise ValueError("cancelled")


def test_a_signal_that_another_thread_receives_ends_the_wait():
    ended = threading.Event()

    def collect():
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ended.wait(30)
        return []

    cluster = SimpleNamespace(
        thread=lambda run: threading.Thread(target=run, daemon=True), cancel=lambda tag: ended.set()
    )
    with pytest.raises(KeyboardInterrupt):
        interruptible(cluster, "tag", collect)
    assert ended.is_set()


def test_a_job_that_is_submitted_after_an_interrupt_is_cancelled():
    cluster = FakeCluster()

    def collect():
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        cluster.run()

    with pytest.raises(KeyboardInterrupt), jobs.spark_job(cluster) as tag:
        interruptible(cluster, tag, collect)
    assert cluster.states == ["pickled", "cancelled"]


def test_a_thread_that_ends_before_the_job_is_an_error():
    """As PySpark's, if the context stops at this moment."""
    never = SimpleNamespace(thread=lambda run: threading.Thread(target=lambda: None))
    with pytest.raises(RuntimeError, match="Is Spark stopped"):
        interruptible(never, "tag", list)
    assert jobs.BackgroundJob(never, "request", list).wait(0.1)


def test_a_job_that_is_submitted_after_its_limit_is_cancelled():
    cluster = FakeCluster()
    with pytest.raises(SlotsError, match="start_timeout"), barrier_job(cluster, 2, 0.0):
        cluster.run()
    assert cluster.states == ["pickled", "cancelled"]


def test_a_request_for_executors_is_cancelled_although_it_starts_late(monkeypatch):
    cluster, may_start = FakeCluster(), threading.Event()
    background = jobs.BackgroundJob.wait

    def tagged(*_):
        assert may_start.wait(20)
        return threading.Lock()

    def wait(job, seconds):
        may_start.set()
        return background(job, seconds)

    monkeypatch.setattr(cluster, "tagged", tagged)
    monkeypatch.setattr(jobs.BackgroundJob, "wait", wait)
    assert capacity.ask_for_executors(cluster, 2, 0.0) == 0
    assert cluster.states == ["pickled", "cancelled"]
