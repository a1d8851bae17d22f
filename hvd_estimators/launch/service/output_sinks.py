"""Destinations of the ranks' output and messages on the driver."""

from __future__ import annotations

import io
import logging
import sys
import time
from dataclasses import replace
from typing import Any, TextIO

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.service.events import Event, Handler, RankMessage, RankOutput

logger = logging.getLogger(__name__)


def print_event(event: Event) -> None:
    """Print messages to standard output and output lines to standard error; ignore other events."""
    if isinstance(event, RankOutput):
        write_text(sys.stderr, event.text())
    elif isinstance(event, RankMessage):
        write_text(sys.stdout, f"{event.message}\n")


def write_text(file: TextIO, text: str) -> None:
    """Write to a stream and flush it; escape characters that the stream's encoding lacks."""
    # A single write, so that lines of several ranks do not mix.
    try:
        file.write(text)
    except UnicodeEncodeError:
        file.write(text.encode("ascii", "backslashreplace").decode())
    flush = getattr(file, "flush", None)
    if flush is not None:
        flush()


class Outlets:
    """Output settings of a backend's ranks.

    Parameters
    ----------
    stdout, stderr : file-like, optional
        Destinations of the ranks' standard output and standard error. If either is given, ranks
        have a separate pipe for each stream.
    prefix_output_with_timestamp : bool
        Whether each line starts with its time of arrival.
    verbose : int
        2 or more also reports the lines for which no file is given.

    Raises
    ------
    ParamError
        If a file does not accept text, or ``verbose`` is not an integer.
    """

    def __init__(
        self, stdout: Any, stderr: Any, prefix_output_with_timestamp: bool, verbose: int
    ) -> None:
        if not isinstance(verbose, int):
            raise ParamError(f"verbose: expected a whole number, such as 1, found {verbose!r}.")
        given = {"stdout": stdout, "stderr": stderr}
        self._files = {
            name: _text_file(name, file) for name, file in given.items() if file is not None
        }
        self._has_time = bool(prefix_output_with_timestamp)
        self.are_separate = bool(self._files)
        """True if ranks have a separate pipe for each of the two streams."""
        streams = tuple(given) if self.are_separate else ("",)
        self.streams = tuple(s for s in streams if verbose >= 2 or s in self._files)
        """Names of the streams that the driver needs; an empty name means both streams as one."""

    def handler(self, on_event: Handler | None) -> Handler:
        """Return an event handler that writes lines to their files.

        Parameters
        ----------
        on_event : callable, optional
            Called with all other events. Default: `print_event`.
        """
        files = dict(self._files)
        handle_other = on_event or print_event

        def handle(event: Event) -> None:
            if not isinstance(event, RankOutput):
                handle_other(event)
                return
            if self._has_time:
                event = replace(event, time=time.time())
            if event.stream not in self._files:
                handle_other(event)
            elif event.stream in files:
                try:
                    write_text(files[event.stream], event.text())
                except Exception:
                    # The disk may be full, or the file closed. Warn only once.
                    del files[event.stream]
                    logger.warning("%s: cannot be written to", event.stream, exc_info=True)

        return handle


def _text_file(name: str, file: Any) -> Any:
    if not callable(getattr(file, "write", None)):
        raise ParamError(
            f"{name}: expected an open text file, such as sys.{name} or open(path, 'w'), found "
            f"{file!r}."
        )
    if isinstance(file, (io.RawIOBase, io.BufferedIOBase)):
        raise ParamError(f"{name}: expected a file opened for text, found {file!r}.")
    return file
