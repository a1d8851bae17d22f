"""Analytical model of a step on more ranks and hosts than this machine has.

A step computes on a batch while readers decode the next one, and then reduces gradients over all
ranks. Horovod's ring (both Gloo's and NCCL's) takes ``2 (n - 1)`` turns, in each of which every
rank sends an nth of the bytes to its neighbour: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", Journal of Parallel and Distributed Computing 69 (2009).
The time before the first turn is fixed: Horovod's cycle, and the agreement on ready tensors.

The model ignores the overlap of reduction and backward pass, so it is pessimistic in this respect.
It also ignores ranks that are slower than others, so it is optimistic in that respect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Link:
    """Cost of an allreduce.

    Attributes
    ----------
    fixed_seconds : float
        Seconds of each allreduce that depend neither on its size nor on the number of ranks.
    turn_seconds : float
        Seconds of each turn of the ring: the network's latency, and waking the other side.
    bytes_per_second : float
        Bandwidth from a rank to its neighbour.
    """

    fixed_seconds: float
    turn_seconds: float
    bytes_per_second: float

    def allreduce_seconds(self, ranks: int, num_bytes: float, stretch: float = 1.0) -> float:
        """Return the seconds of an allreduce; 0 for one rank.

        Parameters
        ----------
        ranks : int
            Ranks in the ring.
        num_bytes : float
            Bytes of all gradients.
        stretch : float
            Factor of the turns' duration: ranks per core, if ranks share cores.
        """
        if ranks == 1:
            return 0.0
        turn = self.turn_seconds + num_bytes / ranks / self.bytes_per_second
        return self.fixed_seconds + 2 * (ranks - 1) * turn * stretch


@dataclass(frozen=True)
class Work:
    """Work of one rank in a step.

    Attributes
    ----------
    device_seconds : float
        Seconds of forward pass, backward pass and optimizer on a device such as a GPU, which keep
        no core busy.
    compute_seconds : float
        Seconds of the same that keep a core busy.
    decode_seconds : float
        Seconds of reading and decoding a batch in parallel threads, without other load.
    decode_processor_seconds : float
        Processor seconds of decoding, on all cores together.
    gradient_bytes : float
        Bytes that are reduced.
    """

    device_seconds: float
    compute_seconds: float
    decode_seconds: float
    decode_processor_seconds: float
    gradient_bytes: float


def step_seconds(
    work: Work, ranks: int, link: Link, ranks_of_host: int = 1, cores: int | None = None
) -> float:
    """Return the seconds of a step.

    A step takes the longest of three times, plus the allreduce: computing, decoding, and the
    processor seconds of all ranks of a host divided by its cores. All ranks compute at the same
    time, because each step's allreduce synchronizes them; if they share cores, they take turns.

    Parameters
    ----------
    work : Work
        Work of one rank.
    ranks : int
        All ranks.
    link : Link
        The slowest link between two neighbours of the ring.
    ranks_of_host : int
        Ranks that share a host's cores.
    cores : int, optional
        Cores of the host. Default: enough for all ranks.
    """
    of_core = ranks_of_host / cores if cores is not None else 0.0
    stretch = max(1.0, of_core)
    alone = max(
        work.device_seconds + work.compute_seconds * stretch,
        work.decode_seconds,
        (work.compute_seconds + work.decode_processor_seconds) * of_core,
    )
    return alone + link.allreduce_seconds(ranks, work.gradient_bytes, stretch)


def efficiency(work: Work, ranks: int, link: Link) -> float:
    """Return the share of linear scaling of many ranks, each with its own cores."""
    return step_seconds(work, 1, link) / step_seconds(work, ranks, link)


def fit_seconds(
    fixed_seconds: float, rows: int, epochs: int, batch_size: int, ranks: int, step: float
) -> float:
    """Return the seconds of a fit: the fixed cost (launch, end), and its steps."""
    return fixed_seconds + epochs * math.ceil(rows / ranks / batch_size) * step


def fitted_link(measured: Iterable[tuple[int, float, float]], cores: int) -> Link:
    """Return the link that explains measured allreduces of one host's ranks best.

    Minimizes the squared relative errors; none of the three costs is negative.

    Parameters
    ----------
    measured : iterable of (int, float, float)
        Ranks, bytes and seconds. At least two numbers of ranks are needed to separate the fixed
        cost from the turns.
    cores : int
        Cores of the host.
    """
    rows = []
    for ranks, num_bytes, seconds in measured:
        stretch = max(1.0, ranks / cores)
        turns = 2 * (ranks - 1) * stretch
        rows.append([1 / seconds, turns / seconds, turns * num_bytes / ranks / seconds])
    fixed, turn, per_byte = _not_negative(np.array(rows), range(3))
    return Link(fixed, turn, 1 / per_byte if per_byte else math.inf)


def _not_negative(rows: np.ndarray, columns: Sequence[int]) -> list[float]:
    """Solve ``rows @ costs = 1`` by least squares; negative costs are set to 0."""
    found = [0.0] * rows.shape[1]
    solved = np.linalg.lstsq(rows[:, list(columns)], np.ones(len(rows)), rcond=None)[0]
    if (solved < 0).any():
        least = columns[int(np.argmin(solved))]
        return _not_negative(rows, [column for column in columns if column != least])
    for column, cost in zip(columns, solved, strict=True):
        found[column] = float(cost)
    return found
