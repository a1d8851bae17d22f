"""Progress of training on the driver: a live line per epoch, or log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from hvd_estimators.launch.events import Event, Handler, RankMessage, RankOutput, RankProgress
from hvd_estimators.launch.outlets import print_event

__all__ = ["show_progress"]

logger = logging.getLogger("hvd_estimators")


@contextlib.contextmanager
def show_progress(verbose: int) -> Iterator[Handler]:
    """Show what ranks report until the block ends. Runs on the driver.

    On a terminal rank 0's epochs are live bars; elsewhere each epoch is a log line of the logger
    ``hvd_estimators`` (level INFO), printed to standard error where logging is not configured.

    Parameters
    ----------
    verbose : int
        0 shows nothing but the lines that ranks print, if the backend is to show them.

    Yields
    ------
    callable
        What `Backend.run` takes as ``on_event``.
    """
    if verbose <= 0:
        yield print_event
        return
    shown = _Bars() if sys.stderr.isatty() else _Lines()

    def handle(event: Event) -> None:
        if isinstance(event, RankProgress):
            shown.show(event)
        elif isinstance(event, RankOutput):
            tqdm.write(event.text(), file=sys.stderr, end="")
        elif isinstance(event, RankMessage):
            tqdm.write(event.message, file=sys.stdout)

    with contextlib.closing(shown):
        yield handle


class _Bars:
    def __init__(self) -> None:
        self._bar: Any = None
        self._epoch = -1

    def show(self, event: RankProgress) -> None:
        if event.epoch != self._epoch:
            self.close()
            self._epoch = event.epoch
            self._bar = tqdm(
                total=event.steps,
                desc=f"Epoch {event.epoch + 1}/{event.epochs}",
                unit="step",
                file=sys.stderr,
            )
        self._bar.set_postfix_str(_describe(event), refresh=False)
        self._bar.update(event.step - self._bar.n)
        self._bar.refresh()
        if event.done:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Lines:
    def show(self, event: RankProgress) -> None:
        if not event.done:
            return
        line = f"Epoch {event.epoch + 1}/{event.epochs}: {_describe(event)}"
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def _describe(event: RankProgress) -> str:
    means = ", ".join(f"{name}={value:.4g}" for name, value in event.means.items())
    return f"{event.rows_per_second:,.0f} rows/s, {means}"
