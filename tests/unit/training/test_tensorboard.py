"""TensorBoard's files of a run whose epochs are trained again."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from hvd_estimators.training.tensorboard import EventWriter


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    return [
        (value.tag, event.step, round(value.simple_value, 3))
        for path in sorted(folder.glob("events*"))
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


def test_an_epoch_that_is_trained_again_is_there_once(tmp_path: Path) -> None:
    with EventWriter(str(tmp_path)) as writer:
        writer.scalars(0, {"train/loss": 0.1, "validation/loss": 0.2})
        writer.scalars(1, {"train/loss": 0.3})
        writer.scalars(2, {"train/loss": 0.4})
    # The rank was killed in the middle of a record.
    (own,) = tmp_path.iterdir()
    own.write_bytes(own.read_bytes()[:-3])
    # Files that nobody can read, or that are others'.
    (tmp_path / "events.out.tfevents.1.123456.host.1").write_bytes(b"\1" + b"\0" * 40)
    (tmp_path / f"{own.name}.0").write_bytes(b"")

    with EventWriter(str(tmp_path)) as writer:
        writer.scalars(0, {"train/loss": 0.1, "validation/loss": 0.2})
        writer.scalars(1, {"train/loss": 0.35})
        writer.scalars(2, {"train/loss": 0.4})
    for path in tmp_path.glob("events.out.tfevents.1.*"):
        path.unlink()
    assert scalars(tmp_path) == [
        ("train/loss", 0, 0.1),
        ("validation/loss", 0, 0.2),
        ("train/loss", 1, 0.3),
        # Another value is written, and what was cut off.
        ("train/loss", 1, 0.35),
        ("train/loss", 2, 0.4),
    ]
