"""Which prepared datasets this application has, and who uses them: each is written once.

Runs on the driver.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Hashable, Iterator

from hvd_estimators.prepare.catalog import PreparedDataset, stored_datasets
from hvd_estimators.prepare.lineage import SourcePlan
from hvd_estimators.prepare.owners import mark
from hvd_estimators.prepare.registry import KEPT_DATASETS, Loan, Registry, delete_orphans
from hvd_estimators.store import Store

__all__ = [
    "KEPT_DATASETS",
    "clear_prepared_data",
    "clear_training_cache",
    "hold",
    "lend",
    "store_of",
]

_registry = Registry()
_process = os.getpid()


@atexit.register
def _end() -> None:
    # A forked process ends without taking its parent's data with it.
    if os.getpid() == _process:
        _registry.end()


@contextlib.contextmanager
def lend(
    store: Store, source: SourcePlan | None, options: Hashable, write: Callable[[str], None]
) -> Iterator[str]:
    """Yield the index of a dataset that is there until the block ends, written only if need be.

    Of several threads that ask for the same, one writes and the others wait for it. If it fails,
    its own thread gets the error, and the next one writes.

    Parameters
    ----------
    store : Store
        Where the dataset lies.
    source : SourcePlan or None
        What tells whether two DataFrames hold the same rows; None: the dataset is for this block
        alone, and deleted at its end.
    options : hashable
        Everything else that decides what is written, and where.
    write : callable
        ``write(index)`` writes the dataset.
    """
    loan = Loan()
    try:
        entry = _registry.take(loan, store, source, options)
        if not entry.written:
            delete_orphans(store)
            mark(store, entry.index)
            write(entry.index)
            _registry.written(entry)
        yield entry.index
    finally:
        loan.over = True
        _registry.give_back(loan)


@contextlib.contextmanager
def hold(index: str) -> Iterator[None]:
    """Keep a dataset, whoever wrote it, from being deleted by this process until a block ends."""
    loan = Loan()
    try:
        _registry.hold(loan, index)
        yield
    finally:
        loan.over = True
        _registry.give_back(loan)


def store_of(index: str) -> Store | None:
    """Return where a dataset of this application lies; None if it has none of that name."""
    return _registry.store_of(index)


def clear_prepared_data(
    store: Store, dataset_idx: str | None = None, force: bool = False
) -> list[PreparedDataset]:
    """Delete prepared datasets that are not in use. Runs on the driver.

    Applications that run are left theirs: deleted is what this one wrote and does not use, and
    what processes of this machine left that are dead. Of other machines it cannot be told whether
    theirs are dead.

    Parameters
    ----------
    store : Store
        Where `prepare_data` wrote.
    dataset_idx : str, optional
        The only one to delete, whoever wrote it, if this process does not use it. Default: all.
    force : bool
        Delete those of other applications, too. Make sure that none of them runs.

    Returns
    -------
    list of PreparedDataset
        What was deleted; what a killed writer left has 0 rows.
    """
    datasets = [d for d in stored_datasets(store) if dataset_idx in (None, d.index)]
    chosen = [(store, dataset.index) for dataset in datasets]
    deleted = set(_registry.clear(chosen, force or dataset_idx is not None))
    return [dataset for dataset in datasets if dataset.index in deleted]


def clear_training_cache() -> None:
    """Delete the prepared datasets of this application that are not in use, in all stores.

    The name is that of ``horovod.spark.common.util``. Runs on the driver.
    """
    _registry.clear_own()
