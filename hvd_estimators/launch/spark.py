"""Ranks as children of Spark barrier tasks: all of them start together, or none does."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import Broadcast
from pyspark.sql import SparkSession

from hvd_estimators.exceptions import DependencyError, ParamError, SlotsError, StoreError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.barrier import OUTCOME_SCHEMA, Job, hosts_without, outcomes, run_task
from hvd_estimators.launch.environment import shared_environment
from hvd_estimators.launch.process import (
    pickle_call,
    results_in_order,
)

if TYPE_CHECKING:
    from pyspark import SparkContext

    from hvd_estimators.store import Store

__all__ = ["SparkBackend"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_EXECUTOR_WAIT_SECONDS = 10.0
# Well below the size at which PySpark makes a broadcast variable of a function.
_INLINE_BYTES = 2**19
# A result that is collected is in the JVM as what the task sent, as rows, and pickled for Python.
_COPIES_OF_RESULTS = 6


class SparkBackend(Backend):
    """Runs every rank as the child process of a Spark barrier task.

    Parameters
    ----------
    num_proc : int, optional
        Number of ranks. Default, and 0: as many as there are task slots.
    env : mapping, optional
        Environment variables of the ranks, over the executor's; None deletes one. Default: the
        driver's, when `run` is called, except secrets (names with ``TOKEN``, ``SECRET``,
        ``PASSWORD``, ``…_KEY`` and the like) and what belongs to the driver's machine (``PATH``,
        ``HOME``, ``SPARK_*``, ``JAVA_*``, ``CUDA_VISIBLE_DEVICES`` and the like); see
        `hvd_estimators.launch.environment`. What is given here is passed as it is; ``env={}``
        passes nothing.
    start_timeout : float
        Seconds to wait for free task slots. Default: ``HOROVOD_SPARK_START_TIMEOUT`` or 600.
    verbose : int
        2 and above sends what the ranks print to the driver as well as to the executors' logs.
    executable : str, optional
        The Python of the ranks. Default: the one that runs the executors' Python workers.
    **unused
        Further arguments of ``horovod.spark.run``, accepted with a warning.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        start_timeout: float | None = None,
        verbose: int = 1,
        executable: str | None = None,
        **unused: Any,
    ) -> None:
        if num_proc is not None and num_proc < 0:
            raise ParamError(f"num_proc: expected 0 or more, found {num_proc}.")
        if unused:
            logger.warning(
                "SparkBackend does not use %s: Gloo is the controller, and verbose=2 shows the "
                "ranks' output on the driver. Leave the arguments out.",
                ", ".join(sorted(unused)),
            )
        self._num_proc = num_proc
        self._slots: tuple[str, int] | None = None
        self._env = None if env is None else dict(env)
        default_timeout = float(os.environ.get("HOROVOD_SPARK_START_TIMEOUT", "600"))
        self._start_timeout = default_timeout if start_timeout is None else start_timeout
        self._verbose = verbose
        self._executable = executable

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return self._num_proc or self._all_slots()

    def _all_slots(self) -> int:
        """Return the cluster's task slots, the same number for as long as the application lives."""
        context = _context()
        application = str(context.applicationId)
        if self._slots is None or self._slots[0] != application:
            timeout = 0 if _is_local(context) else self._start_timeout
            # Without any, `check` says so.
            self._slots = application, max(_await_slots(context, None, timeout), 1)
        return self._slots[1]

    def driver_host(self) -> str:
        """Return the address at which executors reach the driver."""
        context = _context()
        if _is_local(context):
            return "127.0.0.1"
        return str(context.getConf().get("spark.driver.host", "127.0.0.1"))

    def check(self) -> None:
        """Make sure that the cluster has a task slot for every rank.

        Raises
        ------
        SlotsError
            If it has fewer, or if dynamic allocation is on.
        DependencyError
            If a local session's Python tasks run another Python.
        """
        context = _context()
        conf = context.getConf()
        if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            raise SlotsError(
                "Spark starts barrier tasks only with a fixed set of executors, and "
                "spark.dynamicAllocation.enabled is true. Set it to false."
            )
        _check_executor_python(context)
        wanted = self.num_processes()
        slots = _await_slots(context, wanted, 0 if _is_local(context) else self._start_timeout)
        if slots == 0:
            raise SlotsError(
                f"No executor has registered with the cluster (master {context.master}) within "
                f"{self._start_timeout:g} seconds. See its logs, or set a longer start_timeout."
            )
        if slots < wanted:
            raise SlotsError(
                f"num_proc: {wanted} ranks need as many task slots at the same time, and the "
                f"cluster (master {context.master}) has {slots}. Set num_proc to {slots} or less, "
                "or start Spark with more cores (spark.executor.instances, spark.executor.cores; "
                "for a local master the number in local[N]) or with a smaller spark.task.cpus."
            )

    def check_store(self, store: Store) -> None:
        """Make sure that the ranks' machines see what the driver writes to the store.

        Raises
        ------
        StoreError
            If a machine does not.
        """
        if _is_local(_context()):
            return
        num_proc = self.num_processes()
        probe = f"{store.prefix_path}/.probe-{uuid.uuid4().hex}"
        store.write_text(probe, "probe")
        try:
            rows = (
                _session()
                .range(0, num_proc, 1, num_proc)
                .mapInArrow(
                    functools.partial(hosts_without, store=store, path=probe),
                    "host string",
                    barrier=True,
                )
                .collect()
            )
        finally:
            store.delete(probe)
        if rows:
            hosts = sorted({row["host"] for row in rows})
            raise StoreError(
                f"store: executors on {', '.join(hosts)} do not see what the driver writes under "
                f"{store.prefix_path!r}. Set a prefix on storage that all machines share."
            )

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; see `Backend.run`."""
        self.check()
        session = _session()
        with _shared(session.sparkContext, pickle_call(fn, args, kwargs or {})) as call:
            return self._run(session, call, env)

    def _run(
        self,
        session: SparkSession,
        call: bytes | Broadcast[bytes],
        env: Mapping[str, str | None] | None,
    ) -> list[Any]:
        num_proc = self.num_processes()
        job = Job(
            call=call,
            max_bytes=_collectable_bytes(session.sparkContext) // num_proc,
            driver_env=shared_environment(os.environ) if self._env is None else {},
            env={**(self._env or {}), **(env or {})},
            driver_path=tuple(sys.path),
            executable=self._executable,
            verbose=self._verbose,
        )
        frame = session.range(0, num_proc, 1, num_proc).mapInArrow(
            functools.partial(run_task, job=job),
            OUTCOME_SCHEMA,
            barrier=True,
        )
        with _job_group(session.sparkContext, num_proc, self._start_timeout) as timed_out:
            try:
                rows = frame.collect()
            except Exception as error:
                if timed_out.is_set():
                    raise SlotsError(
                        f"Timed out waiting for Spark tasks to start: {num_proc} task slots were "
                        f"not free within {self._start_timeout:g} seconds. Other jobs hold them; "
                        "wait for these, or set a longer start_timeout."
                    ) from error
                raise
        return results_in_order(outcomes(rows, num_proc))


@contextlib.contextmanager
def _shared(context: SparkContext, call: bytes) -> Iterator[bytes | Broadcast[bytes]]:
    """Yield a call as the tasks get it; what that takes on disk is gone when the block ends.

    Of a function above 1 MiB PySpark makes a broadcast variable by itself, whose file stays for as
    long as the application.
    """
    if len(call) <= _INLINE_BYTES:
        yield call
        return
    broadcast = context.broadcast(call)
    try:
        yield broadcast
    finally:
        broadcast.destroy()


def _collectable_bytes(context: SparkContext) -> int:
    """Return how many bytes of results the driver's JVM can collect."""
    assert context._jvm is not None
    limit = int(context._jvm.java.lang.Runtime.getRuntime().maxMemory()) // _COPIES_OF_RESULTS
    given = context._jsc.sc().conf().getSizeAsBytes("spark.driver.maxResultSize", "1g")
    # What Spark counts is somewhat more than what a rank returned.
    return min(limit, int(given * 0.9) if given > 0 else limit)


def _session() -> SparkSession:
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def _context() -> SparkContext:
    return _session().sparkContext


def _check_executor_python(context: SparkContext) -> None:
    """Make sure that executors on this machine run this environment's Python.

    Raises
    ------
    DependencyError
        If they run another one: it lacks the packages that are installed here.
    """
    if not _is_local(context) or context.pythonExec == sys.executable:
        return
    found = subprocess.run(
        [context.pythonExec, "-c", "import sys; print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if found != sys.prefix:
        raise DependencyError(
            f"Spark runs {context.pythonExec!r} ({found or 'which does not start'}) for its "
            f"Python tasks, not this Python ({sys.executable}). Set PYSPARK_PYTHON="
            f"{sys.executable} in the environment before the Spark session is made."
        )


def _is_local(context: SparkContext) -> bool:
    return str(context.master).split("[")[0] == "local"


def _await_slots(context: SparkContext, wanted: int | None, timeout: float) -> int:
    """Return the task slots, once there are enough or no more executors seem to register.

    ``wanted=None`` asks for all of them.
    """
    started = time.monotonic()
    # Executors of an application that has been there for a while have registered.
    age = max(time.time() - context.startTime / 1000, 0)
    last_change = started - age if wanted is None else started
    slots = _task_slots(context)
    while wanted is None or slots < wanted:
        now = time.monotonic()
        # Executors register within seconds of each other; the first may take long.
        if now - started >= timeout or (slots and now - last_change > _EXECUTOR_WAIT_SECONDS):
            break
        time.sleep(_POLL_SECONDS)
        before, slots = slots, _task_slots(context)
        last_change = now if slots != before else last_change
    return slots


def _task_slots(context: SparkContext) -> int:
    """Return how many tasks the executors that are registered now can run at the same time."""
    scala_context = context._jsc.sc()
    profile = scala_context.resourceProfileManager().defaultResourceProfile()
    return int(scala_context.maxNumConcurrentTasks(profile))


@contextlib.contextmanager
def _job_group(
    context: SparkContext, num_proc: int, start_timeout: float
) -> Iterator[threading.Event]:
    """Run the block's job so that it is cancelled on any error, or if its tasks do not start.

    Yields an event that is set when the job was cancelled for the latter reason.
    """
    group = f"hvd_estimators-{os.getpid()}-{time.monotonic_ns()}"
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = {name: context.getLocalProperty(name) for name in names}
    context.setJobGroup(group, f"Horovod on {num_proc} ranks", interruptOnCancel=True)
    timed_out, finished = threading.Event(), threading.Event()

    def cancel_late_start() -> None:
        deadline = time.monotonic() + start_timeout
        while not finished.wait(_POLL_SECONDS):
            if _active_tasks(context, group) >= num_proc:
                return
            if time.monotonic() > deadline:
                timed_out.set()
                context.cancelJobGroup(group)
                return

    watcher = threading.Thread(target=cancel_late_start, daemon=True)
    watcher.start()
    try:
        yield timed_out
    except BaseException:
        context.cancelJobGroup(group)
        raise
    finally:
        finished.set()
        watcher.join()
        for name, value in before.items():
            # None removes a property, which the type hints do not know.
            context.setLocalProperty(name, value)  # type: ignore[arg-type]


def _active_tasks(context: SparkContext, group: str) -> int:
    tracker = context.statusTracker()
    active = 0
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job else []:
            stage = tracker.getStageInfo(stage_id)
            active += stage.numActiveTasks + stage.numCompletedTasks if stage else 0
    return active
