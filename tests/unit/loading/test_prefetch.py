"""Ends of a `Prefetch`, whose consumer and closer may be different threads."""

import sys
import threading
from functools import partial

import pytest
from processes import in_thread

from hvd_estimators.loading.interleave import Prefetch

pytestmark = pytest.mark.timeout(60)


def test_a_prefetcher_closed_by_another_thread_ends_its_consumer():
    """At the end of a fit on a GPU, the thread that copies rows waits while the reader closes."""

    def source(aligned, count):
        aligned.wait()
        yield from range(count)

    def close(aligned, items):
        aligned.wait()
        items.close()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(500):
            count = number % 2
            aligned = threading.Barrier(5)
            items = Prefetch(source(aligned, count), 1, "rows")
            consuming = in_thread(partial(list, items))
            closing = [in_thread(partial(close, aligned, items)) for _ in range(4)]
            for each in closing:
                each.result(timeout=20)
            assert len(consuming.result(timeout=20)) <= count
    finally:
        sys.setswitchinterval(interval)
