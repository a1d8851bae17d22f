"""TensorBoard event files, written without TensorFlow."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from typing_extensions import Self

from hvd_estimators.training.spec import EpochMetrics

__all__ = ["EventWriter", "epoch_scalars"]

logger = logging.getLogger(__name__)

# Names of torch's and TensorFlow's files have more parts after the process ID.
_OWN_NAME = re.compile(r"events\.out\.tfevents\.\d+\.\d{6}\..*\.\d+")


class EventWriter:
    """Writes scalars for TensorBoard. Used as a context manager on rank 0.

    It does nothing without a directory, or if the ``tensorboard`` package is not installed. If the
    run repeats an epoch, scalars with the same values are not written a second time.

    Parameters
    ----------
    directory : str or None
        A local directory; created if it does not exist.
    first_step : int
        The first step to write. An interrupted earlier part of the run may have written scalars of
        this step and later ones. TensorBoard no longer shows these.
    """

    def __init__(self, directory: str | None, first_step: int = 0) -> None:
        self._directory = directory
        self._first_step = first_step
        self._file: IO[bytes] | None = None
        self._writer: Any = None
        self._written: dict[tuple[str, int], float] = {}

    def __enter__(self) -> Self:
        if self._directory is None:
            return self
        try:
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            logger.info("No TensorBoard logs: the tensorboard package is not installed.")
            return self
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(self._directory).glob("events.out.tfevents.*")):
            if _OWN_NAME.fullmatch(path.name):
                # A damaged file does not prevent training.
                with contextlib.suppress(Exception):
                    self._written.update(_scalars_in(path))
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(Path(self._directory) / name, "ab")
        self._writer = RecordWriter(self._file)
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(file_version="brain.Event:2")
        start = SessionLog(status=SessionLog.START)
        self._write(step=self._first_step, session_log=start)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars by tag, such as ``train/loss``, at a step."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        known = [self._written.get((entry.tag, step)) for entry in summary.value]
        if known != [entry.simple_value for entry in summary.value]:
            self._write(step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()


def _scalars_in(path: Path) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield tag, step and value of a file's scalars, up to the first incomplete record.

    TensorBoard's own reader imports TensorFlow if that is installed.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    with open(path, "rb") as file:
        # A record consists of its length, a checksum of that, the content, and a checksum of the
        # content.
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            content = file.read(length)
            if len(content) < length or len(file.read(4)) < 4:
                return
            event = Event.FromString(content)
            for value in event.summary.value:
                yield (value.tag, event.step), value.simple_value


def epoch_scalars(record: EpochMetrics) -> dict[str, float]:
    """Return the metrics of an epoch by tag, such as ``train/loss``."""
    return {f"{stage}/{name}": value for _, stage, name, value in record.rows()}
