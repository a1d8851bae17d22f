"""Every test in this folder runs with each reader, and must leave no thread behind."""

import gc
import threading

import pytest
from numbered_rows import READERS, ROWS, Dataset, current


@pytest.fixture(params=READERS, autouse=True)
def reader(request):
    """Run every test with each reader."""
    current.append(READERS[request.param])
    yield request.param
    current.pop()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    gc.collect()  # threads of Petastorm that inspect files end with their executor
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)
    assert not [thread.name for thread in left if thread.is_alive()]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Dataset(tmp_path_factory.mktemp("data") / "train", ROWS, files=3, row_group_size=7)
