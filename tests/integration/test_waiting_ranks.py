"""Fits in which a rank is slow: the time that the others wait is reported, with its name."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import lightning_reference
import pytest
import reference
import torch
from lightning_reference import Regression
from reference import OPTIMIZERS, make_net, write_rows
from variants import others_in_soak

from hvd_estimators.launch import LocalBackend

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SLEEP = 0.15


def sleep_on_rank_1(module: torch.nn.Module, inputs: Any) -> None:
    if not module.training or "HOROVOD_RANK" not in os.environ:
        return

    from hvd_estimators.training import progress

    progress.WINDOW_SECONDS = 1.0
    if os.environ["HOROVOD_RANK"] == "1":
        time.sleep(SLEEP)


@pytest.mark.parametrize("framework", others_in_soak("torch", "lightning"))
def test_the_slow_rank_is_named_with_the_time_of_its_steps(
    store: Any, caplog: pytest.LogCaptureFixture, framework: str
) -> None:
    import cloudpickle

    for module in (reference, lightning_reference):
        cloudpickle.register_pickle_by_value(module)
    write_rows(Path(store.get_train_data_path()), 48)
    settings: dict[str, Any] = {
        **{"feature_cols": ["features"], "label_cols": ["label"], "batch_size": 1, "epochs": 1},
        **{"store": store, "backend": LocalBackend(2), "verbose": 0},
    }
    estimator: Any
    if framework == "torch":
        from hvd_estimators.torch import TorchEstimator

        net = make_net()
        net.register_forward_pre_hook(sleep_on_rank_1)
        estimator = TorchEstimator(
            model=net,
            optimizer=OPTIMIZERS["momentum"](net.parameters()),
            loss=torch.nn.functional.mse_loss,
            **settings,
        )
    else:
        from hvd_estimators.lightning import LightningEstimator

        net = Regression("momentum")
        net.register_forward_pre_hook(sleep_on_rank_1)
        estimator = LightningEstimator(model=net, logger=False, **settings)
    with caplog.at_level(logging.WARNING, "hvd_estimators"):
        estimator.fit_on_parquet()

    (line,) = [r.getMessage() for r in caplog.records if "s per step" in r.getMessage()]
    found = re.search(
        r": ([\d.e-]+) s per step, (\d+) % of it .* Rank (\d) .*least \((\d+) %\)", line
    )
    assert found, line
    seconds, share, slow, own = float(found[1]), int(found[2]), int(found[3]), int(found[4])
    # All steps take as long as the sleep, and a moment more, which a busy machine makes longer.
    assert seconds >= SLEEP
    # Rank 0 waits for all of it.
    assert share / 100 * seconds >= 0.8 * SLEEP
    assert slow == 1
    assert own < share
