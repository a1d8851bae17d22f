"""Parameters of a test of which CI runs one."""

from __future__ import annotations

from typing import Any

import pytest


def others_in_soak(first: Any, *others: Any) -> list[Any]:
    """Return the parameters of a test; all but the first have the marker ``soak``."""
    return [first, *(pytest.param(other, marks=pytest.mark.soak) for other in others)]
