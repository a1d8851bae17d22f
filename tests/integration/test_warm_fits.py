"""Imports of ranks that are forked from a warm process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import store_runs
from reference import write_rows
from variants import others_in_soak

from hvd_estimators.launch import LocalBackend

pytestmark = pytest.mark.integration


class Reporting(LocalBackend):
    """Backend that keeps the names of the modules that each rank imported in its call."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, **options: Any) -> list[Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = set(sys.modules)
            result = fn(*args, **kwargs)
            return result, sorted(set(sys.modules) - before)

        done = super().run(call, args, kwargs, **options)
        self.imported = [names for _, names in done]
        return [result for result, _ in done]


@pytest.mark.parametrize("framework", others_in_soak(*store_runs.FRAMEWORKS))
def test_a_rank_imports_nothing_large_itself(store: Any, framework: str) -> None:
    """The trainer's data and log import Petastorm, pandas and TensorBoard: 700 modules."""
    store_runs.send_by_value()
    write_rows(Path(store.get_train_data_path()), 32)
    backend = Reporting(1)

    params = {"backend": backend, "store": store, "validation": None, "epochs": 1}
    store_runs.make_estimator(framework, **params).fit_on_parquet()

    (imported,) = backend.imported
    assert len(imported) < 60, imported
