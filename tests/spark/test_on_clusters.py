"""Ranks, GPUs, training functions and a fit on each kind of cluster.

They run on local[3], on executors with GPUs, on hosts with GPUs and without name resolution, and
on YARN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import on_clusters
import pytest
from servers.gpus import GPUS
from two_hosts import GPU
from variants import others_in_soak

cloudpickle.register_pickle_by_value(on_clusters)

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.once]


@dataclass
class ClusterKind:
    """A kind of cluster: a function to run code in its driver, and its number of ranks."""

    name: str
    run: Callable[..., Any]
    ranks: int
    store: str


@pytest.fixture(params=["local", "gpus", "hosts", "yarn"], scope="module")
def cluster_kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ClusterKind:
    folder = str(tmp_path_factory.mktemp("store"))
    if request.param == "local":
        request.getfixturevalue("spark")
        return ClusterKind("local", lambda fn, *args, **_: fn(*args), 2, folder)
    if request.param == "gpus":
        return ClusterKind("gpus", request.getfixturevalue("gpu_cluster").run, 4, folder)
    if request.param == "hosts":
        return ClusterKind("hosts", request.getfixturevalue("two_hosts").run, 2, folder)
    url = request.getfixturevalue("hdfs").url
    return ClusterKind(
        "yarn", request.getfixturevalue("yarn_application").run, 2, f"{url}/on_clusters"
    )


def line() -> list[float]:
    """Return the line that gradient descent from 0 over all rows reaches in one process."""
    x = np.arange(on_clusters.ROWS, dtype=float)
    rows = np.stack([x, np.ones_like(x)], axis=1)
    found = np.zeros(2)
    for _ in range(on_clusters.STEPS):
        found -= on_clusters.RATE * 2 / len(x) * rows.T @ (rows @ found - (2 * x + 1))
    return found.tolist()


def check_places(cluster_kind: ClusterKind, places: list[dict[str, Any]]) -> None:
    ranks = len(places)
    assert [found["rank"] for found in places] == [(rank, ranks) for rank in range(ranks)]
    if cluster_kind.name == "hosts":
        assert [found["local"] for found in places] == [(0, 1), (0, 1)]
        assert [found["cross"] for found in places] == [(0, 2), (1, 2)]
    else:
        # One machine, and one loopback interface.
        assert [found["local"] for found in places] == [(rank, ranks) for rank in range(ranks)]
        assert [found["cross"] for found in places] == [(0, 1)] * ranks
        assert len({found["host"] for found in places}) == 1
    executors = [found["folder"] for found in places]
    pins = [found["gpus"] for found in places]
    devices = [found["devices"] for found in places]
    if cluster_kind.name in ("local", "yarn"):
        assert (pins, devices) == ([None] * ranks, [[]] * ranks)
    else:
        assert devices == [[pin] for pin in pins]
    if cluster_kind.name == "hosts":
        assert pins == [GPU] * ranks
    if cluster_kind.name != "gpus":
        assert len(set(executors)) == (1 if cluster_kind.name == "local" else 2)
    else:
        of_executor: dict[str, set[str]] = {}
        for executor, pin in zip(executors, pins, strict=True):
            of_executor.setdefault(executor, set()).add(pin)
        assert sorted(of_executor.values(), key=max) == [set(GPUS[0]), set(GPUS[1])]
    containers = {found["container"] for found in places}
    assert (len(containers), None in containers) == (
        (2, False) if cluster_kind.name == "yarn" else (1, True)
    )


def test_ranks_know_their_places_and_train_like_one_process(cluster_kind: ClusterKind) -> None:
    train = on_clusters.train_torch
    results = cluster_kind.run(on_clusters.run, train, cluster_kind.ranks, timeout=560)

    for _, found in results:
        np.testing.assert_allclose(found, line(), rtol=1e-12)
    check_places(cluster_kind, [found for found, _ in results])


# Other tests fit on the other kinds.
@pytest.mark.parametrize("cluster_kind", others_in_soak("hosts", "yarn"), indirect=True)
def test_an_estimator_fits_like_one_process(cluster_kind: ClusterKind) -> None:
    np.testing.assert_allclose(
        cluster_kind.run(on_clusters.fit, cluster_kind.store, timeout=560), line(), rtol=1e-5
    )
