"""The prepared datasets of this application: each is written once and shared by its users.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator

from hvd_estimators.prepare.catalog import PreparedDataset, stored_datasets
from hvd_estimators.prepare.lineage import SourcePlan
from hvd_estimators.prepare.registry import KEPT_DATASETS, Loan, Registry, delete_orphans
from hvd_estimators.store import Store
from hvd_estimators.store.claims import Heartbeat
from hvd_estimators.store.exiting import at_exit

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


def _end() -> None:
    # A forked process must not delete its parent's data when it ends.
    if os.getpid() == _process:
        _registry.end()


at_exit(_end)


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
            entry.heartbeat.start()
            write(entry.index)
            _registry.written(entry)
        yield entry.index
    finally:
        loan.over = True
        _registry.give_back(loan)


@contextlib.contextmanager
def hold(store: Store, index: str) -> Iterator[None]:
    """Keep a dataset, whoever wrote it, from being deleted until a block ends.

    Neither by this process nor by others: a file beside the dataset tells them.
    """
    loan = Loan()
    heartbeat: Heartbeat | None = None
    try:
        heartbeat = _registry.hold(loan, store, index)
        if heartbeat is not None:
            heartbeat.start()
        yield
    finally:
        loan.over = True
        _registry.give_back(loan)
        if heartbeat is not None:
            heartbeat.stop()


def store_of(index: str) -> Store | None:
    """Return the store of one of this application's datasets; None if unknown."""
    return _registry.store_of(index)


def clear_prepared_data(
    store: Store, dataset_idx: str | None = None, force: bool = False
) -> list[PreparedDataset]:
    """Delete prepared datasets that are not in use. Runs on the driver.

    This deletes what this application wrote and no longer uses, and what applications left behind
    that are gone: on this machine as soon as their process has ended, on other machines when they
    have given no sign of life for five minutes (they do so every 30 seconds). The data of
    applications that are running is kept, and so is what a running application trains on by
    ``fit_on_parquet(dataset_idx=…)``, whoever wrote it.

    Parameters
    ----------
    store : Store
        Where `prepare_data` wrote.
    dataset_idx : str, optional
        The only one to delete, whoever wrote it, unless this process or one that only reads it
        uses it. Default: all.
    force : bool
        Also delete the data of other applications that are running, and what they read.

    Returns
    -------
    list of PreparedDataset
        What was deleted; what a killed writer left behind has 0 rows.
    """
    datasets = [d for d in stored_datasets(store) if dataset_idx in (None, d.index)]
    chosen = [(store, dataset.index) for dataset in datasets]
    all_owners = force or dataset_idx is not None
    deleted = set(_registry.clear(chosen, all_owners=all_owners, force=force))
    return [dataset for dataset in datasets if dataset.index in deleted]


def clear_training_cache() -> None:
    """Delete the prepared datasets of this application that are not in use, in all stores.

    The name is that of ``horovod.spark.common.util``. Runs on the driver.
    """
    _registry.clear_own()
