"""The model of more hosts, compared with a simulated ring allreduce."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hosts import Link, Work, efficiency, fit_seconds, fitted_link, step_seconds

seconds = st.floats(0, 10)
links = st.builds(Link, st.floats(0, 0.1), st.floats(0, 0.01), st.floats(1e6, 1e11))
works = st.builds(Work, st.floats(1e-4, 10), seconds, seconds, seconds, st.floats(4, 1e9))


def ring(ranks: int, width: int) -> tuple[np.ndarray, int, list[int]]:
    """Simulate a ring allreduce; return a rank's sums, the turns, and the numbers sent."""
    rng = np.random.default_rng(ranks)
    start = rng.integers(0, 100, (ranks, ranks * width))
    pieces = [np.array_split(row.copy(), ranks) for row in start]
    turns, sent = 0, [0] * ranks
    for turn in range(2 * (ranks - 1)):
        is_reducing = turn < ranks - 1
        first = turn if is_reducing else turn - ranks
        moved = [(rank, (rank - first) % ranks) for rank in range(ranks)]
        values = [pieces[rank][piece].copy() for rank, piece in moved]
        for (rank, piece), value in zip(moved, values, strict=True):
            to = (rank + 1) % ranks
            pieces[to][piece] = pieces[to][piece] + value if is_reducing else value
            sent[rank] += len(value)
        turns += 1
    assert all((np.concatenate(of_rank) == start.sum(axis=0)).all() for of_rank in pieces)
    return start.sum(axis=0), turns, sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_allreduce_times_match_the_rings_turns_and_bytes(ranks: int) -> None:
    sums, turns, sent = ring(ranks, width=5)
    link = Link(fixed_seconds=1.0, turn_seconds=0.1, bytes_per_second=1000.0)
    expected = 1.0 + turns * 0.1 + max(sent) * 8 / 1000.0
    assert link.allreduce_seconds(ranks, sums.nbytes) == pytest.approx(expected)


@given(works, links, st.integers(1, 500))
def test_efficiency_is_bounded_for_any_number_of_ranks(work: Work, link: Link, ranks: int) -> None:
    found = efficiency(work, ranks, link)
    assert 0 < found <= 1
    assert efficiency(work, ranks + 1, link) <= found * (1 + 1e-9)
    # With free turns, a ring of any size takes less than twice the time of the bytes.
    free = Link(link.fixed_seconds, 0.0, link.bytes_per_second)
    most = link.fixed_seconds + 2 * work.gradient_bytes / link.bytes_per_second
    assert free.allreduce_seconds(ranks, work.gradient_bytes) <= most * (1 + 1e-9)


@given(works, links, st.integers(1, 64), st.integers(1, 64))
def test_enough_cores_make_one_host_as_fast_as_separate_ones(
    work: Work, link: Link, ranks: int, cores: int
) -> None:
    apart = step_seconds(work, ranks, link)
    together = step_seconds(work, ranks, link, ranks, cores)
    assert together >= apart
    busy = max(work.device_seconds + work.compute_seconds, work.decode_seconds)
    asked = (work.compute_seconds + work.decode_processor_seconds) * ranks
    if ranks <= cores and asked <= busy * cores:
        assert together == pytest.approx(apart)


def test_step_times_follow_the_slower_part_and_shared_cores() -> None:
    link = Link(0.001, 0.0, math.inf)
    assert step_seconds(Work(0.01, 0.01, 0.05, 0.02, 8), 1, link) == 0.05
    assert step_seconds(Work(0.03, 0.02, 0.02, 0.02, 8), 2, link) == pytest.approx(0.051)
    # Four ranks compute for 0.02 seconds each on two cores, after 0.03 on their devices.
    assert step_seconds(Work(0.03, 0.02, 0.02, 0.01, 8), 4, link, 4, 2) == pytest.approx(0.071)
    # Eight ranks need 0.03 + 0.02 seconds each of the two cores.
    assert step_seconds(Work(0.0, 0.03, 0.02, 0.02, 8), 8, link, 8, 2) == pytest.approx(0.201)


@given(
    st.floats(1e-4, 1e-2), st.floats(1e-6, 1e-3), st.floats(1e7, 1e10), st.sampled_from([1, 2, 16])
)
def test_links_are_recovered_from_their_allreduce_times(
    fixed: float, turn: float, speed: float, cores: int
) -> None:
    link = Link(fixed, turn, speed)
    measured = [
        (ranks, 4.0**power, link.allreduce_seconds(ranks, 4.0**power, max(1, ranks / cores)))
        for ranks in (2, 4)
        for power in range(1, 13)
    ]
    found = fitted_link(measured, cores)
    for ranks, num_bytes, expected in measured:
        stretch = max(1, ranks / cores)
        assert found.allreduce_seconds(ranks, num_bytes, stretch) == pytest.approx(expected, 1e-3)


def test_fitted_costs_of_a_link_are_never_negative() -> None:
    # More ranks are faster in this data, which only a negative turn would explain.
    found = fitted_link([(2, 4.0, 0.004), (4, 4.0, 0.002), (2, 4e6, 0.01), (4, 4e6, 0.01)], 4)
    assert min(found.fixed_seconds, found.turn_seconds) >= 0 < found.bytes_per_second


def test_fit_times_are_the_fixed_time_plus_the_steps() -> None:
    # 1001 rows on 2 ranks are 501 each, which form 51 batches of 10.
    assert fit_seconds(3.0, rows=1001, epochs=2, batch_size=10, ranks=2, step=0.5) == 3.0 + 51.0
