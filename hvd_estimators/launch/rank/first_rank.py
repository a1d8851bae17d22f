"""What `hvd_estimators.HorovodRunner` runs in the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hvd_estimators.launch.rank.notifications import call_without_notifications

__all__ = ["of_first_rank"]


def of_first_rank(main: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function; return what it returns on rank 0, since others' may be no good to send."""
    value = call_without_notifications(main, (), kwargs)
    return value if os.environ["HOROVOD_RANK"] == "0" else None
