"""Validation that takes long: a checkpoint just before it, so that it is all that can be lost.

While ranks validate, they agree on nothing: each takes as many batches as it has. Who asks them to
end, or kills one, would take all steps since the last checkpoint along. Runs in the ranks; imports
no framework.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from hvd_estimators.training.spec import CheckpointOptions

__all__ = ["LongValidation"]


class LongValidation:
    """Tells whether to save the run before an epoch's last step, as validation comes after it.

    That is where the validation before took longer than `CheckpointOptions.long_validation`. An
    epoch's last step itself is not one to save after: the next thing that is saved is its end.

    Parameters
    ----------
    options : CheckpointOptions
        What is long.
    ranks : int
        How many there are.
    sum_over_ranks : callable
        Adds up a number of each rank. Called by all ranks, in `measure` and `agree`.
    """

    def __init__(
        self, options: CheckpointOptions, ranks: int, sum_over_ranks: Callable[[float], float]
    ) -> None:
        self._limit = options.long_validation
        self._ranks = ranks
        self._sum = sum_over_ranks
        self._is_long = False
        self._begun: float | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Take the time of a validation. Called by all ranks."""
        self.begin()
        yield
        self.agree()

    def begin(self) -> None:
        """Note that validation begins."""
        self._begun = time.monotonic()

    def agree(self) -> None:
        """Settle, now that a validation has ended, whether it was a long one. By all ranks."""
        took = 0.0 if self._begun is None else time.monotonic() - self._begun
        self._begun = None
        self._is_long = self._sum(took) / self._ranks > self._limit

    def is_due(self, steps_left: int, steps: int = 1) -> bool:
        """Return whether to save now. The same on all ranks.

        Parameters
        ----------
        steps_left : int
            Steps of the optimizer that are left of the epoch.
        steps : int
            How many are taken before it is asked again.
        """
        return self._is_long and 0 < steps_left <= steps
