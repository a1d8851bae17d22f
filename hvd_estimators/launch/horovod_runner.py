"""`HorovodRunner`, as Databricks had it: a training function on the driver or in a Spark job."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.local import LocalBackend
from hvd_estimators.launch.rank.first_rank import of_first_rank

__all__ = ["HorovodRunner"]

_VERBOSITIES = ("all", "log_callback_only")


class HorovodRunner:
    """Runs a training function with Horovod; takes the place of ``sparkdl.HorovodRunner``.

    Parameters
    ----------
    np : int
        Below 0: ``-np`` processes on the driver, without Spark. Above 0: a Spark job of ``np``
        tasks that start together, each with a process of its own. 0, which is deprecated: as many
        as the cluster has task slots.
    driver_log_verbosity : {"log_callback_only", "all"}
        What the driver shows while ranks run in a Spark job. ``"log_callback_only"``: messages of
        `hvd_estimators.log_to_driver` and `hvd_estimators.keras.LogCallback`, on its standard
        output; what ranks print goes into the executors' logs alone. ``"all"``: also what all ranks
        print, as ``[rank]<stdout>:`` and ``[rank]<stderr>:`` before each line, on its standard
        output and standard error. Ranks on the driver always show everything.
    **options
        Further arguments of `hvd_estimators.launch.SparkBackend`, such as ``start_timeout``,
        ``env``, ``gpus_per_task`` or ``resource_profile``; with ``np`` below 0 of
        `hvd_estimators.launch.LocalBackend`.

    Raises
    ------
    ParamError
        If an argument is not usable.

    Examples
    --------
    >>> def train(learning_rate):
    ...     import horovod.torch as hvd
    ...
    ...     hvd.init()
    ...     return hvd.size() * learning_rate
    >>> HorovodRunner(np=-2).run(train, learning_rate=0.5)  # doctest: +SKIP
    1.0
    """

    def __init__(
        self, *, np: int, driver_log_verbosity: str = "log_callback_only", **options: Any
    ) -> None:
        if isinstance(np, bool) or not isinstance(np, Integral):
            raise ParamError(f"np: expected a whole number of processes, found {np!r}.")
        if driver_log_verbosity not in _VERBOSITIES:
            raise ParamError(
                f"driver_log_verbosity: expected one of {', '.join(map(repr, _VERBOSITIES))}, "
                f"found {driver_log_verbosity!r}."
            )
        for name in ("num_proc", "verbose"):
            if name in options:
                instead = {"num_proc": "np", "verbose": "driver_log_verbosity"}[name]
                raise ParamError(f"HorovodRunner has no argument {name!r}. Set {instead}.")
        self._np: int = int(np)
        self._shows_all: bool = np < 0 or driver_log_verbosity == "all"
        self._options: Mapping[str, Any] = options
        if np == 0:
            warnings.warn(
                "np=0 takes all task slots that the cluster has when the job starts, and is "
                "deprecated. Set np to the number of processes that you need.",
                DeprecationWarning,
                stacklevel=2,
            )
        self._backend()  # so that an argument that is not usable is found here

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on every rank.

        Parameters
        ----------
        main : callable
            Holds the training code, which calls ``hvd.init()``. It is sent to the ranks with
            cloudpickle, so what it imports is best imported within it; it cannot use Spark, and
            what it changes here, such as the level of a logger, is not changed there.
        **kwargs
            Its arguments, sent in the same way.

        Returns
        -------
        object
            What it returned on rank 0; sent back with cloudpickle.

        Raises
        ------
        ParamError
            If function or arguments cannot be sent.
        SlotsError
            If the cluster cannot run so many processes at the same time.
        WorkerFailedError
            If a rank failed.
        """
        if not callable(main):
            raise ParamError(f"main: expected a function, found {main!r}.")
        results = self._backend().run(of_first_rank, (main, kwargs))
        return results[0]

    def _backend(self) -> Backend:
        shown = {"stdout": sys.stdout, "stderr": sys.stderr} if self._shows_all else {"verbose": 0}
        options = {**shown, **self._options}
        if self._np < 0:
            return LocalBackend(-self._np, **options)
        from hvd_estimators.launch.spark import SparkBackend

        backend = SparkBackend(self._np or None, **options)
        backend.gathers_timeline = True
        return backend
