"""Horovod's timeline of a job, which rank 0 writes on its machine, brought to the driver's.

``HOROVOD_TIMELINE`` names the file, on both. Runs in rank 0's task and on the driver; for fits the
rank puts it into the run's logs instead (`hvd_estimators.training.horovod_session`).
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
"""Environment variable that tells Horovod's rank 0 which local file to write."""

_ON_CALL = "DYNAMIC"


def timeline_path(env: Mapping[str, str]) -> str | None:
    """Return the file that a rank with some environment writes; None if it writes none.

    With ``DYNAMIC`` the user's own code says in which file, and when.
    """
    path = env.get(TIMELINE_VARIABLE)
    return None if not path or path == _ON_CALL else path


def make_room_for_timeline(env: Mapping[str, str]) -> None:
    """Make the folder that a timeline is to be in, and delete an old one. In rank 0's task."""
    path = timeline_path(env)
    if path is None:
        return
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: %r cannot be written: %s", TIMELINE_VARIABLE, path, error)


def with_timeline(outcome: RankOutcome, env: Mapping[str, str], max_bytes: int) -> RankOutcome:
    """Return how rank 0 ended, with the timeline that it has written. In its task.

    Parameters
    ----------
    outcome : RankOutcome
        How it ended.
    env : mapping
        Its environment.
    max_bytes : int
        What result and timeline may have together; only the size of a larger one is told.
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
        return outcome  # Horovod has printed why


def keep_timeline(outcomes: Sequence[RankOutcome]) -> None:
    """Write the timeline that came with ranks' outcomes to the driver's own file."""
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
