"""`run`, `run_elastic` and `HorovodRunner`: run functions on Horovod ranks. Runs on the driver."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank.preemption import PreemptionCheck, callable_check
from hvd_estimators.launch.rank.worker import call_without_notifications, of_first_rank
from hvd_estimators.launch.validation import call_of, seconds_given, whole_number


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    resource_profile: Any = None,
    gpus_per_task: int | None = None,
    cpus_per_task: int | None = None,
    warm_start: bool = True,
    preemption_check: PreemptionCheck | None = None,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on the ranks of a job, one rank per Spark task.

    Replaces ``horovod.spark.run``, with the same arguments in the same order. All ranks start
    together, or no rank does. If one fails, the others end soon after.

    ``fn`` may use Horovod with any framework: it calls ``hvd.init()`` and then works with the other
    ranks. It may also be a program for ``torchrun``, which needs no Horovod. Ranks have the
    variables that such programs read: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. So
    ``torch.distributed.init_process_group``, Lightning's strategies and Accelerate work unchanged.

    ``run`` can be called from any thread and from several threads at once. Each call is a Spark job
    in its thread's job group. No process is left after the call returns, raises or is cancelled.
    Runs on the driver.

    Parameters
    ----------
    fn : callable
        Sent to the ranks with cloudpickle; import frameworks within it.
    args : sequence
        Positional arguments of ``fn``.
    kwargs : mapping, optional
        Keyword arguments of ``fn``.
    num_proc : int, optional
        Number of ranks. Default: the number of task slots. This number equals ``horovod.spark``'s
        ``defaultParallelism`` unless ``spark.default.parallelism`` or ``spark.task.cpus`` is set.
    start_timeout : float, optional
        Seconds to wait for executors and free task slots. Default: ``HOROVOD_SPARK_START_TIMEOUT``
        or 600.
    use_mpi, use_gloo, extra_mpi_args
        Accepted for compatibility with ``horovod.spark.run``. Gloo is always the controller; a
        warning says so if these arguments request another one.
    env : mapping, optional
        Environment variables to add to the ranks', as in `SparkBackend`; None deletes a
        variable. The file that ``HOROVOD_TIMELINE`` names is written on rank 0's machine. Variables
        that differ between ranks, such as ``RANK``, can only be deleted.
    stdout, stderr
        Destinations of the ranks' output on the driver; see `SparkBackend`.
    verbose : int
        2 or more shows the ranks' output on the driver; see `SparkBackend`.
    nics : str or iterable of str, optional
        Network interfaces that ranks may use; see `SparkBackend`.
    prefix_output_with_timestamp : bool
        See `SparkBackend`.
    executable : str, optional
        The Python of the ranks. Default: the Python of the executors' workers.
    resource_profile, gpus_per_task, cpus_per_task, warm_start
        See `SparkBackend`.
    preemption_check : callable, optional
        Function without arguments that returns True once the machine on which it runs is about to
        go. Each rank calls it every two seconds. Its process then gets SIGTERM, for which ``fn``
        can set a handler (`signal.signal`) that saves its state.

    Returns
    -------
    list
        One result per rank, in rank order.

    Raises
    ------
    ParamError
        If an argument is invalid, or the call cannot be pickled.
    SlotsError
        If the ranks cannot run at the same time, or their tasks have not started in time.
    DependencyError
        If a rank calls ``hvd.init()`` and the machines have no usable or different Horovods.
    WorkerFailedError
        If a rank failed; the attributes contain the rank, the host and the cause.
    JobCancelledError
        If the Spark job was cancelled.

    Examples
    --------
    >>> def train(learning_rate):
    ...     import horovod.torch as hvd
    ...
    ...     hvd.init()
    ...     return hvd.rank(), hvd.size(), learning_rate
    >>> run(train, kwargs={"learning_rate": 0.1}, num_proc=2)  # doctest: +SKIP
    [(0, 2, 0.1), (1, 2, 0.1)]
    """
    call: tuple[Any, ...] = call_of(fn, args, kwargs)
    if preemption_check is not None:
        call = *call, callable_check("preemption_check", preemption_check)
    from hvd_estimators.launch.spark_backend import SparkBackend

    backend = SparkBackend(
        num_proc=num_proc,
        env=env,
        start_timeout=start_timeout,
        verbose=verbose,
        executable=executable,
        use_mpi=use_mpi,
        use_gloo=use_gloo,
        extra_mpi_args=extra_mpi_args,
        stdout=stdout,
        stderr=stderr,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        resource_profile=resource_profile,
        gpus_per_task=gpus_per_task,
        cpus_per_task=cpus_per_task,
        warm_start=warm_start,
    )
    return backend.run(call_without_notifications, call)


_VERBOSITIES = ("all", "log_callback_only")


class HorovodRunner:
    """Runner of a training function on ranks; replaces ``sparkdl.HorovodRunner``.

    As in `run`, the function may use Horovod, or be a program for ``torchrun``.

    Parameters
    ----------
    np : int
        Below 0: ``-np`` processes on the driver, without Spark. Above 0: a Spark job of ``np``
        tasks that start together, each with its own process. 0 (deprecated): as many processes as
        the cluster has task slots.
    driver_log_verbosity : {"log_callback_only", "all"}
        Output that the driver shows while ranks run in a Spark job. ``"log_callback_only"``:
        messages of `hvd_estimators.log_to_driver` and
        `hvd_estimators.compat.callbacks.LogCallback`, on the driver's standard output. The ranks'
        own output then goes to the executors' logs only.
        ``"all"``: also the output of all ranks, with ``[rank]<stdout>:`` or ``[rank]<stderr>:``
        before each line, on the driver's standard output and standard error. Ranks on the driver
        always show everything.
    **options
        Further arguments of `hvd_estimators.launch.SparkBackend`, such as ``start_timeout``,
        ``env``, ``gpus_per_task`` or ``resource_profile``. If ``np`` is below 0, further arguments
        of `hvd_estimators.launch.LocalBackend`.

    Raises
    ------
    ParamError
        If an argument is invalid.

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
        self._np = whole_number("np", np, minimum=-sys.maxsize)
        if driver_log_verbosity not in _VERBOSITIES:
            raise ParamError(
                f"driver_log_verbosity: expected one of {', '.join(map(repr, _VERBOSITIES))}, "
                f"found {driver_log_verbosity!r}."
            )
        for name, instead in (("num_proc", "np"), ("verbose", "driver_log_verbosity")):
            if name in options:
                raise ParamError(f"HorovodRunner has no argument {name!r}. Set {instead}.")
        self._shows_all = self._np < 0 or driver_log_verbosity == "all"
        self._options = options
        if self._np == 0:
            warnings.warn(
                "np=0 takes all task slots that the cluster has when the job starts, and is "
                "deprecated. Set np to the number of processes that you need.",
                DeprecationWarning,
                stacklevel=2,
            )
        self._backend()  # raises if an option is invalid

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on every rank.

        Parameters
        ----------
        main : callable
            The training code, which usually calls ``hvd.init()``. It is sent to the ranks with
            cloudpickle, and should import packages itself. It cannot use Spark. Changes made on the
            driver, such as a logger's level, do not apply on the ranks.
        **kwargs
            Arguments of ``main``, also sent with cloudpickle.

        Returns
        -------
        object
            The result of ``main`` on rank 0, sent with cloudpickle.

        Raises
        ------
        ParamError
            If the function or its arguments cannot be sent.
        SlotsError
            If the cluster cannot run that many processes at the same time.
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
        from hvd_estimators.launch.spark_backend import SparkBackend

        return SparkBackend(self._np or None, **options)


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
    """Run ``fn(*args, **kwargs)`` on ranks, and relaunch them if one of them is lost.

    Replaces ``horovod.spark.run_elastic``, with the same arguments in the same order. ``fn`` is a
    program for Horovod's elastic mode. It has a ``state`` (``hvd.elastic.TorchState``,
    ``TensorFlowState``, ``ObjectState``), and passes the state to a function under
    ``hvd.elastic.run``.

    If a rank raises, exits or is killed, or its executor is lost, all ranks end. As many ranks
    start again as there are task slots: at least ``min_num_proc``, at most ``max_num_proc``. They
    are new processes, in which ``fn`` restarts. When ``fn`` calls the function under
    ``hvd.elastic.run``, the state has the values of its last ``commit()`` (or ``save()``). Its
    reset callbacks have been called by then. Several states are identified by the order in which
    they reach such functions. Without a state, as in a program for ``torchrun``, ``fn`` simply
    restarts. ``TORCHELASTIC_RESTART_COUNT`` is then the number of relaunches.

    A commit sends rank 0's state to the driver, and returns when the driver has it in memory. A
    state has less than 4 GiB. Commit only as often as needed to limit the work that a failure can
    lose.

    The number of ranks changes only at a relaunch: slots that become free in between do not
    interrupt the ranks.

    Parameters
    ----------
    fn, args, kwargs
        As for `run`.
    num_proc : int, optional
        Initial number of ranks. Default: the number of task slots.
    min_num_proc : int, optional
        Minimum number of ranks of a relaunch. Default: ``num_proc``.
    max_num_proc : int, optional
        Maximum number of ranks of a relaunch. Default: ``num_proc``.
    start_timeout : float, optional
        As for `run`.
    elastic_timeout : float, optional
        Seconds to wait for ``min_num_proc`` task slots after a rank was lost. Default:
        ``HOROVOD_ELASTIC_TIMEOUT`` or 600.
    reset_limit : int, optional
        Maximum number of relaunches. Default: no limit, but four launches in a row without progress
        are the last. A launch has no progress if it ends before a commit.
    env, stdout, stderr, verbose, nics, prefix_output_with_timestamp
        As for `run`.
    min_np, max_np : int, optional
        Deprecated names of ``min_num_proc`` and ``max_num_proc``.
    executable, resource_profile, gpus_per_task, cpus_per_task, warm_start
        As for `run`.

    Returns
    -------
    list
        The result of ``fn`` on each rank of the last launch, in rank order.

    Raises
    ------
    ParamError
        If an argument is invalid, or the call cannot be pickled.
    SlotsError
        If the ranks cannot start, or there were too few task slots for ``elastic_timeout`` seconds.
    WorkerFailedError
        If a rank was lost after the last relaunch; ``relaunches`` is the number of relaunches.
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
    from hvd_estimators.launch.relaunch import ElasticLaunches
    from hvd_estimators.launch.spark_backend import SparkBackend

    backend = SparkBackend(
        num_proc,
        env=env,
        start_timeout=start_timeout,
        verbose=verbose,
        executable=executable,
        stdout=stdout,
        stderr=stderr,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        resource_profile=resource_profile,
        gpus_per_task=gpus_per_task,
        cpus_per_task=cpus_per_task,
        warm_start=warm_start,
    )
    limit = None if reset_limit is None else whole_number("reset_limit", reset_limit)
    timeout = seconds_given(elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT", name="elastic_timeout")
    least, most = _bounds(
        backend.num_processes(),
        _renamed("min_num_proc", min_num_proc, "min_np", min_np),
        _renamed("max_num_proc", max_num_proc, "max_np", max_np),
    )
    return ElasticLaunches(call, least, most, timeout, limit).launch(backend)


def _renamed(name: str, value: int | None, old_name: str, old: int | None) -> int | None:
    if old is None:
        return value
    warnings.warn(f"{old_name} is deprecated: set {name}.", DeprecationWarning, stacklevel=3)
    return old if value is None else value


def _bounds(num_proc: int, least: int | None, most: int | None) -> tuple[int, int]:
    """Return the minimum and maximum number of ranks of a relaunch."""
    least = num_proc if least is None else whole_number("min_num_proc", least)
    most = num_proc if most is None else whole_number("max_num_proc", most)
    if not 1 <= least <= num_proc <= most:
        raise ParamError(
            "num_proc: expected 1 <= min_num_proc <= num_proc <= max_num_proc, found "
            f"min_num_proc={least}, num_proc={num_proc}, max_num_proc={most}."
        )
    return least, most
