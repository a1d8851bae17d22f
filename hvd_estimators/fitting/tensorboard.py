"""Logger to TensorBoard's event files, written without TensorFlow. Runs on the driver.

TensorBoard's own file writer imports TensorFlow if that is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_estimators.loggers import LoggedRun, Logger
from hvd_estimators.store.base import Store
from hvd_estimators.store.synced_directory import SyncedDirectory

logger = logging.getLogger(__name__)

_SESSION_FILE = "events.out.tfevents.0.hyperparameters"
"""File of the newest part of a run. TensorBoard shows the first values that it reads."""

_RATES = ("learning_rate", "rows_per_second")


class TensorBoardLogger(Logger):
    """Logger of scalars and hyperparameters to a run's logs in the store, from the first epoch on.

    A fit that fails before then changes no file. TensorBoard hides scalars of this epoch and later
    ones that an interrupted part of the run has written. Nothing is written if the package
    ``tensorboard`` is not installed.

    Parameters
    ----------
    store : Store
        The store of the run.
    path : str
        The directory of the run's logs.
    only_rates : bool
        Log no losses and metrics, because a callback of the user writes them.
    """

    def __init__(self, store: Store, path: str, only_rates: bool = False) -> None:
        # Files of an earlier part have other names.
        self._directory = SyncedDirectory(store, path, fetch=False)
        self._only_rates = only_rates
        self._stack = contextlib.ExitStack()
        self._run: LoggedRun | None = None
        self._writer: Any = None
        self._session_writer: Any = None

    def start(self, run: LoggedRun) -> None:
        """Look for the package ``tensorboard``."""
        if importlib.util.find_spec("tensorboard") is None:
            logger.info("No TensorBoard logs: the tensorboard package is not installed.")
        else:
            self._run = run

    def _open(self, run: LoggedRun) -> None:
        """Open the files, and write the run's hyperparameters."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        with contextlib.ExitStack() as stack:
            directory = Path(str(stack.enter_context(self._directory).path))
            directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            session_file = directory / _SESSION_FILE
            # A new file, because a reader may have the old one open.
            session_file.unlink(missing_ok=True)
            self._writer, self._session_writer = (
                RecordWriter(stack.enter_context(open(path, "ab")))
                for path in (directory / name, session_file)
            )
            self._stack = stack.pop_all()
        _write(self._writer, file_version="brain.Event:2")
        # As the argument purge_step of torch's SummaryWriter.
        _write(self._writer, step=run.epoch, session_log=SessionLog(status=SessionLog.START))
        _write(self._session_writer, file_version="brain.Event:2")
        self._start_session(run.hyperparameters)

    def log_metrics(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Write scalars with tags such as ``train/loss``."""
        if self._run is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._open(self._run)
        values = [
            Summary.Value(tag=_tag(name), simple_value=value)
            for name, value in metrics.items()
            if not self._only_rates or name.startswith(_RATES)
        ]
        _write(self._writer, step=epoch, summary=Summary(value=values))
        self._directory.sync()

    def finish(self, status: str) -> None:
        """Write how the run ended, and close the files."""
        if self._session_writer is not None:
            self._end_session(status == "finished")
        self._stack.close()

    def _start_session(self, hyperparameters: Mapping[str, bool | int | float | str]) -> None:
        """Write the hyperparameters in the form of TensorBoard's plugin ``hparams``."""
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in hyperparameters.items():
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
            tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR
        )
        _write(self._session_writer, summary=Summary(value=[value]))


def _write(writer: Any, **fields: Any) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
    writer.flush()


def _tag(name: str) -> str:
    """Return the tag of a metric, whose part before the slash is the stage."""
    if name.startswith(_RATES):
        return name
    is_validation = name.startswith("val_")
    return f"validation/{name.removeprefix('val_')}" if is_validation else f"train/{name}"
