"""Start and supervision of ranks, for all backends.

`start_rank` assembles a rank's process. `supervise` ends the remaining ranks when one rank of the
job fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from hvd_estimators.launch.gpus import VISIBLE_VARIABLE
from hvd_estimators.launch.rank.environment import (
    Master,
    SlotInfo,
    rank_environment,
    torchrun_environment,
)
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.output import LineHandler
from hvd_estimators.launch.rank.process import RankProcess
from hvd_estimators.launch.rendezvous.channel import ranks_key
from hvd_estimators.launch.rendezvous.client import RendezvousClient
from hvd_estimators.launch.rendezvous.gloo_http import (
    NCCL_INTERFACE_VARIABLE,
    GlooProxy,
    listening_environment,
)
from hvd_estimators.launch.rendezvous.server import Failure
from hvd_estimators.launch.warm.client import WarmStart

_POLL_SECONDS = 0.05
# A rank whose peer failed usually ends by itself, with an error that is worth reporting.
_GRACE_SECONDS = 3.0


@contextlib.contextmanager
def start_rank(
    slot: SlotInfo,
    address: str,
    client: RendezvousClient,
    *,
    call: bytes,
    secret: bytes,
    environment: Callable[..., dict[str, str]],
    master: Master,
    gpus: Mapping[str, str],
    on_lines: LineHandler,
    separate_streams: bool = False,
    on_called: Callable[[], None] = lambda: None,
    executable: str | None = None,
    warm: WarmStart | None = None,
) -> Iterator[RankProcess]:
    """Start one rank of a job, and end it and its descendants when the block ends.

    Parameters
    ----------
    slot : SlotInfo
        The rank's number, host and neighbours.
    address : str
        The address on which the rank listens.
    client : RendezvousClient
        Connection to the job's rendezvous.
    call : bytes
        The pickled call, from `hvd_estimators.launch.rank.process.pickle_call`.
    secret : bytes
        The job's secret.
    environment : callable
        Returns the rank's complete environment, given the variables that the rank alone has. The
        user's variables take precedence over these.
    master : Master
        The job's meeting point for programs that do not use Horovod.
    gpus : mapping
        The variables that restrict the rank to its GPUs.
    on_lines, separate_streams, on_called, executable, warm
        See `RankProcess`.
    """
    with GlooProxy(client, slot.size) as proxy:
        # The user's variables may show a rank other GPUs, too.
        given = environment(gpus)
        visible = given.get(VISIBLE_VARIABLE)
        has_own_gpus = bool(visible) and visible == gpus.get(VISIBLE_VARIABLE)
        listening = listening_environment(address)
        if NCCL_INTERFACE_VARIABLE in given:
            del listening[NCCL_INTERFACE_VARIABLE]
        env = environment(
            rank_environment(slot),
            torchrun_environment(slot, master, has_own_gpus),
            listening,
            proxy.environment(),
            ranks_key(secret),
            gpus,
        )
        with RankProcess(
            *(slot.rank, slot.hostname, call, env, on_lines),
            executable=executable,
            separate_streams=separate_streams,
            warm=warm,
            on_called=on_called,
        ) as process:
            yield process


def supervise(
    ranks: Sequence[RankProcess], remote_failure: Callable[[], Failure | None] = lambda: None
) -> list[RankOutcome]:
    """Wait until all processes have ended, and return their outcomes in the order of their ends.

    A stalled rank counts as failed. When a rank has failed, here or on another machine, the other
    ranks are ended after 3 s. If the wait is interrupted, all ranks are terminated at the same
    time, because ranks that must save state do so together.

    Parameters
    ----------
    ranks : sequence of RankProcess
        The job's running processes that this process has started.
    remote_failure : callable
        Returns, without waiting, the failure of the job outside these processes, or None.
    """
    try:
        return _supervise(ranks, remote_failure)
    except BaseException:
        for process in ranks:
            process.terminate()
        raise


def _supervise(
    ranks: Sequence[RankProcess], remote_failure: Callable[[], Failure | None]
) -> list[RankOutcome]:
    outcomes: dict[int, RankOutcome] = {}
    failure: Failure | None = None
    deadline = float("inf")
    while True:
        now = time.monotonic()
        failed_before = failure
        for process in ranks:
            if process.rank in outcomes:
                continue
            if not process.running():
                outcome = process.outcome()
            elif failed_before is not None and now > deadline:
                outcome = _ended_by(failed_before, process.abort())
            elif stall := process.poll():
                outcome = process.abort("stalled", stall)
            else:
                continue
            outcomes[process.rank] = outcome
            if outcome.failed:
                failure = failure or failure_of(outcome)
        failure = failure or remote_failure()
        if failure is not None:
            deadline = min(deadline, now + _GRACE_SECONDS)
        if len(outcomes) == len(ranks):
            return list(outcomes.values())
        time.sleep(_POLL_SECONDS)


def failure_of(outcome: RankOutcome) -> Failure:
    """Return a short description of a rank's failure for the other ranks."""
    # A traceback ends with the error.
    reason = (outcome.error.rstrip().splitlines() or [""])[-1]
    return Failure(outcome.rank, outcome.host, f"had failed ({reason[:200]})")


def _ended_by(failure: Failure, outcome: RankOutcome) -> RankOutcome:
    """Return the outcome of a rank that was ended because another rank failed."""
    if outcome.error_type != "aborted":
        return outcome  # the rank ended by itself before the abort
    return replace(
        outcome,
        error_type="lost" if failure.lost else "aborted",
        error=f"Ended because {failure}.",
        lost=(failure.rank, failure.host) if failure.lost else None,
    )
