"""Lightning's log lines that ranks, and checks on the driver, do not print."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from hvd_estimators.lightning.flavor import FLAVORS

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet(verbose: int = 0) -> Iterator[None]:
    """Silence Lightning's advertisements, and below ``verbose=2`` its notes on hardware.

    Both of Lightning's packages log through the one that is imported last, and an import sets the
    level of a package. Therefore the loggers of both get filters.
    """
    packages = [name for flavor in FLAVORS for name in (flavor.name, flavor.fabric)]
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in packages]

    def is_shown(record: logging.LogRecord) -> bool:
        is_tip = str(record.msg).startswith("💡 Tip:")
        return record.levelno >= logging.ERROR or (verbose >= 2 and not is_tip)

    for log in loggers:
        log.addFilter(is_shown)
    try:
        yield
    finally:
        for log in loggers:
            log.removeFilter(is_shown)
