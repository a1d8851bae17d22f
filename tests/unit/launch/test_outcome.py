"""Completeness checks of the outcomes that Spark collects from ranks."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from typing import Any

import pytest

from hvd_estimators.exceptions import ResultsError
from hvd_estimators.launch.rank.outcome import ErrorReport, RankOutcome
from hvd_estimators.launch.task.run import outcomes


def row(outcome: RankOutcome) -> dict[str, Any]:
    return {"outcome": pickle.dumps(asdict(outcome))}


FIRST = RankOutcome(0, "a", b"first")
SECOND = RankOutcome(1, "b", b"second")


def test_outcomes_arrive_in_any_order() -> None:
    assert outcomes([row(SECOND), row(FIRST)], 2) == [SECOND, FIRST]


@pytest.mark.parametrize(("given", "missing"), [([], "0, 1"), ([row(SECOND)], "0")])
def test_missing_outcomes_are_an_error(given: Any, missing: str) -> None:
    with pytest.raises(ResultsError, match=rf"what ranks {missing} returned .* Return less, or"):
        outcomes(given, 2)


def test_a_failed_rank_takes_precedence_over_a_missing_one() -> None:
    failed = RankOutcome(1, "b", None, "ValueError", "it broke")

    assert outcomes([row(failed)], 2) == [failed]


def test_an_exception_of_the_user_with_that_name_is_the_ranks() -> None:
    report = ErrorReport("ResultsError", "mine", "")
    failed = RankOutcome(1, "b", None, "ResultsError", "mine", report=report)
    document = {"outcome": pickle.dumps(vars(failed))}
    assert outcomes([row(FIRST), document], 2) == [FIRST, failed]


def test_a_result_too_large_to_send_is_an_error() -> None:
    failed = RankOutcome(1, "b", None, "ResultsError", "Rank 1 returned 5 MiB")

    with pytest.raises(ResultsError, match="Rank 1 returned 5 MiB"):
        outcomes([row(FIRST), row(failed)], 2)
