"""Ranks that stay for all tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rank_pool import StandingBackend


@pytest.fixture(scope="module")
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StandingBackend]:
    """A backend of two ranks that train Lightning again and again, as starting them takes long."""
    from lightning_reference import standing_ranks

    module = sys.modules[request.module.__name__]
    with standing_ranks(tmp_path_factory.mktemp("ranks"), module) as standing:
        yield standing


@pytest.fixture(scope="module", autouse=True)
def _end_shared_ranks() -> Iterator[None]:
    yield
    if "rank_pool" in sys.modules:
        sys.modules["rank_pool"].end_shared_ranks()
