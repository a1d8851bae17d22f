"""Progress of training on the driver: a live bar, or log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from hvd_estimators.launch.events.outlets import print_event, write_text
from hvd_estimators.launch.events.stream import (
    Event,
    Handler,
    RankMessage,
    RankOutput,
    RankProgress,
)
from hvd_estimators.store.checkpoint_names import Position
from hvd_estimators.training.spec import TrainSpec

__all__ = ["show_progress"]

logger = logging.getLogger("hvd_estimators")

_shown_lock = threading.Lock()
_shown: set[object] = set()


@contextlib.contextmanager
def show_progress(spec: TrainSpec, newest: Position | None = None) -> Iterator[Handler]:
    """Show what ranks report until the block ends. Runs on the driver.

    In a notebook the fit is a live bar, on a terminal each epoch is one; elsewhere each epoch is a
    log line of the logger ``hvd_estimators`` (level INFO), printed to standard error where logging
    is not configured. Where several fits run at once each tells its run's name.

    Parameters
    ----------
    spec : TrainSpec
        The training job; ``verbose`` 0 shows nothing but messages of ranks, and the lines that
        they print if the backend is to show them.
    newest : Position, optional
        The checkpoint that the run resumes from. A line names it.

    Yields
    ------
    callable
        What `Backend.run` takes as ``on_event``.
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
    """Write lines above the bars that there are."""
    with tqdm.external_write_mode(file=file):
        write_text(file, text)


def _display(spec: TrainSpec) -> _Display:
    if _is_notebook():
        return _FitBar(spec)
    return _EpochBars(spec) if sys.stderr.isatty() else _Lines(spec)


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class _Display:
    """Shows one fit."""

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
            # Once it is told it stays, since a bar's beginning would jump.
            self._has_name = self._has_name or len(_shown) > 1
        title = f"Epoch {epoch + 1}/{epochs}"
        return f"{self._name}, {title}" if self._has_name else title


class _FitBar(_Display):
    """One bar for all epochs.

    It is made by the thread that calls ``fit``: a notebook shows what another thread makes under
    whichever cell runs, or nowhere.
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
            # A run that is gone on with does not begin at 0, and ranks take a while to start.
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
    """One bar after the other."""

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
            # Left where it is, it would mix with those of other fits, which move up.
            last = str(self._bar)
            self._bar.leave = False
            self._bar.close()
            self._bar = None
            _write(f"\r{last}\n", sys.stderr)


class _Lines(_Display):
    """A line per epoch."""

    def show(self, event: RankProgress) -> None:
        if not event.done:
            return
        _write_line(f"{self._title(event.epoch, event.epochs)}: {_describe(event)}")


def _write_line(line: str) -> None:
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    else:
        _write(f"{line}\n", sys.stderr)


def _resuming(spec: TrainSpec, newest: Position) -> str:
    """Return the line that says where a run resumes."""
    name = spec.run.run_id
    if newest.epoch >= spec.epochs:
        return f"Run {name!r} is complete; returning its model."
    steps = spec.data.batches_before(newest.epoch, newest.rows)
    within = f", after step {steps:,}" if newest.rows else ""
    return f"Resuming run {name!r} at epoch {newest.epoch + 1} of {spec.epochs}{within}."


def _describe(event: RankProgress) -> str:
    means = ", ".join(f"{name}={value:.4g}" for name, value in event.means.items())
    return f"{event.rows_per_second:,.0f} rows/s, {means}"
