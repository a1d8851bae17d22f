"""What stores of ``horovod.spark`` had and ours do not, and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["LEFT_OUT", "LeftOutNames"]

_RANKS = (
    "Ranks write to the store themselves: write_text(path, text), open_atomic(path) and read(path) "
    "work on both sides, and the store can be pickled."
)
_DATASETS = (
    "prepare_data writes datasets, get_dataset_properties(index) tells their rows and columns, and "
    "fit_on_parquet(dataset_idx=index) trains on them."
)
_PATHS = "get_full_path(path) is the path in the store, local_path(path) the one on this machine."

LEFT_OUT = {
    "copy": _RANKS,
    "get_data_metadata_path": _DATASETS,
    "get_filesystem": "fs is the filesystem.",
    "get_full_path_fn": _PATHS,
    "get_local_output_dir_fn": _RANKS,
    "get_localized_path": _PATHS,
    "get_parquet_dataset": _DATASETS,
    "is_parquet_dataset": _DATASETS,
    "matches": "Store.create(prefix) picks the class; isinstance tells which one it was.",
    "normalize_path": _PATHS,
    "parse_url": _PATHS,
    "read_serialized_keras_model": (
        "hvd_estimators.load_checkpoint(store, run_id=...) reads a run's checkpoint."
    ),
    "sync_fn": _RANKS,
    "to_remote": _RANKS,
}
"""Methods to what takes their place."""


class LeftOutNames:
    """Base of stores, which explains names that others had."""

    if not TYPE_CHECKING:  # else every name would seem to be there

        def __getattr__(self, name: str) -> Any:
            if name in LEFT_OUT:
                kind = type(self).__name__
                raise AttributeError(
                    f"{kind} has no {name}, unlike horovod.spark. {LEFT_OUT[name]}"
                )
            # A property of a subclass may have failed: its own error says more.
            return object.__getattribute__(self, name)
