"""Training plan: the rows that each rank reads, the reader options and the number of steps.

Runs on the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from hvd_estimators.data.arrays import Columns, num_rows
from hvd_estimators.data.discovery import first_rows
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest, RowGroup
from hvd_estimators.data.rows import ROWS, RowTable
from hvd_estimators.fitting.run import ReadOrder
from hvd_estimators.fitting.settings import Settings
from hvd_estimators.fitting.trial import DRY_RUN_ROWS
from hvd_estimators.loading.plan import ShardPlan, order_warning, plan_shards, vary
from hvd_estimators.loading.spec import DataSpec, ReaderOptions, check_shards, choose_data_module
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.base import store_of
from hvd_estimators.training.spec import CheckpointOptions, TrainSpec

logger = logging.getLogger(__name__)

_MEASURED_GROUPS, _MEASURED_ROWS, _MEASURED_BYTES = 4, 100, 4 * 2**20
"""Row groups of which rows are measured, and maximum rows and bytes of each."""


def common_spec(
    settings: Settings,
    framework: str,
    manifest: DatasetManifest,
    num_ranks: int,
    run: RunPaths,
    order: ReadOrder,
) -> TrainSpec:
    """Return the `TrainSpec` that is common to all frameworks.

    A resumed run keeps the ``order`` that it started with.

    Raises
    ------
    ParamError
        If these ranks cannot resume the run.
    """
    check_shards(settings.data_module, order.canonical_shards, num_ranks, run.run_id)
    params = settings.in_fields_of(TrainSpec)
    return TrainSpec(
        **{**params, "callbacks": tuple(params["callbacks"])},
        data=plan_data(settings, manifest, order, num_ranks),
        run=run,
        checkpoints=CheckpointOptions(
            framework,
            settings.keep_checkpoints,
            settings.checkpoint_monitor,
            settings.checkpoint_mode,
            settings.checkpoint_every_n_steps,
        ),
    )


def plan_data(
    settings: Settings, manifest: DatasetManifest, order: ReadOrder, num_ranks: int
) -> DataSpec:
    """Plan the rows that each shard reads, the reader options and the steps per epoch.

    Parameters
    ----------
    settings : Settings
        The params of the fit.
    manifest : DatasetManifest
        The dataset.
    order : ReadOrder
        Number of canonical shards, and the seed and buffer of the row order.
    num_ranks : int
        Number of ranks that run the shards.

    Raises
    ------
    DataError
        If there are fewer training rows than shards.
    """
    needed = set(settings.needed_columns)
    columns = settings.columns_read([c for c in manifest.columns if c.name in needed])
    groups, buffer_bytes = manifest.train.row_groups, settings.shuffle_buffer_size
    plan = plan_shards(
        groups,
        order.canonical_shards,
        seed=order.random_seed if settings.shuffle else None,
        # Rows that were written in random order can be read one row group after another.
        open_bytes=0 if manifest.shuffled else buffer_bytes,
    )
    store = store_of(manifest.train.path, settings.store)
    row_bytes = order.row_bytes
    if row_bytes is None:
        measured = _measured_bytes(store, manifest, columns, plan.row_bytes)
        row_bytes = max(plan.row_bytes, measured)
    plan = replace(plan, row_bytes=row_bytes)
    if settings.shuffle and not (manifest.shuffled or settings.inmemory_cache_all):
        warning = order_warning(groups, plan, columns, buffer_bytes)
        if warning:
            logger.warning(warning)
    val_plan: ShardPlan | None = None
    if manifest.validation is not None:
        val_plan = plan_shards(
            manifest.validation.row_groups, order.canonical_shards, allow_empty=True
        )
        val_plan = replace(val_plan, row_bytes=max(val_plan.row_bytes, row_bytes))
    return DataSpec(
        columns=columns,
        train_path=manifest.train.path,
        val_path=manifest.validation.path if manifest.validation else None,
        train_plan=plan,
        val_plan=val_plan,
        num_ranks=num_ranks,
        feature_cols=settings.inputs.names,
        label_cols=tuple(settings.label_cols),
        sample_weight_col=settings.sample_weight_col,
        batch_size=settings.batch_size,
        val_batch_size=settings.val_batch_size,
        train_steps_per_epoch=settings.train_steps_per_epoch or plan.steps(settings.batch_size),
        validation_steps_per_epoch=settings.validation_steps_per_epoch
        or (val_plan.steps(settings.val_batch_size) if val_plan else 0),
        random_seed=order.random_seed,
        data_module=choose_data_module(settings.data_module),
        options=_reader_options(settings, store),
        inputs=settings.inputs,
        row_order=manifest.row_order,
        least_ranks=settings.min_num_proc if settings.max_restarts else None,
    )


def _measured_bytes(
    store: Store, manifest: DatasetManifest, columns: Sequence[ColumnSpec], stored_bytes: int
) -> int:
    """Return the mean size in memory of some rows; footers do not tell the size of repeated text.

    Rows of several row groups are read, unless the columns tell the size.
    """
    if not vary(columns):
        return 0
    groups = manifest.train.row_groups
    each = min(max(_MEASURED_BYTES // max(stored_bytes, 1), 1), _MEASURED_ROWS)
    some = groups[:: -(-len(groups) // _MEASURED_GROUPS)]
    rows = num_bytes = 0
    for found in _heads(store, replace(manifest, columns=tuple(columns)), some, each):
        rows += num_rows(found)
        for values in found.values():
            num_bytes += values.nbytes
            if not isinstance(values, RowTable) and values.dtype.hasobject:
                num_bytes += sum(map(len, values.reshape(-1)))
    return num_bytes // max(rows, 1)


def _reader_options(settings: Settings, store: Store) -> ReaderOptions:
    """Return the reader options from the params; ``store`` opens the files."""
    return ReaderOptions(
        **{**settings.in_fields_of(ReaderOptions), "store": store},
        train_reader_worker_count=settings.train_reader_num_workers,
        val_reader_worker_count=settings.val_reader_num_workers,
        transform_fn=settings.transformation_fn,
        transformation=settings.transformation,
        collate=settings.collate_of_ranks,
        storage_options=store.storage_options,
    )


def rows_of_model(settings: Settings, manifest: DatasetManifest) -> Columns:
    """Return the first rows of a dataset after the transformation, as the model gets them."""
    needed = settings.needed_columns
    columns = settings.columns_read([c for c in manifest.columns if c.name in needed])
    manifest = replace(manifest, columns=columns)
    store = store_of(manifest.train.path, settings.store)
    if settings.collate is not None:
        return _rows_of_groups(store, manifest)
    rows = first_rows(store, manifest, DRY_RUN_ROWS)
    transformation = settings.transformation
    return rows if transformation is None else transformation(rows)


def _heads(
    store: Store, manifest: DatasetManifest, groups: Sequence[RowGroup], rows: int
) -> Iterator[Any]:
    """Yield the first rows of some row groups of the training part, each when it is needed."""
    for group in groups:
        of_group = replace(manifest.train, row_groups=(group,))
        yield first_rows(store, replace(manifest, train=of_group), rows)


def _rows_of_groups(store: Store, manifest: DatasetManifest) -> Columns:
    """Return a few rows of several row groups, as a `RowTable`; some have other lengths."""
    tables: list[pa.Table] = []
    groups = manifest.train.row_groups[:DRY_RUN_ROWS]
    for found in _heads(store, manifest, groups, DRY_RUN_ROWS):
        rows = found[ROWS]
        tables.append(rows.table if not tables else rows.table.cast(tables[0].schema))
        if sum(map(len, tables)) >= DRY_RUN_ROWS:
            break
    made: Any = RowTable(pa.concat_tables(tables))
    return {ROWS: made[:DRY_RUN_ROWS]}


def rows_of_transform(settings: Settings, manifest: DatasetManifest) -> Columns:
    """Return the first rows of a dataset with the columns that the fitted model takes."""
    rows = first_rows(store_of(manifest.train.path, settings.store), manifest, DRY_RUN_ROWS)
    transformation = settings.transformation
    if transformation is None or settings.apply_transformation:
        return rows
    # The fitted model stacks matrices itself.
    return replace(transformation, inputs=None)(rows)
