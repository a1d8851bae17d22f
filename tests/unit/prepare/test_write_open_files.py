"""A Spark session option that several threads set temporarily."""

import threading
from types import SimpleNamespace

import pytest

from hvd_estimators.prepare.write import several_open_files

OPTION = "spark.sql.maxConcurrentOutputFileWriters"


class Conf(dict):
    def set(self, name, value):
        self[name] = value

    def unset(self, name):
        del self[name]


@pytest.mark.parametrize(
    ("before", "during"),
    [({}, "3"), ({OPTION: "0"}, "3"), ({OPTION: "2"}, "3"), ({OPTION: "7"}, "7")],
)
def test_the_option_is_restored_after_the_last_thread(before, during):
    session = SimpleNamespace(conf=Conf(before))
    entered, leave = threading.Event(), threading.Event()

    def write():
        with several_open_files(session, 3):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=write)
    thread.start()
    assert entered.wait(10)

    def fail():
        with several_open_files(session, 3):
            assert session.conf == {OPTION: during}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert session.conf == {OPTION: during}
    leave.set()
    thread.join(10)
    assert session.conf == before
