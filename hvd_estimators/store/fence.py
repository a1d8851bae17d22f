"""What keeps ranks from a run that others train by now. Made on the driver, asked by ranks.

A rank outlives its launch by some seconds where it may save the step that it is in, and by more
where its machine is cut off or its process was stopped. Meanwhile its driver may have launched
others, or another application may have taken the run over. Both are seen by the run's lease: it
has another token then, or tells of a later launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.claims import Claim
from hvd_estimators.store.files import Files
from hvd_estimators.store.lease import LAUNCH, read_if_there

__all__ = ["Fence"]


@dataclass(frozen=True)
class Fence:
    """Tells whether a launch is still the one that trains a run.

    Attributes
    ----------
    path : str
        The run's lease.
    token : str
        The lease's when the launch began.
    launch : int
        The launch's number under this lease, from 0.
    """

    path: str
    token: str
    launch: int

    def check(self, store: Files) -> None:
        """Make sure that nobody has come in this launch's place.

        Where there is no lease, nobody trains the run, and the driver is about to end as well.

        Raises
        ------
        StoreError
            If somebody has; or if the store does not tell.
        """
        content = read_if_there(store, self.path)
        if content is None:
            return
        try:
            claim = Claim.from_json(content)
        except ValueError:
            return  # whoever damaged it has not trained
        if claim.token != self.token:
            raise StoreError(
                f"{claim.owner} has taken the run over from this fit (see {self.path!r}), which "
                "writes to it no more"
            )
        if claim.details.get(LAUNCH, 0) != self.launch:
            raise StoreError(
                "the ranks have been launched again in place of this one, which was slow to end"
            )
