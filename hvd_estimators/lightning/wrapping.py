"""Calls before and after methods of Lightning's that have no hook there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["wrapped"]


@contextlib.contextmanager
def wrapped(
    owner: Any,
    name: str,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Call a function before or after a method of an object, until the block ends."""
    own = vars(owner).get(name)
    vars(owner)[name] = _Wrapper(getattr(owner, name), before, after)
    try:
        yield
    finally:
        if own is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = own


class _Wrapper:
    """A method with something before or after it; copies and pickles are of the method alone."""

    def __init__(self, method: Any, before: Any, after: Any) -> None:
        self._method, self._before, self._after = method, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            self._before()
        returned = self._method(*args, **kwargs)
        if self._after is not None:
            self._after()
        return returned

    def __reduce__(self) -> Any:
        # As methods are pickled: by the object, whose state may still be on its way.
        return getattr, (self._method.__self__, self._method.__name__)
