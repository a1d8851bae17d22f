"""TensorBoard shows each epoch of a run once, despite interruptions."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_estimators.training.tensorboard import EventWriter


def test_repeated_steps_replace_those_of_an_interrupted_part(tmp_path: Path) -> None:
    for first, values in ((0, [1.0, 2.0, 3.0]), (1, [2.5, 3.5]), (3, [4.0]), (4, [])):
        with EventWriter(str(tmp_path), first) as writer:
            for step, value in enumerate(values, start=first):
                writer.scalars(step, {"train/loss": value})
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in shown] == [
        (0, 1.0),
        (1, 2.5),
        (2, 3.5),
        (3, 4.0),
    ]
