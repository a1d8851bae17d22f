"""Display of training progress: a live bar, or log lines.

The driver handles the ranks' events one by one. `EpochFeed` therefore passes metrics to slow stores
and servers in another thread, so that they delay neither the display nor the ranks. Runs on the
driver.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from hvd_estimators.launch.service.events import (
    Event,
    Handler,
    RankMessage,
    RankOutput,
    RankProgress,
)
from hvd_estimators.launch.service.output_sinks import print_event, write_text
from hvd_estimators.store.paths import Position
from hvd_estimators.store.redaction import redacted
from hvd_estimators.training.spec import HistoryRow, TrainSpec

logger = logging.getLogger(__name__)


_SECONDS_BETWEEN = 1.0


class EpochFeed:
    """Background thread that passes history rows to a slow consumer.

    Rows of several epochs are passed together if they have accumulated. If the consumer raises, the
    rows are dropped. The first failure is logged as a warning.

    Parameters
    ----------
    consume : callable
        The consumer. It gets rows, with all rows of an epoch together, from another thread.
    name : str
        Name of the consumer, for the warning.
    """

    def __init__(self, consume: Callable[[Sequence[HistoryRow]], None], name: str) -> None:
        self._consume = consume
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[Sequence[HistoryRow]] = []
        self._is_closed = False
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def put(self, rows: Sequence[HistoryRow]) -> None:
        """Queue the rows of an epoch, or no rows to call the consumer, without blocking."""
        with self._changed:
            self._waiting.append(rows)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float | None = None) -> bool:
        """Pass on the waiting rows and stop the thread.

        Parameters
        ----------
        seconds : float, optional
            Maximum time to wait. Default: no limit.

        Returns
        -------
        bool
            Whether the thread has ended.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                epochs, self._waiting = self._waiting, []
                is_last = self._is_closed
            if epochs:
                self._pass_on([row for rows in epochs for row in rows])
            if is_last:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _SECONDS_BETWEEN)

    def _pass_on(self, rows: Sequence[HistoryRow]) -> None:
        try:
            self._consume(rows)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: metrics could not be written (%s: %s). They are written later if "
                    "possible; training continues.",
                    self._name,
                    type(error).__name__,
                    redacted(str(error)),
                )


_package_logger = logging.getLogger("hvd_estimators")


_shown_lock = threading.Lock()


_shown: set[object] = set()


@contextlib.contextmanager
def show_progress(spec: TrainSpec, newest: Position | None = None) -> Iterator[Handler]:
    """Show the ranks' reports until the block ends.

    In a notebook, a live bar shows the fit. On a terminal, each epoch has a live bar. Elsewhere,
    each epoch is a log line of the logger ``hvd_estimators`` (level INFO), or a line on standard
    error if logging is not configured. If several fits run at once, each shows its run's name.

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
    if spec.verbose <= 0:
        yield print_event
        return
    if newest is not None:
        _write_line(_resuming(spec, newest))
    with contextlib.closing(_display(spec)) as shown:

        def handle(event: Event) -> None:
            if isinstance(event, RankProgress):
                shown.show(event)
            elif isinstance(event, RankOutput):
                _write(event.text(), sys.stderr)
            elif isinstance(event, RankMessage):
                _write(f"{event.message}\n", sys.stdout)

        yield handle


def _write(text: str, file: Any) -> None:
    """Write lines above the active bars."""
    with tqdm.external_write_mode(file=file):
        write_text(file, text)


def _display(spec: TrainSpec) -> _Display:
    if _is_notebook():
        return _FitBar(spec)
    return _EpochBars(spec) if sys.stderr.isatty() else _Lines(spec)


def _is_notebook() -> bool:
    """Return whether this process is a notebook kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class _Display:
    """Display of one fit."""

    def __init__(self, spec: TrainSpec) -> None:
        self._name = spec.run.run_id
        self._has_name = False
        with _shown_lock:
            _shown.add(self)

    def close(self) -> None:
        with _shown_lock:
            _shown.discard(self)

    def show(self, event: RankProgress) -> None:
        raise NotImplementedError

    def _title(self, epoch: int, epochs: int) -> str:
        with _shown_lock:
            # Once shown, the name stays. Otherwise the bar would shift sideways.
            self._has_name = self._has_name or len(_shown) > 1
        title = f"Epoch {epoch + 1}/{epochs}"
        return f"{self._name}, {title}" if self._has_name else title


class _FitBar(_Display):
    """One bar for all epochs.

    The thread that calls ``fit`` must create the bar. A notebook shows the output of other threads
    under whichever cell is running, or not at all.
    """

    def __init__(self, spec: TrainSpec) -> None:
        super().__init__(spec)
        steps = spec.data.train_steps_per_epoch
        self._bar: Any = tqdm(
            total=spec.epochs * steps, desc=self._title(0, spec.epochs), unit="step"
        )
        self._steps = steps
        self._started = False

    def show(self, event: RankProgress) -> None:
        done = event.epoch * self._steps + event.step
        if not self._started:
            self._started = True
            # A resumed run does not start at 0, and the ranks' start-up time must not count.
            self._bar.reset(self._bar.total)
            self._bar.initial = self._bar.n = self._bar.last_print_n = event.epoch * self._steps
        self._bar.set_description(self._title(event.epoch, event.epochs), refresh=False)
        self._bar.set_postfix_str(_describe(event), refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        super().close()
        self._bar.close()


class _EpochBars(_Display):
    """One bar per epoch."""

    def __init__(self, spec: TrainSpec) -> None:
        super().__init__(spec)
        self._bar: Any = None
        self._epoch = -1

    def show(self, event: RankProgress) -> None:
        if event.epoch != self._epoch:
            self._close_bar()
            self._epoch = event.epoch
            self._bar = tqdm(
                total=event.steps,
                desc=self._title(event.epoch, event.epochs),
                unit="step",
                file=sys.stderr,
            )
        self._bar.set_postfix_str(_describe(event), refresh=False)
        self._bar.update(event.step - self._bar.n)
        self._bar.refresh()
        if event.done:
            self._close_bar()

    def close(self) -> None:
        super().close()
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            # A bar left in place would mix with the bars of other fits, which move up.
            last = str(self._bar)
            self._bar.leave = False
            self._bar.close()
            self._bar = None
            _write(f"\r{last}\n", sys.stderr)


class _Lines(_Display):
    """One line per epoch."""

    def show(self, event: RankProgress) -> None:
        if not event.done:
            return
        _write_line(f"{self._title(event.epoch, event.epochs)}: {_describe(event)}")


def _write_line(line: str) -> None:
    if _package_logger.isEnabledFor(logging.INFO) and _package_logger.hasHandlers():
        _package_logger.info(line)
    else:
        _write(f"{line}\n", sys.stderr)


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
