"""Jobs that import modules ahead of the ranks, and how these jobs end."""

import threading
import time
from types import SimpleNamespace

import pytest

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.cluster import jobs

pytestmark = pytest.mark.timeout(60)


class FakeCluster:
    """An application whose job takes some time, or waits for slots."""

    application = "app"

    is_local = False

    def __init__(self, seconds):
        self._seconds = seconds
        self.cancelled = threading.Event()
        self.ended = threading.Event()

    def thread(self, target):
        return threading.Thread(target=target, daemon=True)

    def tagged(self, *_):
        return threading.Lock()

    def collect(self, *_, **__):
        self.cancelled.wait(self._seconds)
        self.ended.set()

    def cancel(self, tag):
        self.cancelled.set()


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(jobs, "_requested", {})
    return SimpleNamespace(modules=("json",), executable=None, env={})


def fail(cluster, job, error):
    began = time.monotonic()
    with pytest.raises(type(error)), jobs.importing(cluster, 2, job):
        raise error
    return time.monotonic() - began


def test_started_tasks_finish_before_an_error_propagates(job):
    cluster = FakeCluster(0.5)
    fail(cluster, job, ValueError())
    assert cluster.ended.is_set()
    assert not cluster.cancelled.is_set()


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_a_job_that_does_not_end_is_cancelled(job, monkeypatch, error):
    monkeypatch.setattr(timeouts, "IMPORT_JOB", 0.5)
    cluster = FakeCluster(30)
    assert fail(cluster, job, error) < 5
    assert cluster.cancelled.is_set()
    assert cluster.ended.is_set()
