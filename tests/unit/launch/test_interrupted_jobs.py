"""Interrupts of a driver that waits for a Spark job."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from hvd_estimators.launch.cluster.jobs import interruptible


def test_a_signal_that_another_thread_receives_ends_the_wait():
    ended = threading.Event()

    def collect():
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ended.wait(30)
        return []

    cluster = SimpleNamespace(thread=lambda run: threading.Thread(target=run, daemon=True))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interruptible(cluster, collect)
    seconds = time.monotonic() - started
    ended.set()
    assert seconds < 15
