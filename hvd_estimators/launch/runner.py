"""`run`: a function of the user's own on every rank, as ``horovod.spark.run`` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_estimators.launch.arguments import call_of, environment_given
from hvd_estimators.launch.rank.notifications import call_without_notifications
from hvd_estimators.launch.spark import SparkBackend

__all__ = ["run"]


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
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ranks of a Horovod job, each of them beside a Spark task.

    Takes the place of ``horovod.spark.run``, with its arguments and their order. All ranks start
    together or none does, and when one fails the others end soon after. ``fn`` may use any
    framework that Horovod supports: it calls ``hvd.init()`` and then works with the other ranks.
    May be called from any thread and from several at once; each call is a Spark job in its thread's
    job group, and no process is left when it returns, raises or is cancelled. Runs on the driver.

    Parameters
    ----------
    fn : callable
        Sent to the ranks with cloudpickle; import frameworks within it.
    args : sequence
        Its arguments.
    kwargs : mapping, optional
        Its keyword arguments.
    num_proc : int, optional
        Number of ranks. Default: as many as there are task slots. That is
        ``horovod.spark``'s ``defaultParallelism`` unless ``spark.default.parallelism`` or
        ``spark.task.cpus`` is set.
    start_timeout : float, optional
        Seconds to wait for executors and free task slots. Default: ``HOROVOD_SPARK_START_TIMEOUT``
        or 600.
    use_mpi, use_gloo, extra_mpi_args
        Accepted for ``horovod.spark.run``'s sake. Gloo is always the controller; a warning says
        so where these ask for something else.
    env : mapping, optional
        Environment variables of the ranks, over the executor's; None deletes one. Default: none.
        The file that ``HOROVOD_TIMELINE`` names is written on rank 0's machine, and in the end on
        the driver's.
        As with ``horovod.spark.run``, and unlike `SparkBackend`, the driver's environment is not
        passed on.
    stdout, stderr
        Where the ranks' output goes on the driver; see `SparkBackend`.
    verbose : int
        2 and above shows what ranks print on the driver; see `SparkBackend`.
    nics : str or iterable of str, optional
        Network interfaces that ranks may use; see `SparkBackend`.
    prefix_output_with_timestamp : bool
        See `SparkBackend`.
    executable : str, optional
        The Python of the ranks. Default: the one that runs the executors' Python workers.
    resource_profile, gpus_per_task, cpus_per_task, warm_start
        See `SparkBackend`.

    Returns
    -------
    list
        One result per rank, in the order of the ranks.

    Raises
    ------
    ParamError
        If an argument is not usable, or the call cannot be pickled.
    SlotsError
        If the ranks cannot run at the same time, or their tasks have not started in time.
    WorkerFailedError
        If a rank failed; its attributes tell which one, where, and how.
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
    call = call_of(fn, args, kwargs)
    backend = SparkBackend(
        num_proc=num_proc,
        env=environment_given(env or {}),
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
    backend.gathers_timeline = True
    return backend.run(call_without_notifications, call)
