"""What the order of an epoch's rows depends on beside what a run is of. Runs on the driver.

A fit may read with other settings than an earlier one of its run, from an epoch's beginning on.
Within an epoch it must not: rows that were read before would be read again, and others never.
"""

from __future__ import annotations

import logging
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.runs import FoundRun, as_json, differences, digest, named
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.store.checkpoints import checkpoint_path

__all__ = ["check_reading", "reading_identity"]

logger = logging.getLogger(__name__)


def reading_identity(data: DataSpec) -> dict[str, Any]:
    """Return what tells the order of rows from others, but for its seed.

    Files are told by their place, as they have other names whenever data are prepared.
    """
    files: dict[str, int] = {}
    ranges = [
        [
            [files.setdefault(found.file, len(files)), found.row_group, found.start, found.stop]
            for found in shard
        ]
        for shard in data.train_plan.shards
    ]
    options, module = data.options, data.data_module
    return {
        "row groups of the files": digest({"shards": ranges, "open": data.train_plan.open_groups}),
        "shuffle_buffer_size": options.shuffle_buffer_size if options.shuffle else None,
        "inmemory_cache_all": options.shuffle and options.inmemory_cache_all,
        # All of ours read in the same order.
        "data_module": named(module) if isinstance(module, type) else None,
    }


def check_reading(found: FoundRun, data: DataSpec) -> None:
    """Make sure that a run that was interrupted within an epoch finds its rows in the same order.

    Raises
    ------
    ParamError
        If they come in another one.
    """
    if not found.checkpoints:
        return
    newest, run = found.checkpoints[-1], found.run
    if data.num_ranks < data.num_shards:
        logger.info(
            "run_id: the run %r began with %d ranks, whose parts of each global batch the %d of "
            "this fit train on in turn: batches and learning rate stay what they were.",
            *(run.run_id, data.num_shards, data.num_ranks),
        )
    if not newest.rows:
        return
    fits = (found.notes or {}).get("fits") or [{}]
    differing = differences(fits[-1].get("reading", {}), as_json(reading_identity(data)))
    if differing:
        raise ParamError(
            f"run_id: the run {run.run_id!r} was interrupted within epoch {newest.epoch + 1}, and "
            f"this fit reads rows in another order, with {'; '.join(differing)}: some of that "
            "epoch would be trained on twice, and others never. Set what it was trained with, "
            "or another run_id. To begin the epoch anew, delete the run's checkpoints of a "
            f"position within it, from {checkpoint_path(run, newest)!r} backwards."
        )
