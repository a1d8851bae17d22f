"""Digests of a model's weights, with which ranks and driver check that all ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.store.base import RunPaths

__all__ = ["check_equal_weights", "combined_digest", "named_weights", "unequal_weights"]

_MOST_NAMES = 8

Digests = Mapping[str, str]
"""Name of a weight to the digest of its bits."""


def combined_digest(digests: Digests) -> str:
    """Return one digest of all weights."""
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()


def unequal_weights(by_rank: Sequence[Digests]) -> list[str]:
    """Return the names of weights that differ between ranks, in the model's order."""
    names = dict.fromkeys(name for digests in by_rank for name in digests)
    return [name for name in names if len({digests.get(name) for digests in by_rank}) > 1]


def check_equal_weights(by_rank: Sequence[Digests], epoch: int, run: RunPaths) -> None:
    """Reject weights that differ between ranks after the first epoch of a fit.

    Raises
    ------
    HvdEstimatorsError
        If weights differ; the message names them.
    """
    names = unequal_weights(by_rank)
    if names:
        raise HvdEstimatorsError(
            f"After epoch {epoch}, the first of this fit, the ranks have different weights: "
            f"{named_weights(names)}. Run {run.run_id!r} ends here. {CAUSES}"
        )


CAUSES = (
    "Ranks stay equal if weights change only by the steps of torch optimizers, after backward(). "
    "Look for code that changes weights in another way, or differently on each rank: random "
    "numbers, files, hvd.rank()."
)


def named_weights(names: Sequence[str]) -> str:
    """Return the names for a message, shortened if there are many."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
