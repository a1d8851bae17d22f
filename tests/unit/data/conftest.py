"""Shared fixtures of tests of datasets."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder for a dataset."""
    path = tmp_path / "data"
    path.mkdir()
    return path
