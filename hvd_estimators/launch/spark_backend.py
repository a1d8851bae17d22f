"""Ranks as children of Spark barrier tasks: all of them start together, or no rank does."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.cluster.application import await_slots
from hvd_estimators.launch.cluster.capacity import (
    ask_for_executors,
    check_slots,
    watching_executors,
)
from hvd_estimators.launch.cluster.connect import current_cluster
from hvd_estimators.launch.cluster.jobs import barrier_job, importing, interruptible
from hvd_estimators.launch.cluster.resources import TaskResources
from hvd_estimators.launch.horovod_build import require_patches
from hvd_estimators.launch.rank.environment import shared_environment
from hvd_estimators.launch.rank.outcome import results_in_order
from hvd_estimators.launch.rank.process import pickle_call
from hvd_estimators.launch.rendezvous.channel import new_secret
from hvd_estimators.launch.service.events import Handler, receive_events
from hvd_estimators.launch.service.exchange import EXCHANGE, ExchangeServer
from hvd_estimators.launch.service.launch_watch import LaunchWatch
from hvd_estimators.launch.service.output_sinks import Outlets
from hvd_estimators.launch.service.server import DriverService
from hvd_estimators.launch.task.entry import run_task
from hvd_estimators.launch.task.run import OUTCOME_SCHEMA, hosts_without, outcomes
from hvd_estimators.launch.task.settings import TaskSettings
from hvd_estimators.launch.validation import (
    call_of,
    environment_given,
    interface_names,
    seconds_given,
    whole_number,
)
from hvd_estimators.launch.warm.client import allows_warm_start
from hvd_estimators.launch.warm.modules import modules_of

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.service.elastic_state import CommitStore
    from hvd_estimators.store import Store


logger = logging.getLogger(__name__)


class SparkBackend(Backend):
    """Backend that runs every rank as the child process of a Spark barrier task.

    Parameters
    ----------
    num_proc : int, optional
        Number of ranks. Default, and 0: the number of task slots. Must be set with dynamic
        allocation, which has no fixed number of slots, and over Spark Connect.
    env : mapping, optional
        Environment variables to add to the ranks'; None deletes a variable. Ranks have the
        executor's environment, and the driver's settings for the libraries of ranks, such as
        ``HOROVOD_*`` and ``OMP_*``; ``docs/launching.rst`` lists them.
    start_timeout : float
        Seconds to wait for free task slots. Default: ``HOROVOD_SPARK_START_TIMEOUT`` or 600.
    verbose : int
        2 or more shows the ranks' output on the driver's standard error, with the rank before each
        line. If the driver reads lines too slowly, some are dropped, and a line reports how many.
        The executors' logs also contain each rank's output. With a local master, where the driver
        has these logs, 0 shows nothing.
    executable : str, optional
        The Python of the ranks. Default: the Python of the executors' workers.
    stdout, stderr : file-like, optional
        Open text files or streams of the driver, such as ``sys.stdout``, for lines of the ranks'
        standard output and standard error. Lines are written while the ranks run, with
        ``[rank]<stdout>:`` or ``[rank]<stderr>:`` before each. If either argument is given, ranks
        have a separate pipe for each stream. The order between lines of the two streams is then
        unknown.
    prefix_output_with_timestamp : bool
        Whether each line of a rank starts with its time of arrival on the driver.
    warm_start : bool
        Whether ranks may be forked from a process on their executor that has already imported the
        framework (`hvd_estimators.launch.warm.client`). From the second launch on, this saves the
        seconds that the imports take. The process starts with the first launch. It ends with the
        executor, or a minute after its last rank (``HVD_ESTIMATORS_WARM_SECONDS``), and takes the
        memory of the imports once. Default: True on Linux, unless the environment variable
        ``HVD_ESTIMATORS_WARM_START`` is ``0``.
    nics : str or iterable of str, optional
        Names of the network interfaces through which ranks on several hosts may connect, such as
        ``"eth1"`` or ``["eth1", "ib0"]``. A host needs one of them. Ranks on one host always
        connect through its loopback interface. Default: the interface in the ranks'
        ``HOROVOD_GLOO_IFACE``. Without that variable, the addresses by which Spark knows the
        hosts.
    resource_profile : pyspark.resource.ResourceProfile, optional
        Resources that the ranks' tasks request, so that ranks get GPUs that other stages of the
        application do not hold. Supported on Standalone, YARN, Kubernetes and ``local-cluster``,
        with the existing executors. Requests for executor resources need dynamic allocation.
    gpus_per_task, cpus_per_task : int, optional
        Shorthand for a profile: GPUs and cores of each task. Executors need them
        (``spark.executor.resource.gpu.amount``). Default: ``spark.task.resource.gpu.amount`` and
        ``spark.task.cpus``.
    use_mpi, use_gloo, extra_mpi_args
        Accepted for compatibility with ``horovod.spark``. Gloo is always the controller; a warning
        says so if these arguments request another one.

    Raises
    ------
    ParamError
        If an argument is invalid.

    Notes
    -----
    A rank whose process stays stopped for a minute (SIGSTOP) ends the job, and the error names that
    rank. A rank that hangs looks like a slow rank. It ends the job only if
    ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` limits how long it may delay the others, or
    ``HVD_ESTIMATORS_HANG_SECONDS`` how long all may train without progress; see
    `hvd_estimators.launch.rank.hang_detection`.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        start_timeout: float | None = None,
        verbose: int = 1,
        executable: str | None = None,
        stdout: Any = None,
        stderr: Any = None,
        prefix_output_with_timestamp: bool = False,
        warm_start: bool = True,
        nics: str | Iterable[str] | None = None,
        resource_profile: Any = None,
        gpus_per_task: int | None = None,
        cpus_per_task: int | None = None,
        use_mpi: bool | None = None,
        use_gloo: bool | None = None,
        extra_mpi_args: str | None = None,
    ) -> None:
        if num_proc is not None:
            num_proc = whole_number("num_proc", num_proc)
        if use_mpi or extra_mpi_args or use_gloo is False:
            logger.warning(
                "use_mpi, use_gloo and extra_mpi_args have no effect: Gloo is always the "
                "controller."
            )
        self._resources = TaskResources(resource_profile, gpus_per_task, cpus_per_task)
        self._num_proc = num_proc
        self._slots: tuple[str, int] | None = None
        self._env = None if env is None else environment_given(env)
        self._start_timeout = seconds_given(start_timeout, "HOROVOD_SPARK_START_TIMEOUT")
        self._verbose = verbose
        self._executable = executable
        self._nics = interface_names(nics)
        self._outlets = Outlets(stdout, stderr, prefix_output_with_timestamp, verbose)
        self._warm_start = warm_start

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return self._num_proc or self._all_slots()

    def task_slots(self) -> int:
        """Return the number of ranks that the registered executors can run at once.

        With dynamic allocation, executors for the configured number of ranks are requested first.
        """
        cluster = current_cluster(self._resources)
        if not cluster.knows_slots:
            return self.num_processes()
        if cluster.allocates_dynamically and self._num_proc:
            return ask_for_executors(cluster, self._num_proc, timeouts.EXECUTORS_REQUESTED)
        return cluster.task_slots()

    def resized(self, num_proc: int) -> SparkBackend:
        """Return a backend like this one for another number of ranks."""
        other = copy.copy(self)
        other._num_proc = num_proc
        return other

    def _all_slots(self) -> int:
        """Return the cluster's task slots, a constant number for the application's lifetime."""
        cluster = current_cluster(self._resources)
        application = cluster.application
        if self._slots is None or self._slots[0] != application:
            if cluster.allocates_dynamically:
                raise ParamError(
                    "num_proc: the number of task slots changes while spark.dynamicAllocation."
                    "enabled is true. Set num_proc to the number of ranks."
                )
            if not cluster.knows_slots:
                raise ParamError(
                    "num_proc: the number of task slots is unknown over Spark Connect. Set "
                    "num_proc to the number of ranks."
                )
            timeout = 0 if cluster.is_local else self._start_timeout
            # Without slots, `check` raises.
            self._slots = application, max(await_slots(cluster, None, timeout), 1)
        return self._slots[1]

    def check(self) -> None:
        """Check that the cluster has a task slot for every rank.

        Raises
        ------
        SlotsError
            If it has fewer. With dynamic allocation, executors are requested first.
        """
        cluster = current_cluster(self._resources)
        check_slots(cluster, self.num_processes(), self._start_timeout, self._resources)

    def check_horovod(self) -> None:
        """Check that the ranks can use Horovod, judging by the driver's installation.

        Raises
        ------
        DependencyError
            If Horovod was not built by ``hvd-estimators build-horovod``.
        """
        require_patches()

    def check_store(self, store: Store) -> None:
        """Check that the ranks' machines see the files that the driver writes to the store.

        Raises
        ------
        StoreError
            If a machine does not see them.
        """
        cluster = current_cluster(self._resources)
        if cluster.is_local and store.local_path(store.folder) is not None:
            return
        num_proc = self.num_processes()
        check_slots(cluster, num_proc, self._start_timeout, self._resources)
        probe = f"{store.folder}/.probe-{uuid.uuid4().hex}"
        store.write_text(probe, "probe")
        try:
            find = functools.partial(hosts_without, store=store, path=probe)
            schema = "host string, problem string"
            rows = self._collect(cluster, num_proc, find, schema)
        finally:
            store.delete(probe)
        if rows:
            hosts = sorted({row["host"] for row in rows})
            raise StoreError(
                f"store: executors on {', '.join(hosts)} do not see what the driver writes under "
                f"{store.folder!r} ({rows[0]['problem']}). Set a prefix on storage that all "
                "machines share, with packages and credentials on all of them."
            )

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: Handler | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; see `Backend.run`."""
        environment_given(env or {})
        # Report errors of the call before waiting for executors.
        return self._launch(pickle_call(*call_of(fn, args, kwargs)), env, on_event)

    def run_with_commits(
        self, fn: Callable[..., Any], args: Sequence[Any], commits: CommitStore
    ) -> list[Any]:
        """Run an elastic job's function. Its ranks save and load commits in a store."""
        return self._launch(pickle_call(fn, args, {}), commits=commits)

    def _launch(
        self,
        document: bytes,
        env: Mapping[str, str | None] | None = None,
        on_event: Handler | None = None,
        commits: CommitStore | None = None,
    ) -> list[Any]:
        self.check()
        cluster = current_cluster(self._resources)
        host, num_proc = cluster.driver_host(), self.num_processes()
        watch = LaunchWatch(num_proc)
        handler = watch.handler(self._outlets.handler(on_event))
        with contextlib.ExitStack() as stack:
            modules = modules_of(document) if self._forks_ranks else None
            service = stack.enter_context(DriverService(host))
            if commits is not None:
                stack.enter_context(commits.serve(service))
            exchange = ExchangeServer(num_proc, watch.record)
            requests = {EXCHANGE: exchange.answer}
            ask_to_stop = stack.enter_context(receive_events(service, handler, requests))
            stack.enter_context(exchange)
            settings = replace(
                self._task_settings(cluster, modules, env),
                call=document,
                secret=new_secret(),
                service=service.address,
                versions=cluster.installed_versions(),
            )
            task = functools.partial(run_task, settings=settings)
            rows = self._collect(cluster, num_proc, task, OUTCOME_SCHEMA, watch, ask_to_stop)
            return results_in_order(outcomes(rows, num_proc))

    def warming_up(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Let executors import the modules that ``fn(*args)`` needs; see `Backend.warming_up`."""
        cluster = current_cluster(self._resources)
        if not self._forks_ranks or cluster.allocates_dynamically:
            return contextlib.nullcontext()
        modules = modules_of(pickle_call(fn, args, {}))
        return importing(cluster, self.num_processes(), self._task_settings(cluster, modules, env))

    @property
    def _forks_ranks(self) -> bool:
        return self._warm_start and allows_warm_start(os.environ)

    def _task_settings(
        self,
        cluster: Cluster,
        modules: tuple[str, ...] | None,
        env: Mapping[str, str | None] | None,
    ) -> TaskSettings:
        """Return the settings that all jobs of this backend share, independent of the call."""
        return TaskSettings(
            one_machine=cluster.is_local,
            driver_env=shared_environment(os.environ),
            env={**(self._env or {}), **(env or {})},
            driver_path=tuple(map(os.path.abspath, sys.path)),
            executable=self._executable,
            verbose=self._verbose,
            streams=self._outlets.streams,
            separate_streams=self._outlets.are_separate,
            modules=modules,
            nics=self._nics,
            inherits=cluster.master.startswith("local"),
        )

    def _collect(
        self,
        cluster: Cluster,
        num_proc: int,
        task: Callable[..., Any],
        schema: str,
        watch: LaunchWatch | None = None,
        ask_to_stop: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Run a function in barrier tasks and return the rows that it yields."""
        with contextlib.ExitStack() as stack:
            tag = stack.enter_context(barrier_job(cluster, num_proc, self._start_timeout))
            if watch is not None:
                stack.enter_context(watch)
            if ask_to_stop is not None:
                stack.enter_context(watching_executors(cluster, tag, ask_to_stop))
            return interruptible(cluster, tag, lambda: cluster.collect(num_proc, task, schema))
