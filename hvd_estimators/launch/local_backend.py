"""Ranks as subprocesses of this process, without Spark."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_estimators._util.import_path import python_path
from hvd_estimators._util.system import available_cores
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.gpus import rank_gpus
from hvd_estimators.launch.horovod_build import require_patches
from hvd_estimators.launch.rank.environment import (
    DEFAULTS,
    Master,
    SlotInfo,
    assign_ranks,
    child_environment,
    local_environment,
    reserved_port,
)
from hvd_estimators.launch.rank.outcome import results_in_order
from hvd_estimators.launch.rank.output import LineHandler, Relay
from hvd_estimators.launch.rank.process import RankProcess, pickle_call
from hvd_estimators.launch.rank.supervisor import start_rank, supervise
from hvd_estimators.launch.rendezvous.channel import LOOPBACK, new_secret
from hvd_estimators.launch.rendezvous.client import LocalRendezvousClient
from hvd_estimators.launch.rendezvous.server import JobStore
from hvd_estimators.launch.service.events import Handler, RankOutput, receive_events, serialized
from hvd_estimators.launch.service.output_sinks import Outlets
from hvd_estimators.launch.service.server import DriverService
from hvd_estimators.launch.validation import call_of, environment_given, whole_number
from hvd_estimators.launch.warm.client import WarmStart, allows_warm_start, idle_seconds
from hvd_estimators.launch.warm.modules import modules_of


class LocalBackend(Backend):
    """Backend that runs every rank as a subprocess on this machine.

    Parameters
    ----------
    num_proc : int
        Number of ranks. Default: 1. 0 and None: the number of cores available to this process.
    env : mapping, optional
        Environment variables to add to the ranks'; None deletes a variable. Ranks inherit
        the variables of this process that ``docs/launching.rst`` lists.
    verbose : int
        2 or more shows the ranks' output on standard error, with the rank before each line. If
        lines are consumed too slowly, some are dropped, and a line reports how many.
    stdout, stderr : file-like, optional
        Open text files or streams, such as ``sys.stdout``, for lines of the ranks' standard output
        and standard error. Lines are written while the ranks run, with ``[rank]<stdout>:`` or
        ``[rank]<stderr>:`` before each. If either argument is given, ranks have a separate pipe for
        each stream. The order between lines of the two streams is then unknown.
    prefix_output_with_timestamp : bool
        Whether each line of a rank starts with its time of arrival.
    warm_start : bool
        Whether ranks may be forked from a process that has already imported the framework, as in
        `SparkBackend`. The forking process ends with this one. Default: True on Linux, unless the
        environment variable ``HVD_ESTIMATORS_WARM_START`` is ``0``.

    Raises
    ------
    ParamError
        If an argument is invalid.
    """

    def __init__(
        self,
        num_proc: int | None = 1,
        env: Mapping[str, str | None] | None = None,
        verbose: int = 1,
        stdout: Any = None,
        stderr: Any = None,
        prefix_output_with_timestamp: bool = False,
        warm_start: bool = True,
    ) -> None:
        if num_proc is not None:
            num_proc = whole_number("num_proc", num_proc)
        self._num_proc = num_proc or available_cores()
        self._env = environment_given(env or {})
        self._outlets = Outlets(stdout, stderr, prefix_output_with_timestamp, verbose)
        self._warm_start = warm_start

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return self._num_proc

    def check_horovod(self) -> None:
        """Check that the ranks can use Horovod.

        Raises
        ------
        DependencyError
            If Horovod was not built by ``hvd-estimators build-horovod``.
        """
        require_patches()

    def resized(self, num_proc: int) -> LocalBackend:
        """Return a backend like this one for another number of ranks."""
        other = copy.copy(self)
        other._num_proc = num_proc
        return other

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
        call = pickle_call(*call_of(fn, args, kwargs))
        warm = None
        if self._warm_start and allows_warm_start(os.environ):
            warm = WarmStart(modules_of(call), [os.getpid()], idle_seconds(os.environ))
        host = socket.gethostname()
        slots = assign_ranks([host] * self._num_proc)
        secret, store = new_secret(), JobStore()
        handler = serialized(self._outlets.handler(on_event))
        with contextlib.ExitStack() as stack:
            service = stack.enter_context(DriverService(LOOPBACK))
            stack.enter_context(receive_events(service, handler))
            relays = [stack.enter_context(Relay(_shown_by(handler, slot.rank))) for slot in slots]
            port = stack.enter_context(reserved_port())
            master = Master(LOOPBACK, port, uuid.uuid4().hex)
            given = {**os.environ, **self._env, **(env or {})}

            def start(slot: SlotInfo, relay: Relay) -> RankProcess:
                def handle(stream: str, lines: list[str]) -> None:
                    if stream in self._outlets.streams:
                        relay.put(stream, lines)

                rank = start_rank(
                    *(slot, LOOPBACK, LocalRendezvousClient(store, slot.rank)),
                    call=call,
                    secret=secret,
                    environment=functools.partial(self._environment, service, env or {}),
                    master=master,
                    gpus=rank_gpus([], [], slot.local_rank, slot.local_size, given),
                    on_lines=handle,
                    separate_streams=self._outlets.are_separate,
                    warm=warm,
                )
                return stack.enter_context(rank)

            return results_in_order(supervise(list(map(start, slots, relays))))

    def _environment(
        self,
        service: DriverService,
        env: Mapping[str, str | None],
        *of_rank: Mapping[str, str | None],
    ) -> dict[str, str]:
        threads = max(available_cores() // self._num_proc, 1)
        return child_environment(
            {"OMP_NUM_THREADS": str(threads), **DEFAULTS, **local_environment(os.environ)},
            {"PYTHONPATH": python_path(sys.path)},
            *(*of_rank, service.environment(), self._env, env),
        )


def _shown_by(handler: Handler, rank: int) -> LineHandler:
    def show(stream: str, lines: Sequence[str]) -> None:
        for line in lines:
            handler(RankOutput(rank, line, stream))

    return show
