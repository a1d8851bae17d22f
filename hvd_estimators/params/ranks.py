"""The params of the ranks: how many there are, and what runs them. Runs on the driver."""

from __future__ import annotations

from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.spark import SparkBackend
from hvd_estimators.params import DeclaredParams, boolean, declare, integer, one_of

__all__ = ["RankParams"]


class RankParams(DeclaredParams):
    """How many ranks there are, what runs them, and what they show."""

    num_proc = declare(
        "Number of ranks. Default, and 0: as many as there are task slots.", convert=integer(0)
    )
    max_restarts = declare(
        "How often the ranks are launched again where one is lost: killed, without its executor, "
        "its peers or its store; or stalled: stopped for a minute, or holding up the others for "
        "half an hour (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS in the ranks' environment sets another "
        "limit for both, 0 none for the latter); or all of them without a batch or an end of an "
        "epoch for four hours (HVD_ESTIMATORS_HANG_SECONDS). They go on from the run's newest "
        "checkpoint. Task slots for them are waited for as run_elastic does "
        "(HOROVOD_ELASTIC_TIMEOUT, 600 seconds). An exception of the training code ends the fit. "
        "A run_id whose driver was killed on another machine is waited for, for five minutes.",
        default=0,
        convert=integer(0),
    )
    min_num_proc = declare(
        "Fewest ranks of a restart, where there are fewer task slots than num_proc; they train "
        "what num_proc ranks do. Default: num_proc.",
        convert=integer(1),
    )
    backend = declare(
        "What runs the ranks, instead of num_proc: a Backend, or any object with run(fn, args, "
        "kwargs, env) and num_processes(). It is not saved with the estimator.",
        saved=False,
    )
    resource_profile = declare(
        "What the tasks of ranks ask for, a pyspark.resource.ResourceProfile, so that training "
        "gets GPUs that preparing the data did not hold. It is not saved with the estimator.",
        saved=False,
    )
    gpus_per_task = declare(
        "GPUs of each rank's task. Default: spark.task.resource.gpu.amount.", convert=integer(1)
    )
    cpus_per_task = declare(
        "Cores of each rank's task. Default: spark.task.cpus.", convert=integer(1)
    )
    use_gpu = declare("Train on GPUs where ranks have one.", default=True, convert=boolean)
    mp_start_method = declare(
        "Start method of multiprocessing in the ranks: 'fork', 'forkserver' or 'spawn'.",
        convert=one_of("fork", "forkserver", "spawn"),
    )
    verbose = declare(
        "0 is silent, 1 shows progress, 2 also what the ranks print.", default=1, convert=integer(0)
    )

    def _get_or_create_backend(self) -> Any:
        """Return the backend that is set, or one for ``num_proc`` Spark tasks; for subclasses.

        An override may return any object with ``run(fn, args, kwargs, env)`` and
        ``num_processes()``.
        """
        backend, num_proc = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        names = ("resource_profile", "gpus_per_task", "cpus_per_task")
        resources = {name: self.getOrDefault(name) for name in names}
        if backend is None:
            return SparkBackend(num_proc, verbose=self.getOrDefault("verbose"), **resources)
        for name, value in {"num_proc": num_proc, **resources}.items():
            if value is not None:
                raise ParamError(
                    f"backend and {name} are both set. Set {name} on the backend only."
                )
        return backend
