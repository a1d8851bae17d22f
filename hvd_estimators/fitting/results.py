"""What the ranks of a fit answered, as the driver makes the fitted model of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from hvd_estimators.exceptions import HvdEstimatorsError, ResultsError
from hvd_estimators.training.spec import EpochMetrics, TrainResult

__all__ = ["RunResults"]


class RunResults(Sequence[TrainResult]):
    """The ranks' results, in the order of the ranks. Runs on the driver.

    Parameters
    ----------
    results : sequence of TrainResult
        One per rank; that of rank 0 holds the trained state.
    spec : TrainSpec
        What the ranks were told: the framework's own.
    """

    def __init__(self, results: Sequence[TrainResult], spec: Any) -> None:
        self._results = tuple(results)
        self.spec = spec

    @property
    def state(self) -> Any:
        """What rank 0 trained, once it is certain that the others agree.

        It is bytes, or a `LocalFile` where the framework's trainer returns one.

        Raises
        ------
        HvdEstimatorsError
            If the ranks ended with different weights.
        ResultsError
            If rank 0 returned no state.
        """
        if len({result.weights_digest for result in self._results}) > 1:
            raise HvdEstimatorsError(
                "The ranks ended with different weights. A callback, custom layer or "
                "train_minibatch_fn that treats ranks differently can cause that."
            )
        state = self._results[0].state
        if state is None:
            raise ResultsError(
                "Rank 0 returned no trained state. A backend has to return the ranks' results in "
                "the order of the ranks."
            )
        return state

    @property
    def history(self) -> tuple[EpochMetrics, ...]:
        """One record per epoch of the whole run."""
        return self._results[0].history

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, index: int) -> TrainResult: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TrainResult]: ...

    def __getitem__(self, index: int | slice) -> TrainResult | Sequence[TrainResult]:
        return self._results[index]
