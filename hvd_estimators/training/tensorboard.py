"""TensorBoard event files, written without TensorFlow.

TensorBoard's own file writer imports TensorFlow if that is installed.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from typing_extensions import Self

from hvd_estimators.training.spec import EpochMetrics

logger = logging.getLogger(__name__)


class EventWriter:
    """Writes scalars for TensorBoard. Used as a context manager on rank 0.

    It does nothing without a directory, or if the ``tensorboard`` package is not installed.

    Parameters
    ----------
    directory : str or None
        A local directory; created if it does not exist.
    purge_step : int
        The first step to write, as in torch's ``SummaryWriter``. TensorBoard hides scalars of this
        step and later ones that an interrupted part of the run has written.
    """

    def __init__(self, directory: str | None, purge_step: int = 0) -> None:
        self._directory = directory
        self._purge_step = purge_step
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def __enter__(self) -> Self:
        if self._directory is None:
            return self
        try:
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            logger.info("No TensorBoard logs: the tensorboard package is not installed.")
            return self
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(Path(self._directory) / name, "ab")
        self._writer = RecordWriter(self._file)
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(file_version="brain.Event:2")
        start = SessionLog(status=SessionLog.START)
        self._write(step=self._purge_step, session_log=start)
        return self

    def __exit__(self, *exc_info: object) -> None:
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
        self._write(step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()


def epoch_scalars(record: EpochMetrics) -> dict[str, float]:
    """Return the metrics of an epoch by tag, such as ``train/loss``."""
    return {f"{stage}/{name}": value for _, stage, name, value in record.rows()}
