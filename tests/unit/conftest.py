"""What unit tests share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from hvd_estimators import Store, clear_training_cache


@pytest.fixture(params=["local", "memory"])
def any_store(request: pytest.FixtureRequest, store: Any) -> Any:
    if request.param == "local":
        return store
    return Store.create(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def cleared_cache() -> Iterator[None]:
    """Let no later test use the data that this one prepares."""
    yield
    clear_training_cache()
