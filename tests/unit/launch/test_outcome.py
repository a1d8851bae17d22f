"""Completeness checks of the outcomes that Spark collects from ranks."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from typing import Any

import pytest

from hvd_estimators.exceptions import ResultsError, StoreError
from hvd_estimators.launch.rank.outcome import RankOutcome, results_in_order
from hvd_estimators.launch.task.run import outcomes


def rows(outcome: RankOutcome, chunks: int = 2) -> list[dict[str, Any]]:
    document = pickle.dumps(asdict(outcome))
    size = -(-len(document) // chunks)
    return [
        {
            "task": outcome.rank,
            "chunk": chunk,
            "chunks": chunks,
            "bytes": document[chunk * size : (chunk + 1) * size],
        }
        for chunk in range(chunks)
    ]


FIRST = RankOutcome(0, "a", b"first")
SECOND = RankOutcome(1, "b", b"second")


def test_outcomes_are_assembled_from_chunks_in_any_order() -> None:
    given = [*rows(SECOND)[::-1], *rows(FIRST, 3)]

    assert sorted(outcomes(given, 2), key=lambda o: o.rank) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("given", "missing"),
    [([], "0, 1"), (rows(SECOND), "0"), ([*rows(FIRST), rows(SECOND)[1]], "1")],
    ids=["none", "a rank", "a chunk"],
)
def test_missing_outcomes_are_an_error(given: Any, missing: str) -> None:
    with pytest.raises(ResultsError, match=rf"what ranks {missing} returned .* Return less, or"):
        outcomes(given, 2)


def test_a_failed_rank_takes_precedence_over_a_missing_one() -> None:
    failed = RankOutcome(1, "b", None, "ValueError", "it broke")

    assert outcomes(rows(failed), 2) == [failed]


def test_a_result_too_large_to_send_is_an_error() -> None:
    failed = RankOutcome(1, "b", None, "ResultsError", "Rank 1 returned 5 MiB")

    with pytest.raises(ResultsError, match="Rank 1 returned 5 MiB"):
        outcomes([*rows(FIRST), *rows(failed)], 2)


def test_a_task_that_has_no_space_for_its_rank_is_a_store_error() -> None:
    failed = RankOutcome(1, "b", None, "StoreError", "No space is left. Temporary files are in /x")

    with pytest.raises(StoreError, match="Temporary files are in /x"):
        results_in_order([FIRST, failed])
