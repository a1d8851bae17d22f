"""Shared fixtures of unit tests."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from wrong_calls import Calls

from hvd_estimators import Store


@pytest.fixture(params=["local", "memory"])
def any_store(request: pytest.FixtureRequest, store: Any) -> Any:
    if request.param == "local":
        return store
    return Store.create(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import all frameworks, so that later tests do not wait; valid calls reach the ranks."""
    for framework in ("torch", "keras", "lightning"):
        folder: Path = tmp_path_factory.mktemp(framework)
        with pytest.raises(AssertionError, match="ranks were to be started"):
            Calls(folder).train(framework)
