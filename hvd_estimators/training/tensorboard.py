"""TensorBoard event files, written without TensorFlow.

TensorBoard's own file writer imports TensorFlow if that is installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from hvd_estimators.training.spec import EpochMetrics

logger = logging.getLogger(__name__)

_SESSION_FILE = "events.out.tfevents.0.hyperparameters"
"""File of the newest part of a run. TensorBoard shows the first values that it reads."""


class EventWriter:
    """Writes scalars and hyperparameters for TensorBoard. Used as a context manager on rank 0.

    It does nothing without a directory, or if the ``tensorboard`` package is not installed.

    Parameters
    ----------
    directory : str or None
        A local directory; created if it does not exist.
    purge_step : int
        The first step to write, as in torch's ``SummaryWriter``. TensorBoard hides scalars of this
        step and later ones that an interrupted part of the run has written.
    hyperparameters : mapping
        Values by name, for TensorBoard's page HParams.
    """

    def __init__(
        self,
        directory: str | None,
        purge_step: int = 0,
        hyperparameters: Mapping[str, bool | int | float | str] = MappingProxyType({}),
    ) -> None:
        self._directory = directory
        self._purge_step = purge_step
        self._hyperparameters = hyperparameters
        self._stack = contextlib.ExitStack()
        self._writer: Any = None
        self._session_writer: Any = None

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
        session_file = Path(self._directory, _SESSION_FILE)
        # A new file, because a reader may have the old one open.
        session_file.unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            self._writer, self._session_writer = (
                RecordWriter(stack.enter_context(open(path, "ab")))
                for path in (Path(self._directory, name), session_file)
            )
            self._stack = stack.pop_all()
        from tensorboard.compat.proto.event_pb2 import SessionLog

        _write(self._writer, file_version="brain.Event:2")
        start = SessionLog(status=SessionLog.START)
        _write(self._writer, step=self._purge_step, session_log=start)
        _write(self._session_writer, file_version="brain.Event:2")
        self._start_session()
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if self._writer is not None:
            self._end_session(exc is None)
        self._stack.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars by tag, such as ``train/loss``, at a step."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        _write(self._writer, step=step, summary=summary)

    def _start_session(self) -> None:
        """Write the hyperparameters in the form of TensorBoard's plugin ``hparams``."""
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in self._hyperparameters.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, str):
                info.hparams[name].string_value = value
            else:
                info.hparams[name].number_value = value
        self._write_session(metadata.SESSION_START_INFO_TAG, session_start_info=info)

    def _end_session(self, is_success: bool) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if is_success else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        self._write_session(metadata.SESSION_END_INFO_TAG, session_end_info=info)

    def _write_session(self, tag: str, **info: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        content = plugin_data_pb2.HParamsPluginData(**info)
        value = Summary.Value(
            tag=tag,
            metadata=metadata.create_summary_metadata(content),
            tensor=metadata.NULL_TENSOR,
        )
        _write(self._session_writer, summary=Summary(value=[value]))


def _write(writer: Any, **fields: Any) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
    writer.flush()


def epoch_scalars(record: EpochMetrics) -> dict[str, float]:
    """Return the metrics of an epoch by tag, such as ``train/loss``."""
    return {f"{stage}/{name}": value for _, stage, name, value in record.rows()}
