"""Time rows of any length, with a collate function, against torch's `DataLoader` on one file.

Runs in one process and its workers. All contenders read the same Parquet file in turns, and the
best of each counts, without the first turn.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch.nn.utils.rnn import pad_sequence

from benchmarks.figures import compared, in_turns, options, rows_per_second, show_result
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import JoinedSpec
from hvd_estimators.data.rows import ROWS
from hvd_estimators.loading.collate import Collate
from hvd_estimators.loading.collate_fn import CollateFunction, Padding
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore
from hvd_estimators.torch.tensors import tensor_batches

WORKERS = 2
BATCH = 32
WORDS = 10_000
LOADER = f"DataLoader, {WORKERS} workers"

Function = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad arrays of token ids to the longest."""
    ids = [torch.as_tensor(row["tokens"]) for row in rows]
    tokens = pad_sequence(ids, batch_first=True)
    return {"tokens": tokens, "mask": tokens != 0, "label": _labels(rows)}


def tokenized(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Split texts into words, look these up, and pad the ids to the longest."""
    ids = [torch.tensor([int(word[1:]) for word in row["text"].split()]) for row in rows]
    tokens = pad_sequence(ids, batch_first=True)
    return {"tokens": tokens, "mask": tokens != 0, "label": _labels(rows)}


def _labels(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([row["label"] for row in rows])


class Rows(torch.utils.data.IterableDataset[Any]):
    """Rows of a Parquet file, of which each worker reads its row groups."""

    def __init__(self, file: Path, columns: list[str]) -> None:
        self._file, self._columns = file, columns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        with parquet.ParquetFile(self._file) as file:
            groups = list(range(worker.id, file.num_row_groups, worker.num_workers))
            for batch in file.iter_batches(1000, row_groups=groups, columns=self._columns):
                yield from batch.to_pylist()


def main() -> None:
    given = options(__doc__, rows=100_000, repeats=5)
    torch.set_num_threads(1)
    records = []
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-loader-") as folder:
        file = write(Path(folder), given.rows)
        for name, column, function in (("arrays", "tokens", padded), ("texts", "text", tokenized)):
            measured = measure(file, column, function, given.repeats)
            records += compared(f"{name}, batch {BATCH}", measured, "rows/s", LOADER)
    show_result("loader_text", {"rows": given.rows, "workers": WORKERS}, records)


def write(folder: Path, rows: int) -> Path:
    """Write texts of 5 to 100 words, and the words' numbers."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, WORDS, length) for length in rng.integers(5, 101, rows)]
    texts = [" ".join(f"w{number}" for number in each) for each in tokens]
    table = pa.table({"tokens": tokens, "text": texts, "label": rng.integers(0, 2, rows)})
    file = folder / "part-0.parquet"
    parquet.write_table(table, file, row_group_size=max(rows // 16, 1))
    return file


def measure(file: Path, column: str, function: Function, repeats: int) -> dict[str, list[float]]:
    """Read a pass with each contender in turns; return the rows per second."""
    rows = parquet.read_metadata(file).num_rows
    columns = [column, "label"]
    in_memory = parquet.read_table(file, columns=columns).to_pylist()

    def loader(rows: Any) -> Any:
        return torch.utils.data.DataLoader(
            rows,
            batch_size=BATCH,
            num_workers=WORKERS,
            collate_fn=function,
            persistent_workers=True,
        )

    reading, without_reading = loader(Rows(file, columns)), loader(in_memory)
    with contextlib.ExitStack() as stack:

        def ours(collate: Collate, pool: str) -> Callable[[], int]:
            module = stack.enter_context(_reader(file, columns, collate, pool))
            return lambda: sum(batch.rows for batch in tensor_batches(module.val_chunks()))

        by_function = CollateFunction(None, function)
        reads = {
            f"ours, {WORKERS} processes": ours(by_function, "process"),
            "ours, thread": ours(by_function, "thread"),
            LOADER: lambda: sum(len(batch["label"]) for batch in reading),
            f"{LOADER}, rows in memory": lambda: sum(len(b["label"]) for b in without_reading),
        }
        if column == "tokens":
            by_padding = Padding(None, {"tokens": 0}, ("tokens",))
            reads["ours, padding, thread"] = ours(by_padding, "thread")
        contenders = {name: rows_per_second(rows, read) for name, read in reads.items()}
        return in_turns(contenders, repeats, warm_up=1)


def _reader(file: Path, columns: list[str], collate: Collate, pool: str) -> ArrowDataModule:
    """Open a validation reader, whose passes end; its processes stay from pass to pass."""
    folder = str(file.parent)
    manifest = read_manifest(
        LocalStore(folder), folder, None, columns, allow_text=dict.fromkeys(columns, "any")
    )
    plan = plan_shards(manifest.train.row_groups, 1)
    return ArrowDataModule(
        train_dir=folder,
        val_dir=folder,
        columns=(JoinedSpec(ROWS, "rows", "object", members=manifest.columns),),
        train_plan=plan,
        val_plan=plan,
        val_batch_size=BATCH,
        steps_per_epoch_val=plan.steps(BATCH),
        val_reader_worker_count=WORKERS,
        reader_pool_type=pool,
        collate=collate,
    )


if __name__ == "__main__":
    main()
