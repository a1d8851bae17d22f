"""Calls of user functions in a rank, including programs for ``horovod.elastic``.

Runs on the worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["NoNotifications", "call_with", "call_without_notifications", "of_first_rank"]


class NoNotifications:
    """Replacement for the notification manager of ``horovod.elastic``.

    Horovod's manager would listen on all network interfaces for host updates, and register itself
    with the rendezvous. This package sends no such updates.
    """

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def register_listener(self, state: Any) -> None:
        """Do nothing."""

    def remove_listener(self, state: Any) -> None:
        """Do nothing."""


def call_with(
    manager: NoNotifications,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function with a replacement for Horovod's notification manager."""
    # Horovod's modules for all frameworks import the manager from this module.
    from horovod.common import elastic

    elastic.notification_manager = manager
    return fn(*args, **kwargs)


def call_without_notifications(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a function, which may be a program for ``horovod.elastic``."""
    return call_with(NoNotifications(), fn, args, kwargs or {})


def of_first_rank(main: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function; return its result on rank 0 alone, since others' may not be serializable."""
    value = call_without_notifications(main, (), kwargs)
    return value if os.environ["HOROVOD_RANK"] == "0" else None
