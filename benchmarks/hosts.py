"""A model of a step on more ranks and hosts than there are here; arithmetic alone.

A step computes on a batch while readers decode the next one, and then reduces gradients over all
ranks. Horovod's ring (Gloo's and NCCL's alike) takes ``2 (n - 1)`` turns, in each of which every
rank sends an nth of the bytes to its neighbour: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", Journal of Parallel and Distributed Computing 69 (2009).
What comes before is fixed: Horovod's cycle, and the ranks' agreement on what is ready.

No overlap of reduction and backward pass is assumed, so that the model tells the slow side; and no
rank that is slower than others, so that it also tells the fast one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Link:
    """What an allreduce costs.

    Attributes
    ----------
    fixed_seconds : float
        Of each allreduce, whatever its size and however many ranks.
    turn_seconds : float
        Of each turn of the ring: the network's latency, and waking the other side.
    bytes_per_second : float
        From a rank to its neighbour.
    """

    fixed_seconds: float
    turn_seconds: float
    bytes_per_second: float

    def allreduce_seconds(self, ranks: int, num_bytes: float, stretch: float = 1.0) -> float:
        """Return the seconds of an allreduce; none for one rank.

        Parameters
        ----------
        ranks : int
            In the ring.
        num_bytes : float
            Of all gradients.
        stretch : float
            How many times as long the turns take: ranks of a core, where they share cores.
        """
        if ranks == 1:
            return 0.0
        turn = self.turn_seconds + num_bytes / ranks / self.bytes_per_second
        return self.fixed_seconds + 2 * (ranks - 1) * turn * stretch


@dataclass(frozen=True)
class Work:
    """What one rank does in a step.

    Attributes
    ----------
    device_seconds : float
        Of the forward and backward pass and the optimizer, what keeps no core busy: a GPU computes.
    compute_seconds : float
        Of the same, what keeps a core busy.
    decode_seconds : float
        Reading and decoding a batch, alone, in threads beside it.
    decode_processor_seconds : float
        Of decoding, on all cores together.
    gradient_bytes : float
        That are reduced.
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

    The slower of computing and decoding, or the time in which the host's cores do what all of its
    ranks ask of them, if that is longer; and the allreduce. Ranks compute at the same time, since
    each step's allreduce makes them wait for each other: where they share cores they take turns.

    Parameters
    ----------
    work : Work
        Of one rank.
    ranks : int
        All ranks.
    link : Link
        The slowest between two neighbours of the ring.
    ranks_of_host : int
        That share a host's cores.
    cores : int, optional
        The host's; enough for all, if left out.
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
    """Return rows per second of many ranks, each on cores of its own, to ranks times one's."""
    return step_seconds(work, 1, link) / step_seconds(work, ranks, link)


def fit_seconds(
    fixed_seconds: float, rows: int, epochs: int, batch_size: int, ranks: int, step: float
) -> float:
    """Return the seconds of a fit: what is fixed (launch, end), and its steps."""
    return fixed_seconds + epochs * math.ceil(rows / ranks / batch_size) * step


def fitted_link(measured: Iterable[tuple[int, float, float]], cores: int) -> Link:
    """Return the link by which measured allreduces of ranks of one host are explained best.

    Least squares of relative errors; none of the three costs is negative.

    Parameters
    ----------
    measured : iterable of (int, float, float)
        Ranks, bytes and seconds. One number of ranks cannot tell what is fixed from turns.
    cores : int
        The host's.
    """
    rows = []
    for ranks, num_bytes, seconds in measured:
        stretch = max(1.0, ranks / cores)
        turns = 2 * (ranks - 1) * stretch
        rows.append([1 / seconds, turns / seconds, turns * num_bytes / ranks / seconds])
    fixed, turn, per_byte = _not_negative(np.array(rows), range(3))
    return Link(fixed, turn, 1 / per_byte if per_byte else math.inf)


def _not_negative(rows: np.ndarray, columns: Sequence[int]) -> list[float]:
    """Solve ``rows @ costs = 1`` by least squares; what comes out below nothing is left out."""
    found = [0.0] * rows.shape[1]
    solved = np.linalg.lstsq(rows[:, list(columns)], np.ones(len(rows)), rcond=None)[0]
    if (solved < 0).any():
        least = columns[int(np.argmin(solved))]
        return _not_negative(rows, [column for column in columns if column != least])
    for column, cost in zip(columns, solved, strict=True):
        found[column] = float(cost)
    return found
