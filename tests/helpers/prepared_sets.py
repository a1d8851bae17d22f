"""Prepared datasets of a few bytes. No Spark."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest, RowGroup, Split
from hvd_estimators.prepare.datasets import acquire, manifest_path


class Writer:
    """Function that writes datasets of five training rows and counts its calls."""

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


def use(store, write):
    with acquire(store, write) as index:
        return index


def folders(store):
    root = Path(store.prefix_path)
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def names(index):
    return [f"intermediate_train_data.{index}", f"intermediate_train_data.{index}.owner"]


def in_threads(count, action):
    """Call an action in several threads; return their results and exceptions."""
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
