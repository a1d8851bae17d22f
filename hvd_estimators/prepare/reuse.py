"""The prepared datasets of this application: each is written once and shared by its users.

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
    # A forked process must not delete its parent's data when it ends.
    if os.getpid() == _process:
        _registry.end()


@contextlib.contextmanager
def lend(
    store: Store, source: SourcePlan | None, options: Hashable, write: Callable[[str], None]
) -> Iterator[str]:
    """Yield the index of a dataset that exists until the block ends. It is written only if needed.

    If several threads ask for the same dataset, one of them writes it while the others wait. If
    that fails, the writing thread gets the error, and the next thread writes.

    Parameters
    ----------
    store : Store
        Where the dataset is kept.
    source : SourcePlan or None
        Tells whether two DataFrames hold the same rows. With None, the dataset is for this block
        alone and is deleted at its end.
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
    """Return the store of one of this application's datasets; None if unknown."""
    return _registry.store_of(index)


def clear_prepared_data(
    store: Store, dataset_idx: str | None = None, force: bool = False
) -> list[PreparedDataset]:
    """Delete prepared datasets that are not in use. Runs on the driver.

    This deletes what this application wrote and no longer uses, and what dead processes of this
    machine left behind. The data of other applications that are running is kept, and so is all data
    from other machines, since nothing tells whether its writers are dead.

    Parameters
    ----------
    store : Store
        Where `prepare_data` wrote.
    dataset_idx : str, optional
        The only one to delete, whoever wrote it, if this process does not use it. Default: all.
    force : bool
        Also delete the data of other applications. Make sure that none of them is running.

    Returns
    -------
    list of PreparedDataset
        What was deleted; what a killed writer left behind has 0 rows.
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
