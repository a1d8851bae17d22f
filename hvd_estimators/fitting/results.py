"""What the ranks of a fit answered, as the driver makes the fitted model of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from hvd_estimators.exceptions import HvdEstimatorsError, ResultsError
from hvd_estimators.training.spec import EpochMetrics, TrainResult
from hvd_estimators.training.weight_digests import named_weights, unequal_weights

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
            raise HvdEstimatorsError(self._unequal())
        state = self._results[0].state
        if state is None:
            raise ResultsError(
                "Rank 0 returned no trained state. A backend has to return the ranks' results in "
                "the order of the ranks."
            )
        return state

    def _unequal(self) -> str:
        """Return the message about ranks that ended with different weights."""
        names = unequal_weights([result.weight_digests for result in self._results])
        message = "The ranks ended with different weights"
        message += f": {named_weights(names)}. " if names else ". "
        message += (
            "A callback, custom layer or step of the user's that treats ranks differently can "
            "cause that."
        )
        run = getattr(self.spec, "run", None)
        if run is None:
            return message
        if run.checkpoints_path is None:
            return f"{message} Run {run.run_id!r} keeps no checkpoints: its result is lost."
        return (
            f"{message} What rank 0 trained is the newest checkpoint of run {run.run_id!r}, in "
            f"{run.checkpoints_path}: load_checkpoint(store, run_id={run.run_id!r}) reads it."
        )

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
