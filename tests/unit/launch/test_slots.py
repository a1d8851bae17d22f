"""Task slots of a cluster whose executors register one by one, on a simulated clock."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_estimators.launch.cluster import application
from hvd_estimators.launch.cluster.application import await_slots, expected_executors


class Cluster:
    """A cluster whose executors, of two task slots each, register at given seconds."""

    def __init__(self, arrivals: list[float], conf: dict[str, str], master: str) -> None:
        self.arrivals, self.conf, self.master = arrivals, conf, master
        self.now = 1000.0

    @property
    def age(self) -> float:
        return self.now - 1000

    def executors(self) -> int:
        return sum(self.now - 1000 >= arrival for arrival in self.arrivals)

    def task_slots(self) -> int:
        return 2 * self.executors()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("arrivals", "conf", "master", "wanted", "slots_then", "seconds"),
    [
        # The cluster manager should start two executors; the second comes minutes after the first.
        ([1, 200], {"spark.executor.instances": "2"}, "k8s://https://host", 4, 4, 200),
        ([1, 200], {}, "yarn", 4, 4, 200),
        ([1, 200], {"spark.executor.instances": "2"}, "yarn", None, 4, 200),
        ([1, 900], {"spark.executor.instances": "2"}, "yarn", 4, 2, 600),
        # All executors are there, but not enough: waiting is useless.
        ([1, 2], {"spark.executor.instances": "2"}, "yarn", 9, 4, 2),
        ([1, 2], {}, "local-cluster[2, 2, 1024]", 9, 4, 2),
        ([0, 0], {"spark.cores.max": "4", "spark.executor.cores": "2"}, "spark://host", 5, 4, 0),
        # The final number of executors is unknown.
        ([1, 40], {}, "spark://host:7077", 4, 4, 40),
        ([1, 900], {}, "spark://host:7077", 4, 2, 61),
        ([100], {}, "spark://host:7077", 2, 2, 100),
        ([1, 5], {}, "spark://host:7077", None, 4, 15),
        ([], {}, "spark://host:7077", None, 0, 600),
    ],
)
def test_executors_that_are_still_starting_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    arrivals: list[float],
    conf: dict[str, str],
    master: str,
    wanted: int | None,
    slots_then: int,
    seconds: float,
) -> None:
    cluster = Cluster(arrivals, conf, master)
    given: Any = cluster
    monkeypatch.setattr(application, "time", cluster)

    assert await_slots(given, wanted, 600.0) == slots_then
    assert cluster.now - 1000 == pytest.approx(seconds, abs=1)


def test_the_expected_number_of_executors_is_known_if_it_is_fixed() -> None:
    assert expected_executors("k8s://x", {"spark.executor.instances": "7"}) == 7
    assert expected_executors("yarn", {}) == 2
    assert expected_executors("local-cluster[3,1,1024]", {}) == 3
    cores = {"spark.cores.max": "9", "spark.executor.cores": "4"}
    assert expected_executors("spark://host", cores) == 2
    assert expected_executors("spark://host", {"spark.cores.max": "9"}) is None
    assert expected_executors("local[4]", {}) is None
