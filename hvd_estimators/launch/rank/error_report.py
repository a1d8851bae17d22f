"""An exception of a rank, in the words that its user needs first."""

from __future__ import annotations

import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

from hvd_estimators.launch.rank.output import shortened

__all__ = ["ErrorReport", "fold_frames", "report_error"]

_OWN = str(Path(__file__).parents[2])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_FOLDED = tuple(f"{path}/{name}/" for path in _LIBRARIES for name in ("pyspark", "py4j"))
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+)')


@dataclass(frozen=True)
class ErrorReport:
    """An exception as text; crosses from a rank to the driver.

    Attributes
    ----------
    error_type : str
        The exception's class.
    headline : str
        One line: class, message, and the user's file and line where the exception passed last.
    traceback : str
        The traceback, without the frames of this package, PySpark and Py4J.
    full_traceback : str
        The traceback with all frames. Both are bounded.
    """

    error_type: str
    headline: str
    traceback: str
    full_traceback: str


def report_error(error: BaseException) -> ErrorReport:
    """Describe an exception that was caught."""
    message = (str(error).splitlines() or [""])[0]
    name = type(error).__name__
    headline = shortened(f"{name}: {message}" if message else name, 1000)
    frame = _users_frame(traceback.extract_tb(error.__traceback__))
    where = f" ({frame.filename}:{frame.lineno}, in {frame.name})" if frame else ""
    # A message may hold a whole batch, or model.
    full = shortened("".join(traceback.format_exception(error)))
    return ErrorReport(name, f"{headline}{where}", fold_frames(full), full)


def fold_frames(text: str) -> str:
    """Replace the frames of this package, PySpark and Py4J in a traceback by their number."""
    kept: list[str] = []
    folded = 0
    in_folded = False

    def note() -> None:
        nonlocal folded
        if folded:
            kept.append(f"  [frames of hvd_estimators or PySpark: {folded}]")
        folded = 0

    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            in_folded = frame["file"].startswith((f"{_OWN}/", *_FOLDED))
            folded += in_folded
            if not in_folded:
                note()
        elif not line.startswith("    "):
            in_folded = False
            note()
        if not in_folded:
            kept.append(line)
    note()
    return "\n".join(kept) + "\n"


def _users_frame(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the innermost frame that is neither this package's nor an installed one's."""
    for frame in reversed(stack):
        is_library = frame.filename.startswith((f"{_OWN}/", *(f"{path}/" for path in _LIBRARIES)))
        if not is_library and not frame.filename.startswith("<frozen "):
            return frame
    return None
