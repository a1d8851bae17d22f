"""Training ends on all ranks together where something is NaN; steps of a run are counted alike."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from hvd_estimators.exceptions import HvdEstimatorsError, NotFiniteError
from hvd_estimators.training.nan_check import NanCheck
from hvd_estimators.training.spec import CheckpointOptions, TrainSpec

NAN = float("nan")


class Ranks:
    """Ranks that are threads: gather and sum what each has brought."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.brought: dict[int, Any] = {}
        self.gathered = 0
        self._barrier = threading.Barrier(size, timeout=30)

    def meet(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self._barrier.wait()
        values = [self.brought[r] for r in range(self.size)]
        self._barrier.wait()
        return values

    def after_step(self, found: list[tuple[float | None, list[str]]]) -> list[str | None]:
        """Return what each rank has raised, if each finds what is given for it."""
        raised: list[str | None] = [None] * self.size

        def be(rank: int) -> None:
            def gather(value: Any, name: str) -> list[Any]:
                self.gathered += 1
                return self.meet(rank, value)

            exchange: Any = type("Exchange", (), {"gather": staticmethod(gather)})
            check = NanCheck(rank, self.size, lambda v: sum(self.meet(rank, v)), exchange)
            try:
                check.after_step(37, 2, *found[rank])
            except NotFiniteError as error:
                raised[rank] = str(error)

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised


def test_all_ranks_end_with_the_same_message() -> None:
    ranks = Ranks(3)
    raised = ranks.after_step([(None, []), (NAN, ["w"]), (None, ["w"])])
    assert raised[0] is not None
    assert len(set(raised)) == 1
    assert "step 37 of the run (in epoch 2" in raised[0]
    assert "the loss of rank 1 is nan; NaN or infinite after it: 'w'. " in raised[0]
    assert issubclass(NotFiniteError, (HvdEstimatorsError, FloatingPointError))


def test_nothing_is_gathered_where_all_is_finite() -> None:
    ranks = Ranks(2)
    assert ranks.after_step([(None, []), (None, [])]) == [None, None]
    assert not ranks.gathered


def test_one_rank_asks_nobody_and_names_a_few() -> None:
    ranks = Ranks(1)
    names = [f"layer.{n}" for n in range(8)]
    (message,) = ranks.after_step([(None, names)])
    assert message is not None
    assert "'layer.4' and 3 others" in message
    assert "layer.5" not in message
    assert "the loss" not in message
    assert not ranks.brought


@dataclass
class Data:
    train_steps_per_epoch: int


def test_steps_are_counted_over_the_run() -> None:
    spec = object.__new__(TrainSpec)
    spec.__dict__.update(data=Data(7), backward_passes_per_step=3)
    # Three steps an epoch, the last of one batch.
    done = [(epoch, b) for epoch in (0, 1, 2) for b in (3, 6, 7)]
    assert [spec.steps_done(*at) for at in done] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert spec.steps_done(1, 0) == spec.steps_done(0, 7)
    due = CheckpointOptions("torch", every_n_steps=4)
    assert [at for at in done if due.due_after(spec.steps_done(*at))] == [(1, 3), (2, 6)]
    assert not any(CheckpointOptions("torch").due_after(step) for step in range(1, 9))
