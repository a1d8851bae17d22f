"""Ranks as subprocesses of this process, without Spark."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.addresses import LOOPBACK, listening_environment
from hvd_estimators.launch.arguments import check_further_arguments, check_run_arguments
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.channel import new_secret, ranks_key
from hvd_estimators.launch.events import (
    EVENTS_VARIABLE,
    Handler,
    RankOutput,
    one_by_one,
    print_output,
    receive_events,
)
from hvd_estimators.launch.gloo_proxy import GlooProxy
from hvd_estimators.launch.job_store import JobStore
from hvd_estimators.launch.mends import require_mends
from hvd_estimators.launch.patience import GLOO_TIMEOUT
from hvd_estimators.launch.process import (
    RankProcess,
    pickle_call,
    results_in_order,
)
from hvd_estimators.launch.rendezvous import (
    assign_ranks,
    child_environment,
    python_path,
    rank_environment,
)
from hvd_estimators.launch.rendezvous_client import LocalLink
from hvd_estimators.launch.supervisor import supervise

__all__ = ["LocalBackend"]


class LocalBackend(Backend):
    """Runs every rank as a subprocess on this machine.

    Parameters
    ----------
    num_proc : int
        Number of ranks. Default: 1. 0 and None: as many as this process has cores.
    env : mapping, optional
        Environment variables of the ranks; None deletes one. Ranks inherit this process's.
    verbose : int
        2 and above shows what the ranks print.
    **further
        Further arguments of ``horovod.spark.run``, which have no effect; a warning says what takes
        their place.

    Raises
    ------
    ParamError
        If an argument is not usable, or is unknown.
    """

    def __init__(
        self,
        num_proc: int | None = 1,
        env: Mapping[str, str | None] | None = None,
        verbose: int = 1,
        **further: Any,
    ) -> None:
        if num_proc is not None and num_proc < 0:
            raise ParamError(f"num_proc: expected 0 or more, found {num_proc}.")
        check_further_arguments(LocalBackend, further)
        self._num_proc = num_proc or _cores()
        self._env = dict(env or {})
        self._verbose = verbose

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return self._num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: Handler | None = None,
        **unknown: Any,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; see `Backend.run`."""
        check_run_arguments(self.run, unknown)
        require_mends()
        call = pickle_call(fn, args, kwargs or {})
        slots = assign_ranks([socket.gethostname()] * self._num_proc)
        threads = max((os.cpu_count() or 1) // self._num_proc, 1)
        base = {
            "OMP_NUM_THREADS": str(threads),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": GLOO_TIMEOUT,
            **os.environ,
            "PYTHONPATH": python_path(sys.path),
        }
        # Ranks that end are seen by this process itself.
        key = ranks_key(new_secret())
        store = JobStore(silence=float("inf"))
        store.expect([slot.hostname for slot in slots])
        handler = one_by_one(on_event or print_output)
        with contextlib.ExitStack() as stack:
            # Lines of output come to this process anyway.
            events: dict[str, str | None] = {EVENTS_VARIABLE: None}
            if on_event is not None:
                events.update(stack.enter_context(receive_events(handler, self.driver_host())))
            proxies = [
                stack.enter_context(GlooProxy(LocalLink(store, slot.rank))) for slot in slots
            ]
            ranks = [
                stack.enter_context(
                    RankProcess(
                        slot.rank,
                        slot.hostname,
                        call,
                        child_environment(
                            base,
                            rank_environment(slot),
                            listening_environment(LOOPBACK),
                            proxy.environment(),
                            key,
                            events,
                            self._env,
                            env,
                        ),
                        self._relay(slot.rank, handler),
                    )
                )
                for slot, proxy in zip(slots, proxies, strict=True)
            ]
            return results_in_order(supervise(ranks))

    def _relay(self, rank: int, handler: Handler) -> Callable[[str], None] | None:
        if self._verbose < 2:
            return None
        return lambda line: handler(RankOutput(rank, line))


def _cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
