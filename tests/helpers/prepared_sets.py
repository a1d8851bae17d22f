"""Prepared datasets of a few bytes, which are told apart by a name. No Spark."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest, RowGroup, Split
from hvd_estimators.prepare.catalog import (
    manifest_path,
)
from hvd_estimators.prepare.datasets import acquire


@dataclass
class Source:
    """Rows that are told apart by a name."""

    name: str
    current: bool = True

    def same_as(self, other: Source) -> bool:
        return self.name == other.name

    def is_current(self) -> bool:
        return self.current


class Writer:
    """Writes datasets of five training rows and counts them."""

    def __init__(self, store, seconds=0.0, failures=0):
        self.store, self.seconds, self.failures = store, seconds, failures
        self.written = []

    def __call__(self, index):
        time.sleep(self.seconds)
        self.written.append(index)
        path = Path(self.store.get_train_data_path(index))
        path.mkdir(parents=True)
        (path / "part.parquet").write_bytes(b"12345678")
        if len(self.written) <= self.failures:
            raise OSError("the disk is full")
        split = Split(str(path), (RowGroup(str(path / "part.parquet"), 0, 5),))
        manifest = DatasetManifest((ColumnSpec("x", "scalar", "float32"),), split)
        self.store.write_text(manifest_path(self.store, index), manifest.to_json())


def use(store, write, name="rows", options=()):
    with acquire(store, Source(name) if name else None, options, write) as index:
        return index


def folders(store):
    root = Path(store.prefix_path)
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def names(index):
    return [f"intermediate_train_data.{index}", f"intermediate_train_data.{index}.owner"]


def in_threads(count, action):
    results = [None] * count

    def run(i):
        try:
            results[i] = action()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results
