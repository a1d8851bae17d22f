"""`run_elastic`: a job whose ranks are launched again where one is lost. Runs on the driver."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.arguments import (
    call_of,
    environment_given,
    seconds_given,
    whole_number,
)
from hvd_estimators.launch.elastic.relaunching import Launches
from hvd_estimators.launch.spark import SparkBackend

__all__ = ["run_elastic"]


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    executable: str | None = None,
    resource_profile: Any = None,
    gpus_per_task: int | None = None,
    cpus_per_task: int | None = None,
    warm_start: bool = True,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ranks, and launch them again where one of them is lost.

    Takes the place of ``horovod.spark.run_elastic``, with its arguments and their order. ``fn`` is
    a program for Horovod's elastic mode: a ``state`` (``hvd.elastic.TorchState``,
    ``TensorFlowState``, ``ObjectState``), and a function of it under ``hvd.elastic.run``. When a
    rank raises, exits or is killed, or its executor is lost, all ranks end, and as many start again
    as there are task slots: at least ``min_num_proc``, at most ``max_num_proc``. They are new
    processes, in which ``fn`` begins anew; where it calls the function under ``hvd.elastic.run``,
    the state has the values of its last ``commit()`` (or ``save()``), and its reset callbacks have
    been called. Several states are told apart by the order in which they come to such functions.
    Without a state ``fn`` just begins anew.

    A commit sends rank 0's state to the driver, where it is kept in the temporary folder
    (``TMPDIR``) in a file that nobody else can open; it returns when it is safe there. Commit as
    often as the work since the last commit may be lost, and not more.

    The number of ranks changes at a relaunch only: slots that become free meanwhile do not
    interrupt the ranks.

    Parameters
    ----------
    fn, args, kwargs
        As for `run`.
    num_proc : int, optional
        Number of ranks at the start. Default: as many as there are task slots.
    min_num_proc : int, optional
        Fewest ranks of a relaunch. Default: ``num_proc``.
    max_num_proc : int, optional
        Most ranks of a relaunch. Default: ``num_proc``.
    start_timeout : float, optional
        As for `run`.
    elastic_timeout : float, optional
        Seconds to wait for ``min_num_proc`` task slots after a rank was lost. Default:
        ``HOROVOD_ELASTIC_TIMEOUT`` or 600.
    reset_limit : int, optional
        Most relaunches. Default: no limit, but four launches in a row that end before a commit (or
        with the same exception as the one before, and one commit) are the last.
    env, stdout, stderr, verbose, nics, prefix_output_with_timestamp
        As for `run`.
    min_np, max_np : int, optional
        Deprecated names of ``min_num_proc`` and ``max_num_proc``.
    executable, resource_profile, gpus_per_task, cpus_per_task, warm_start
        As for `run`.

    Returns
    -------
    list
        What ``fn`` returned on each rank of the last launch, in the order of the ranks.

    Raises
    ------
    ParamError
        If an argument is not usable, or the call cannot be pickled.
    SlotsError
        If the ranks cannot start, or there were too few task slots for ``elastic_timeout`` seconds.
    WorkerFailedError
        If a rank was lost once too often; ``relaunches`` tells how often they were launched again.
    JobCancelledError
        If the Spark job was cancelled.

    Examples
    --------
    >>> def train(epochs):
    ...     import horovod.torch as hvd
    ...     import torch
    ...
    ...     hvd.init()
    ...     model = torch.nn.Linear(1, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    ...     optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    ...
    ...     @hvd.elastic.run
    ...     def train_epochs(state):
    ...         while state.epoch < epochs:
    ...             ...  # train for an epoch
    ...             state.epoch += 1
    ...             state.commit()
    ...         return state.epoch
    ...
    ...     return train_epochs(hvd.elastic.TorchState(model, optimizer, epoch=0))
    >>> run_elastic(train, (3,), num_proc=2, min_num_proc=1)  # doctest: +SKIP
    [3, 3]
    """
    call = call_of(fn, args, kwargs)
    options = _only_given(
        start_timeout=start_timeout,
        executable=executable,
        stdout=stdout,
        stderr=stderr,
        nics=nics,
        resource_profile=resource_profile,
        gpus_per_task=gpus_per_task,
        cpus_per_task=cpus_per_task,
        warm_start=None if warm_start else False,
    )
    if prefix_output_with_timestamp:
        options["prefix_output_with_timestamp"] = True

    def backend(num_proc: int | None) -> SparkBackend:
        return SparkBackend(num_proc, env=environment_given(env or {}), verbose=verbose, **options)

    limit: Any = reset_limit
    if limit is not None and not (isinstance(limit, int) and limit >= 0):
        raise ParamError(f"reset_limit: expected 0 or more, or None, found {reset_limit!r}.")
    timeout = seconds_given(elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT", name="elastic_timeout")
    first = backend(num_proc)
    least, most = _bounds(
        first.num_processes(),
        _renamed("min_num_proc", min_num_proc, "min_np", min_np),
        _renamed("max_num_proc", max_num_proc, "max_np", max_np),
    )
    return Launches(backend, least, most, timeout, reset_limit).run(first.num_processes(), call)


def _only_given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _renamed(name: str, value: int | None, old_name: str, old: int | None) -> int | None:
    if old is None:
        return value
    warnings.warn(f"{old_name} is deprecated: set {name}.", DeprecationWarning, stacklevel=3)
    return old if value is None else value


def _bounds(num_proc: int, least: int | None, most: int | None) -> tuple[int, int]:
    """Return the fewest and the most ranks of a relaunch."""
    least = num_proc if least is None else whole_number("min_num_proc", least)
    most = num_proc if most is None else whole_number("max_num_proc", most)
    if not 1 <= least <= num_proc <= most:
        raise ParamError(
            "num_proc: expected 1 <= min_num_proc <= num_proc <= max_num_proc, found "
            f"min_num_proc={least}, num_proc={num_proc}, max_num_proc={most}."
        )
    return least, most
