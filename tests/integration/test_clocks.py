"""Hosts whose clocks differ by an hour: leases and checkpoints do not depend on them."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import reference
from reference import OPTIMIZERS, fit, global_batches, train_alone, write_rows
from shifted_clock import shifted_environment

from hvd_estimators import Store
from hvd_estimators._util.process_identity import this_process
from hvd_estimators.launch import LocalBackend
from hvd_estimators.store.leases import STALE_SECONDS, LeaseRecord

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LOOK = """
import sys, time
from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.leases import Lease
store = Store.create(sys.argv[1])
try:
    Lease(store, store.run_paths("mine")).require_free()
    print("free", int(time.time()))
except ParamError:
    print("held", int(time.time()))
"""


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_host_with_another_clock_sees_whether_a_lease_is_held(hours: int, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    path = Path(store.run_paths("mine").run_path, "lease-000001.json")
    owner = dataclasses.replace(this_process(), machine="elsewhere", host="node7")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **shifted_environment(tmp_path, 3600 * hours),
    }
    for silent, state in ((0.0, "held"), (STALE_SECONDS + 100, "free")):
        # The record has the time of the holder's clock, which is right.
        moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=silent)
        store.write_text(str(path), LeaseRecord(owner, moment, moment, "token").to_json())
        os.utime(path, (time.time() - silent,) * 2)
        done = subprocess.run(
            [sys.executable, "-c", LOOK, store.prefix_path],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        found, now = done.stdout.split()
        assert abs(float(now) - time.time() - 3600 * hours) < 60, "the clock was not shifted"
        assert found == state


class KilledOnce:
    """Callback that kills rank 1 in the third epoch, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_epoch_begin(self, epoch: int) -> None:
        if epoch == 2 and os.environ["HOROVOD_RANK"] == "1" and not self.mark.exists():
            self.mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_run_of_ranks_with_different_clocks_survives_a_kill(
    rank: int, hours: int, tmp_path: Path
) -> None:
    cloudpickle.register_pickle_by_value(reference)
    store: Any = Store.create(str(tmp_path / "store"))
    columns = write_rows(Path(store.get_train_data_path()), 60)
    shifted = shifted_environment(tmp_path, 3600 * hours, rank)
    params: dict[str, Any] = {"batch_size": 16, "epochs": 4, "max_restarts": 1, "run_id": "mine"}
    params["callbacks"] = [KilledOnce(tmp_path / "killed")]
    params["backend"] = LocalBackend(2, env=shifted, warm_start=False)
    model, _ = fit(store, 2, "momentum", **params)
    expected = train_alone(columns, global_batches(60, 2, 16), OPTIMIZERS["momentum"], 4)
    for found, wanted in zip(model.getModel().parameters(), expected.parameters(), strict=True):
        np.testing.assert_allclose(
            found.detach().numpy(), wanted.detach().numpy(), rtol=1e-4, atol=1e-6
        )
    at = float((tmp_path / "killed").read_text())
    assert (abs(at - time.time()) > 1800) == (rank == 1), "the clock was not shifted"
    (run,) = store.list_runs()
    assert (run.state, run.epochs) == ("finished", 4)
