"""Run Python code in processes of its own, with a time limit and none left behind.

What the doctor imports may crash, hang or hold a GPU's memory, so it happens in such a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO

from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.launch.addresses import LOOPBACK, listening_environment
from hvd_estimators.launch.gloo_proxy import GlooProxy
from hvd_estimators.launch.job_store import JobStore
from hvd_estimators.launch.rendezvous_client import LocalLink

__all__ = ["ProbeError", "run_python", "two_rank_allreduce"]

_POLL_SECONDS = 0.05

_ALLREDUCE_SCRIPTS = {
    "torch": """\
import torch
import horovod.torch as hvd
hvd.init()
print(float(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)))
""",
    "tensorflow": """\
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
print(float(hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)[0]))
""",
}
_ALLREDUCE_SUM = 3.0  # ranks 0 and 1 give 1 and 2


class ProbeError(HvdEstimatorsError):
    """Something that was tried did not work; the message is its own last words."""


def run_python(
    script: str,
    environments: Sequence[Mapping[str, str]] = ({},),
    *,
    seconds: float,
    what: str = "process",
) -> list[str]:
    """Run `script` once per environment, all at the same time, and return their last lines.

    The first failure ends them all, so that what is told is the cause and not a peer's time-out.

    Parameters
    ----------
    script : str
        Python code.
    environments : sequence of mappings
        Variables to lay over this process's own, one mapping per process.
    seconds : float
        Time limit for all of them together.
    what : str
        What the processes are called in an error.

    Raises
    ------
    ProbeError
        A process failed or did not end in time.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as lifetimes:
        outputs = [lifetimes.enter_context(TemporaryFile("w+")) for _ in environments]
        errors = [lifetimes.enter_context(TemporaryFile("w+")) for _ in environments]
        running = [
            lifetimes.enter_context(_process(script, *places))
            for places in zip(environments, outputs, errors, strict=True)
        ]
        while any(process.poll() is None for process in running):
            _raise_first_failure(running, errors, what)
            if time.monotonic() > deadline:
                raise ProbeError(f"{what} did not end in {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        _raise_first_failure(running, errors, what)
        return [_last_line(output) for output in outputs]


def two_rank_allreduce(framework: str, *, seconds: float) -> float:
    """Start two ranks on this machine, let them reduce a tensor, and return the seconds it took.

    They find each other as the ranks of a `LocalBackend` do.

    Parameters
    ----------
    framework : {'torch', 'tensorflow'}
        Whose tensors are reduced.
    seconds : float
        Time limit.

    Raises
    ------
    ProbeError
        The ranks failed, got a wrong sum or did not end in time.
    """
    started = time.monotonic()
    with _rendezvous() as environments:
        script = _ALLREDUCE_SCRIPTS[framework]
        sums = run_python(script, environments, seconds=seconds, what="a rank")
    if [float(text) for text in sums] != [_ALLREDUCE_SUM, _ALLREDUCE_SUM]:
        raise ProbeError(f"the ranks got {' and '.join(sums)} instead of {_ALLREDUCE_SUM}")
    return time.monotonic() - started


@contextlib.contextmanager
def _rendezvous() -> Iterator[list[dict[str, str]]]:
    # Only once Horovod is known to be there.
    from hvd_estimators.launch.rendezvous import assign_ranks, rank_environment

    slots = assign_ranks(["localhost", "localhost"])
    store = JobStore(silence=float("inf"))
    with contextlib.ExitStack() as stack:
        links = [LocalLink(store, slot.rank) for slot in slots]
        proxies = [stack.enter_context(GlooProxy(link)) for link in links]
        yield [
            {
                **rank_environment(slot),
                **listening_environment(LOOPBACK),
                **proxy.environment(),
                # The check is of Horovod, and the GPUs may be in use.
                "CUDA_VISIBLE_DEVICES": "",
            }
            for slot, proxy in zip(slots, proxies, strict=True)
        ]


@contextlib.contextmanager
def _process(
    script: str, environment: Mapping[str, str], output: IO[str], errors: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `script` in a process group of its own, which is gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _raise_first_failure(
    running: Sequence[subprocess.Popen[bytes]], errors: Sequence[IO[str]], what: str
) -> None:
    for process, error in zip(running, errors, strict=True):
        if process.poll():
            words = _last_line(error) or f"exit status {process.returncode}"
            raise ProbeError(f"{what} failed: {words}")


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return next((line.strip() for line in reversed(file.readlines()) if line.strip()), "")
