"""Display of a fit: its stages before training, and its epochs.

Each finished stage and epoch is a line. On a terminal, a row below the lines changes in place: it
shows the current stage, or a bar of the training. In a notebook, rows of the cell do. Elsewhere,
there are only lines. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from tqdm import tqdm

from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.launch.service.events import (
    Event,
    Handler,
    LaunchStart,
    RankMessage,
    RankOutput,
    RankProgress,
)
from hvd_estimators.launch.service.output_sinks import print_event, write_text
from hvd_estimators.store.paths import Position
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)
_package_logger = logging.getLogger("hvd_estimators")

_REFRESH_SECONDS = 0.5
# Without a row that changes in place, a stage gets a line if it takes longer.
_LATE_SECONDS = 3.0
# Without such a row, a long epoch gets a line this often.
_LINE_SECONDS = 60.0
_BAR_COLUMNS = 100
# A rank reports short epochs only at their ends, so tqdm's rate would be meaningless.
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

_shown_lock = threading.Lock()
_shown: set[object] = set()
"""One object for each fit that is shown."""


class StageRow:
    """A stage of a fit, shown with the seconds since its start; used as a context manager.

    A thread refreshes the row, because the fit's thread waits.

    Parameters
    ----------
    doing : str
        The current work, such as ``"Writing training data"``.
    verbose : int
        0 shows nothing.
    fit : object, optional
        The display that the row is a part of. Default: none.

    Attributes
    ----------
    doing : str
        May be changed at any time, from any thread.
    """

    def __init__(self, doing: str, verbose: int = 1, fit: object = None) -> None:
        self.doing = doing
        self._started = time.monotonic()
        self._row = _row() if verbose > 0 else None
        self._ended = threading.Event()
        # A notebook assigns output to the cell in the context of the writing thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._refresh,), daemon=True)
        if self._row is not None:
            if fit is None:
                with _shown_lock:
                    _shown.add(self)
            self._thread.start()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the stage."""
        return time.monotonic() - self._started

    def finish(self, done: str) -> None:
        """End the stage and replace the row by a line that stays; do nothing if it has ended."""
        if self._end() and self._row is not None:
            self._row.finish(done)

    def close(self) -> None:
        """End the stage and remove the row, unless the stage has ended."""
        if self._end() and self._row is not None:
            self._row.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self) -> bool:
        """Stop the thread, and return whether this call ends the stage."""
        if self._row is None or self._ended.is_set():
            return False
        self._ended.set()
        self._thread.join()
        with _shown_lock:
            _shown.discard(self)
        return True

    def _refresh(self) -> None:
        assert self._row is not None
        while True:
            try:
                self._row.update(self.doing, self.seconds)
            except Exception:  # the stream may have been closed
                logger.debug("The progress of a fit is not shown", exc_info=True)
                return
            if self._ended.wait(_REFRESH_SECONDS):
                return


class _Row:
    """Lines for stages that take long. Subclasses have a row that changes in place."""

    is_live = False

    def __init__(self) -> None:
        self._doing = ""
        self._since = 0.0
        self._is_late = False

    def update(self, doing: str, seconds: float) -> None:
        """Show the current work and its duration."""
        if doing != self._doing:
            self._doing, self._since, self._is_late = doing, seconds, False
        if not self._is_late and seconds - self._since >= _LATE_SECONDS:
            self._is_late = True
            _write_line(f"{doing} ...")

    def set(self, text: str) -> None:
        """Show a text in the row, if there is one, instead of the text before."""

    def finish(self, done: str) -> None:
        """Replace the row by a line."""
        self.close()
        _write_line(done)

    def close(self) -> None:
        """Remove the row."""


class _TerminalRow(_Row):
    is_live = True

    def update(self, doing: str, seconds: float) -> None:
        self.set(f"{doing} ({seconds:.0f} s)")

    def set(self, text: str) -> None:
        with _shown_lock:
            if len(_shown) > 1:
                return  # rows of several fits would overwrite each other
        width = shutil.get_terminal_size().columns - 1
        # With the cursor at the start of the row, other output replaces the row.
        write_text(sys.stderr, f"\r{text[:width]}\x1b[K\r")

    def close(self) -> None:
        write_text(sys.stderr, "\r\x1b[K")


class _NotebookRow(_Row):
    is_live = True

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._text = ""

    def update(self, doing: str, seconds: float) -> None:
        self.set(f"{doing} ({seconds:.0f} s)")

    def set(self, text: str) -> None:
        from IPython.display import display

        if text == self._text:
            return
        self._text, data = text, {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def finish(self, done: str) -> None:
        self.set(done)


def _row() -> _Row:
    if in_notebook():
        return _NotebookRow()
    return _TerminalRow() if sys.stderr.isatty() else _Row()


def in_notebook() -> bool:
    """Return whether this process is a notebook kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def describe_rows(manifest: DatasetManifest) -> str:
    """Return the numbers of rows of a dataset in words."""
    rows = f"{manifest.train.rows:,} training"
    if manifest.validation is not None:
        rows += f" and {manifest.validation.rows:,} validation"
    return f"{rows} rows"


def format_size(num_bytes: int) -> str:
    """Return a size such as ``12.5 MB``."""
    prefixes = ("", "k", "M", "G", "T", "P")
    power = min(int(math.log10(max(num_bytes, 1))) // 3, len(prefixes) - 1)
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {prefixes[power]}B"


def show_collectives(num_ranks: int, uses_horovod: bool) -> None:
    """Show a line with the library that averages the gradients of several processes."""
    if num_ranks > 1:
        library = "Horovod" if uses_horovod else "torch.distributed"
        _write_line(f"{num_ranks} processes average gradients with {library}.")


def show_learning_rates(rates: Sequence[float], scale: int) -> None:
    """Show a line with the learning rates that training uses.

    Parameters
    ----------
    rates : sequence of float
        The optimizers' rates, for one process. Empty if the driver does not know them.
    scale : int
        The factor by which training multiplies the rates.
    """
    known = list(dict.fromkeys(rates))
    title = "Learning rate" if len(known) == 1 else "Learning rates"
    listed = ", ".join(f"{rate:g}" for rate in known)
    if scale > 1:
        used = ", ".join(f"{rate * scale:g}" for rate in known)
        product = f"{listed} x {scale} processes = {used}" if known else f"times {scale} processes"
        kept = listed or "the rates of one process"
        _write_line(f"{title} {product}; scale_learning_rate=False keeps {kept}.")
    elif known:
        _write_line(f"{title} {listed}.")


@contextlib.contextmanager
def show_progress(spec: TrainSpec, newest: Position | None = None) -> Iterator[Handler]:
    """Show the launch and the ranks' reports until the block ends.

    Each finished epoch is a line. On a terminal and in a notebook, a bar shows the progress of the
    run. Elsewhere, each minute of an epoch is a line, too. Lines are of the cell, or log lines of
    the logger ``hvd_estimators`` (level INFO), or on standard error if logging is not configured.
    If several fits run at once, each shows its run's name, and a terminal has no bar.

    Parameters
    ----------
    spec : TrainSpec
        The training job. With ``verbose`` 0, only messages of ranks are shown, and their printed
        lines if the backend shows them.
    newest : Position, optional
        The checkpoint that the run resumes from. A line reports it.

    Yields
    ------
    callable
        Handler for the ``on_event`` argument of `Backend.run`.
    """
    # The ranks' events arrive in other threads. A notebook needs the context of the cell's thread.
    context = contextvars.copy_context()
    losses = _Losses(spec.run.run_id)
    if spec.verbose <= 0:

        def handle_quietly(event: Event) -> None:
            if isinstance(event, RankProgress):
                losses.add(event)
            print_event(event)

        yield lambda event: context.copy().run(handle_quietly, event)
        return
    if newest is not None:
        _write_line(_resuming(spec, newest))
    with contextlib.closing(_Display(spec)) as shown:

        def handle(event: Event) -> None:
            if isinstance(event, LaunchStart):
                shown.launch(event.num_ranks)
            elif isinstance(event, RankProgress):
                shown.finish_launch()
                shown.show(event)
                losses.add(event)
            elif isinstance(event, RankOutput):
                _write(event.text(), sys.stderr)
            elif isinstance(event, RankMessage):
                _write(f"{event.message}\n", sys.stdout)

        yield lambda event: context.copy().run(handle, event)
        shown.finish_launch()


def _write(text: str, file: Any) -> None:
    """Write lines above the row that changes."""
    if _shown and file.isatty() and sys.stderr.isatty():
        write_text(sys.stderr, "\r\x1b[K")
    write_text(file, text)


class _Display:
    """Display of one fit's launches and epochs."""

    _launch: StageRow
    _num_ranks: int

    def __init__(self, spec: TrainSpec) -> None:
        self._name = spec.run.run_id
        self._has_name = False
        self._is_launched = False
        self._row = _row()
        self._total = spec.epochs * spec.data.train_steps_per_epoch
        self._first: tuple[float, int] | None = None
        self._next_line = time.monotonic() + _LINE_SECONDS
        self._lock = threading.Lock()
        with _shown_lock:
            _shown.add(self)
        self._start_launch(spec.data.num_ranks)

    def close(self) -> None:
        """Remove all rows that change."""
        with self._lock:
            self._launch.close()
        self._row.close()
        with _shown_lock:
            _shown.discard(self)

    def launch(self, num_ranks: int) -> None:
        """Show a launch; the row of the first one is there already."""
        with self._lock:
            if self._is_launched:
                self._launch.close()
                self._start_launch(num_ranks)
            self._is_launched = True

    def finish_launch(self) -> None:
        """Replace the launch's row by a line, unless it has been replaced."""
        with self._lock:
            seconds = self._launch.seconds
            started = f"Started {_processes(self._num_ranks)} in {seconds:.1f} s."
            self._launch.finish(self._titled(started))

    def show(self, event: RankProgress) -> None:
        """Show the progress of an epoch."""
        now, title = time.monotonic(), self._titled(f"Epoch {event.epoch + 1}/{event.epochs}")
        if event.done:
            self._row.close()
            _write_line(f"{title}: {_describe(event)}")
            self._next_line = now + _LINE_SECONDS
        elif now >= self._next_line and not self._row.is_live:
            _write_line(f"{title}: step {event.step:,} of {event.steps:,}, {_describe(event)}")
            self._next_line = now + _LINE_SECONDS
        if self._row.is_live:
            self._row.set(self._bar(event, title, now))

    def _bar(self, event: RankProgress, title: str, now: float) -> str:
        """Return a bar of all epochs, with the time that the rest of them takes."""
        done = event.epoch * event.steps + event.step
        # A resumed run does not start at 0.
        self._first = self._first or (now, done - event.step)
        started, initial = self._first
        return tqdm.format_meter(
            done,
            self._total,
            now - started,
            ncols=min(shutil.get_terminal_size().columns - 1, _BAR_COLUMNS),
            prefix=title,
            postfix=_describe(event),
            initial=initial,
            bar_format=_BAR_FORMAT,
        )

    def _start_launch(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._launch = StageRow(self._titled(f"Starting {_processes(num_ranks)}"), fit=self)

    def _titled(self, text: str) -> str:
        with _shown_lock:
            # Once shown, the name stays. Otherwise the bar would shift sideways.
            self._has_name = self._has_name or len(_shown) > 1
        return f"{self._name}, {text}" if self._has_name else text


def _write_line(line: str) -> None:
    if in_notebook():
        _write(f"{line}\n", sys.stdout)
    elif _package_logger.isEnabledFor(logging.INFO) and _package_logger.hasHandlers():
        _package_logger.info(line)
    else:
        _write(f"{line}\n", sys.stderr)


def _processes(num_ranks: int) -> str:
    return f"{num_ranks} process{'es' if num_ranks > 1 else ''}"


def _resuming(spec: TrainSpec, newest: Position) -> str:
    """Return the line that reports the position at which a run resumes."""
    name = spec.run.run_id
    if newest.epoch >= spec.epochs:
        return f"Run {name!r} is complete; returning its model."
    steps = spec.data.batches_before(newest.epoch, newest.rows)
    within = f", after step {steps:,}" if newest.rows else ""
    return f"Resuming run {name!r} at epoch {newest.epoch + 1} of {spec.epochs}{within}."


def _describe(event: RankProgress) -> str:
    means = ", ".join(f"{name}={value:.4g}" for name, value in event.means.items())
    return f"{event.rows_per_second:,.0f} rows/s, {means}"


class _Losses:
    """One warning per fit, for the first loss that is NaN or infinite."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._has_warned = False

    def add(self, event: RankProgress) -> None:
        loss = event.means.get("loss")
        if self._has_warned or loss is None or math.isfinite(loss):
            return
        self._has_warned = True
        logger.warning(
            "Run %r: the loss of epoch %d is %s. Look for NaN in the columns: check_finite=True "
            "rejects it before training. terminate_on_nan=True ends training at the first such "
            "step. docs/bad_loss.rst has more causes.",
            self._run_id,
            event.epoch + 1,
            loss,
        )
