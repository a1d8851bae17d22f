"""Ranks shared by all tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rank_pool import StandingBackend


@pytest.fixture
def backend() -> StandingBackend:
    """Two ranks of torch and Lightning, shared by all fits of a module."""
    import cloudpickle
    import lightning_reference
    import reference
    from rank_pool import shared_ranks

    for module in (reference, lightning_reference):
        cloudpickle.register_pickle_by_value(module)
    return shared_ranks(2)


@pytest.fixture(scope="module", autouse=True)
def _end_shared_ranks() -> Iterator[None]:
    yield
    if "rank_pool" in sys.modules:
        sys.modules["rank_pool"].end_shared_ranks()
