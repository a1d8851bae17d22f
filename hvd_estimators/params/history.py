"""The param of what was measured in training, and the same as rows. Runs on the driver."""

from __future__ import annotations

import pandas as pd

from hvd_estimators.history import history_rows
from hvd_estimators.params import DeclaredParams, declare

__all__ = ["HistoryParams"]


class HistoryParams(DeclaredParams):
    """What was measured while a model was trained."""

    history = declare(
        "What was measured in each epoch: a list of dicts with epoch, train and validation. See "
        "history_frame() for rows."
    )

    def history_frame(self) -> pd.DataFrame:
        """Return what was measured as rows: the same columns for all frameworks.

        ``getHistory()`` has a shape of its own for each of them:

        - Keras: that of Keras's ``History.history``, a dict of name to a list of values by epoch;
          names of validation begin with ``val_``, which is left out here. It does not tell epochs:
          of what a callback adds in some of them only, the first value is taken for epoch 0's.
        - torch: a list of dicts, one per epoch, with ``epoch``, ``train`` and (with validation)
          ``validation``; the latter two hold ``loss`` and ``all_metrics``, a list with a dict per
          group of metrics, such as ``{"my_metric": 0.1}``.
        - Lightning: the same list; ``train`` and ``validation`` hold ``loss`` where steps return
          one, and what the module logs by the names that it logs it by.

        Returns
        -------
        pandas.DataFrame
            A row per number, with the columns ``epoch`` (of the whole run, from 0), ``stage``
            (``"train"`` or ``"validation"``), ``name`` (that of a metric; members of an array are
            numbered, ``name_0`` and so on) and ``value`` (a float). Empty if there is no history.
        """
        rows = history_rows(self.getOrDefault("history") or [])
        columns = {"epoch": "int64", "stage": "object", "name": "object", "value": "float64"}
        return pd.DataFrame(rows, columns=list(columns)).astype(columns)
