"""Backends that are not ours, in all three estimators."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest

from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, SlotsError
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.launch.backend import Backend, as_backend
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.service.events import Event, EventSender, RankOutput
from hvd_estimators.launch.service.server import SERVICE_VARIABLE
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.training.horovod_session import horovod_session


class HereBackend:
    """Derived from nothing; calls the function in this process."""

    def __init__(self, ranks: Any = 1) -> None:
        self.ranks = ranks
        self.env: Any = None

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        self.env = env
        return (fn(*args, **kwargs),)

    def num_processes(self) -> Any:
        return self.ranks


def test_any_object_that_runs_functions_is_a_backend() -> None:
    given = HereBackend()
    backend = as_backend(given)

    assert backend.num_processes() == 1
    assert backend.run(max, args=(1, 5), kwargs={}, env={"A": "b"}) == [5]
    assert given.env == {"A": "b"}
    # Counted with NumPy, and a plain number for what is made of it.
    assert type(as_backend(HereBackend(np.int64(1))).num_processes()) is int
    own = LocalBackend(2)
    assert as_backend(own) is own


def test_what_its_ranks_report_is_heard_as_from_any_backend() -> None:
    def work(number: int) -> None:
        with contextlib.closing(EventSender()) as sender:
            sender.send(RankOutput(0, f"{number}\n"))

    heard: list[Event] = []
    given = HereBackend()
    as_backend(given).run(work, (5,), env={"A": "b"}, on_event=heard.append)
    assert heard == [RankOutput(0, "5\n")]
    # Such a backend may print the environment, as Horovod's runner does: it holds no secret.
    assert given.env == {"A": "b"}
    assert SERVICE_VARIABLE not in os.environ


def test_a_backend_of_the_time_before_events_keeps_its_checks() -> None:
    class Old(HereBackend, Backend):  # type: ignore[misc]
        def check(self) -> None:
            raise SlotsError("none are left")

    backend = as_backend(Old())
    assert backend.run(max, args=(1, 5), on_event=print) == [5]
    with pytest.raises(SlotsError, match="none are left"):
        backend.check()


@pytest.mark.parametrize("given", ["local", object(), HereBackend])
def test_what_runs_no_functions_is_refused(given: Any) -> None:
    with pytest.raises(ParamError, match=r"^backend: expected an object with run\(fn, args"):
        as_backend(given)


@pytest.mark.parametrize("ranks", [0, None, "2"])
def test_a_number_of_ranks_is_one(ranks: Any) -> None:
    with pytest.raises(ParamError, match=r"num_processes\(\) of .* returned"):
        as_backend(HereBackend(ranks)).num_processes()


def test_results_are_one_per_rank() -> None:
    with pytest.raises(HvdEstimatorsError, match=r"returned 1 results; expected .* 2 ranks"):
        as_backend(HereBackend(2)).run(max, args=(1, 5), kwargs={})


@pytest.mark.parametrize("estimator", [TorchEstimator, KerasEstimator, LightningEstimator])
def test_every_estimator_takes_such_a_backend(estimator: Any, monkeypatch: Any, store: Any) -> None:
    monkeypatch.setattr(estimator, "_check_params", lambda self: None)
    set_up = {"store": store, "backend": HereBackend()}

    assert estimator(**set_up)._ready_backend().num_processes() == 1
    with pytest.raises(ParamError, match="backend and num_proc are both set"):
        estimator(**set_up, num_proc=2)._ready_backend()
    with pytest.raises(ParamError, match="backend: expected an object"):
        estimator(store=store, backend=5)._ready_backend()


def test_fewer_processes_than_ranks_are_told_of() -> None:
    """Such a backend calls the function once, and says that it has two ranks."""

    class Horovod:
        mpi_ops = hvd.mpi_ops
        size = staticmethod(lambda: 1)
        init = shutdown = staticmethod(lambda: None)

    with (
        pytest.raises(RuntimeError, match=r"returned 2 ranks, and 1 have met"),
        horovod_session(Horovod, None, 2),
    ):
        pass
