"""Transfer of Horovod's timeline from rank 0's machine to the driver's.

``HOROVOD_TIMELINE`` names the file on both machines. Runs in rank 0's task and on the driver. In
fits, the rank adds the timeline to the run's logs instead
(`hvd_estimators.training.horovod_session`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvd_estimators.launch.rank.outcome import RankOutcome

__all__ = [
    "TIMELINE_VARIABLE",
    "keep_timeline",
    "make_room_for_timeline",
    "timeline_path",
    "with_timeline",
]

logger = logging.getLogger(__name__)

TIMELINE_VARIABLE = "HOROVOD_TIMELINE"
"""Environment variable with the local file that Horovod's rank 0 writes."""

_ON_CALL = "DYNAMIC"


def timeline_path(env: Mapping[str, str]) -> str | None:
    """Return the timeline file of a rank with this environment, or None if it writes none.

    With ``DYNAMIC``, the user's own code selects the file and the time.
    """
    path = env.get(TIMELINE_VARIABLE)
    return None if not path or path == _ON_CALL else path


def make_room_for_timeline(env: Mapping[str, str]) -> None:
    """Create the timeline's folder and delete an old timeline. Runs in rank 0's task."""
    path = timeline_path(env)
    if path is None:
        return
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: %r cannot be written: %s", TIMELINE_VARIABLE, path, error)


def with_timeline(outcome: RankOutcome, env: Mapping[str, str], max_bytes: int) -> RankOutcome:
    """Return rank 0's outcome with the timeline that it has written. Runs in rank 0's task.

    Parameters
    ----------
    outcome : RankOutcome
        Outcome of the rank.
    env : mapping
        Environment of the rank.
    max_bytes : int
        Maximum size of result and timeline together. Of a larger timeline, only the size is
        returned.
    """
    path = timeline_path(env)
    if path is None:
        return outcome
    try:
        size = os.path.getsize(path)
        if size > max_bytes - len(outcome.result or b""):
            return replace(outcome, timeline=(path, size))
        return replace(outcome, timeline=(path, Path(path).read_bytes()))
    except OSError:
        return outcome  # Horovod has printed the reason


def keep_timeline(outcomes: Sequence[RankOutcome]) -> None:
    """Write the timeline in the ranks' outcomes to the driver's own file."""
    for outcome in outcomes:
        if outcome.timeline is None:
            continue
        path, content = outcome.timeline
        if isinstance(content, int):
            logger.warning(
                "%s: the timeline is left on %s, in %r: of its %.1f MiB the driver does not "
                "collect so much. A larger spark.driver.maxResultSize lets it.",
                *(TIMELINE_VARIABLE, outcome.host, path, content / 2**20),
            )
            continue
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content)
        except OSError as error:
            logger.warning(
                "%s: %r could not be written here (%s); the file is on %s.",
                *(TIMELINE_VARIABLE, path, error, outcome.host),
            )
