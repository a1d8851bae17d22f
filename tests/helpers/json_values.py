"""Strategies of JSON values and damaged documents, for property tests of documents read back."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_estimators.exceptions import ParamError, StoreError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
"""Any value; NaN and infinity are included, as Python writes and reads them."""

SOAK_MINUTES = float(os.environ.get("HVD_TEST_FUZZ_MINUTES", "5"))
"""Minutes in which a test in soak tries examples; there are 13 tests."""


@dataclass(frozen=True)
class Effort:
    """Amount of examples: batches of a size, one or as many as begin within some seconds."""

    examples: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:g}-seconds" if self.seconds else f"{self.examples}-examples"


@st.composite
def edited_anywhere(draw: Any, document: Any) -> Any:
    """Return a copy of a document after up to three edits at any place."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = {"whole": document}
        key: Any = "whole"
        while isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
            place = place[key]
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(keys))
        if isinstance(place, list) and draw(st.booleans()):
            place.append(place[key])
        elif key != "whole" and isinstance(place, dict) and draw(st.booleans()):
            del place[key]
        elif isinstance(place, dict) and place.keys() != {"whole"} and draw(st.booleans()):
            place[draw(st.text(min_size=1, max_size=8))] = draw(JSON_VALUES)
        else:
            place[key] = draw(JSON_VALUES)
            document = place["whole"] if key == "whole" else document
    return document


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """Return bytes after up to four changes: some other bytes, a missing part, or a missing end."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(damaged) - 1, 0)))
        change = draw(st.sampled_from(["replace", "delete", "truncate"]))
        if change == "replace":
            new = draw(st.binary(min_size=1, max_size=8))
            damaged[start : start + len(new)] = new
        elif change == "delete":
            del damaged[start : start + draw(st.integers(1, 20))]
        else:
            del damaged[start:]
    return bytes(damaged)


NO_JSON = [b"", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000]
"""Contents that no document has, among them ones that are nested deeply."""


def fuzz(check: Callable[[Any], None], strategy: st.SearchStrategy[Any], effort: Effort) -> None:
    """Call a check with examples of a strategy."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    limited = settings(max_examples=effort.examples, suppress_health_check=health)
    deadline = time.monotonic() + effort.seconds
    while True:
        # Each call draws other examples.
        limited(given(strategy)(check))()
        if time.monotonic() >= deadline:
            return


def typed_outcome(action: Callable[[], Any], *names: str) -> Any:
    """Return an action's value, or None if it raises a typed error that contains a name."""
    try:
        return action()
    except (StoreError, ParamError) as error:
        found = str(error)
    assert any(name in found for name in names), found
    return None


def efforts(examples: int, calls: int = 1) -> list[Any]:
    """Return the parameters of a test that calls `fuzz` so often: one for CI, and one for soak."""
    import pytest

    seconds = 60 * SOAK_MINUTES
    long = Effort(1000, seconds / calls)
    in_soak = pytest.mark.soak, pytest.mark.timeout(2 * seconds + 60)
    return [
        pytest.param(each, marks=marks, id=str(each))
        for each, marks in ((Effort(examples), ()), (long, in_soak))
    ]
