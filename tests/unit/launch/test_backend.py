"""Third-party backends, in all three estimators."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest

from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, SlotsError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.launch.backend import Backend, as_backend
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.training.horovod_session import horovod_session


class HereBackend:
    """Not derived from Backend; calls the function in this process."""

    def __init__(self, ranks: Any = 1) -> None:
        self.ranks = ranks
        self.env: Any = None

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        self.env = env
        return (fn(*args, **kwargs),)

    def num_processes(self) -> Any:
        return self.ranks


def test_methods_of_an_object_replace_those_of_backend() -> None:
    """A subclass of a backend whose run() takes no on_event is such an object, too."""
    called = []

    class Own(HereBackend):
        def __getattr__(self, name: str) -> Any:
            if name not in vars(Backend):
                raise AttributeError(name)
            return lambda *args: called.append(name)

    backend = as_backend(Own())
    arguments = {"check_store": (None,), "resized": (2,), "warming_up": (print, (), {})}
    own = {name for name, value in vars(Backend).items() if callable(value) and name[0] != "_"}
    expected = own - {"run", "num_processes", "resized"}
    for name in sorted(expected):
        getattr(backend, name)(*arguments.get(name, ()))
    assert called == sorted(expected)


def test_any_object_that_runs_functions_is_a_backend() -> None:
    given = HereBackend()
    backend = as_backend(given)

    assert backend.num_processes() == 1
    assert backend.run(max, args=(1, 5), kwargs={}, env={"A": "b"}) == [5]
    assert given.env == {"A": "b"}
    # The number may come from NumPy; callers get a plain int.
    assert type(as_backend(HereBackend(np.int64(1))).num_processes()) is int
    own = LocalBackend(2)
    assert as_backend(own) is own


def test_a_backend_without_event_support_keeps_its_checks() -> None:
    class Old(HereBackend, Backend):  # type: ignore[misc]
        def check(self) -> None:
            raise SlotsError("none are left")

    backend = as_backend(Old())
    assert backend.run(max, args=(1, 5), on_event=print) == [5]
    with pytest.raises(SlotsError, match="none are left"):
        backend.check()


@pytest.mark.parametrize("given", ["local", object(), HereBackend])
def test_objects_that_cannot_run_functions_are_rejected(given: Any) -> None:
    with pytest.raises(ParamError, match=r"^backend: expected an object with run\(fn, args"):
        as_backend(given)


@pytest.mark.parametrize("ranks", [0, None, "2"])
def test_an_invalid_number_of_ranks_is_rejected(ranks: Any) -> None:
    with pytest.raises(ParamError, match=r"num_processes\(\) of .* returned"):
        as_backend(HereBackend(ranks)).num_processes()


def test_a_wrong_number_of_results_is_an_error() -> None:
    with pytest.raises(HvdEstimatorsError, match=r"returned 1 results; expected .* 2 ranks"):
        as_backend(HereBackend(2)).run(max, args=(1, 5), kwargs={})


@pytest.mark.parametrize("estimator", [TorchEstimator, KerasEstimator, LightningEstimator])
def test_every_estimator_accepts_a_third_party_backend(
    estimator: Any, monkeypatch: Any, store: Any
) -> None:
    monkeypatch.setattr(Fit, "check", lambda self: None)
    set_up = {"store": store, "backend": HereBackend()}

    assert Fit(estimator(**set_up)).ready_backend().num_processes() == 1
    with pytest.raises(ParamError, match="backend and num_proc are both set"):
        Fit(estimator(**set_up, num_proc=2)).ready_backend()
    with pytest.raises(ParamError, match="backend: expected an object"):
        Fit(estimator(store=store, backend=5)).ready_backend()


def test_fewer_processes_than_ranks_are_an_error() -> None:
    """The backend calls the function once but claims two ranks."""

    class Horovod:
        mpi_ops = hvd.mpi_ops
        size = staticmethod(lambda: 1)
        init = shutdown = staticmethod(lambda: None)

    with (
        pytest.raises(RuntimeError, match=r"returned 2 ranks, and 1 have met"),
        horovod_session(Horovod, None, 2),
    ):
        pass
