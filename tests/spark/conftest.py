"""Shared fixtures of tests on Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import two_hosts as hosts
from two_hosts import Cluster


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[Cluster]:
    """A standalone cluster on two hosts without name resolution, with a driver on the first."""
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    with hosts.hosts_and_cluster() as made, made.driver():
        yield made
