"""Params of restarts; wrong values are rejected before anything starts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from test_checkpoint_params import start
from test_runs import ESTIMATORS, NoRanks

from hvd_estimators.exceptions import ParamError
from hvd_estimators.loading.readers import DataModule


class Own(DataModule):
    """Estimator that reads one shard on each rank."""


class TwoRanks(NoRanks):
    def num_processes(self) -> int:
        return 2


@pytest.mark.parametrize("framework", list(ESTIMATORS))
def test_invalid_restart_params_are_rejected(
    store: Any,
    framework: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fit(**params: Any) -> Any:
        return start(store, framework, monkeypatch, backend=TwoRanks(), **params)

    for params, told in [
        ({"max_restarts": -1}, "max_restarts: expected 0 or more, found -1"),
        ({"max_restarts": "often"}, "max_restarts: expected a whole number"),
        ({"min_num_proc": 0}, "min_num_proc: expected 1 or more, found 0"),
        (
            {"min_num_proc": 3, "max_restarts": 1},
            "min_num_proc: expected at most num_proc, the 2 ranks .* found 3. Set it to 2 or less",
        ),
        (
            {"min_num_proc": 1, "max_restarts": 1, "data_module": Own},
            "min_num_proc: found 1, and data_module .*Own.* reads the shard of one rank only",
        ),
    ]:
        with pytest.raises(ParamError, match=told):
            fit(**params)
    assert list(store.names(store.get_runs_path())) == []
    with caplog.at_level(logging.WARNING):
        fit(min_num_proc=1, max_restarts=1)
        assert "min_num_proc" not in caplog.text
        fit(min_num_proc=1)
    assert "min_num_proc has no effect" in caplog.text
