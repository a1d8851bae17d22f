"""Rows per second of several libraries' input pipelines, as shuffled batches of torch tensors.

The libraries run in turns, each in a separate process. In addition to the packages of `make setup`,
it needs ``pip install 'datasets<2.20' mosaicml-streaming``; later versions of datasets do not run
with Petastorm's PyArrow. A library that is not installed is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import torch
from pyarrow import parquet

from benchmarks.figures import compared, parser, show_result, show_table
from benchmarks.loader import TRIES, Data, petastorm_batches, write
from hvd_estimators.loading.petastorm import PetastormDataModule
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule, PlannedDataModule
from hvd_estimators.torch.tensors import tensor_batches

PASSES = 3
"""Passes over the rows from opening to closing."""

SECONDS = 15.0
"""Time after which a slow library is stopped."""

Batches = Callable[[], contextlib.AbstractContextManager[Iterator[Any]]]
"""Opens a library's pipeline, which yields the batches of all passes."""


class ScannedParquet(torch.utils.data.IterableDataset):
    """Typical code with pyarrow.dataset: rows are shuffled within each scanned batch."""

    def __init__(self, file: str, batch_size: int) -> None:
        self.file = file
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rng = np.random.default_rng(0)
        for scanned in pyarrow.dataset.dataset(self.file).to_batches(batch_size=2**17):
            rows = scanned.take(pa.array(rng.permutation(len(scanned))))
            columns = {
                name: torch.from_numpy(rows.column(name).to_numpy().copy())
                for name in rows.schema.names
            }
            for start in range(0, len(scanned), self.batch_size):
                yield {n: c[start : start + self.batch_size] for n, c in columns.items()}


def ours(module: type[PlannedDataModule], data: Data, batch_size: int) -> Batches:
    @contextlib.contextmanager
    def batches() -> Iterator[Iterator[Any]]:
        plan = plan_shards(data.manifest.train.row_groups, 1)
        with (
            module(
                train_dir=data.manifest.train.path,
                val_dir=None,
                columns=data.manifest.columns,
                train_plan=plan,
                train_batch_size=batch_size,
                num_train_epochs=PASSES,
            ) as opened,
            contextlib.closing(tensor_batches(opened.train_chunks())) as found,
        ):
            yield itertools.islice(found, PASSES * plan.steps(batch_size))

    return batches


def torch_loader(*arguments: Any, **options: Any) -> Batches:
    loader = torch.utils.data.DataLoader(*arguments, **options)
    return lambda: contextlib.nullcontext(itertools.chain.from_iterable([loader] * PASSES))


def hugging_face(data: Data, batch_size: int, folder: Path) -> Batches:
    import datasets

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(
        "parquet", data_files=data.file, split="train", cache_dir=str(folder / "datasets")
    ).with_format("torch")
    return torch_loader(loaded, batch_size, shuffle=True)


def mosaic(data: Data, batch_size: int, folder: Path) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    converted = folder / "mds"
    names = [spec.name for spec in data.manifest.columns]
    rows = parquet.read_table(data.file)
    with MDSWriter(out=str(converted), columns=dict.fromkeys(names, "float32")) as writer:
        for batch in rows.to_batches(2**16):
            arrays = [batch.column(name).to_numpy() for name in names]
            for values in zip(*arrays, strict=True):
                writer.write(dict(zip(names, values, strict=True)))

    def batches() -> contextlib.AbstractContextManager[Iterator[Any]]:
        dataset = StreamingDataset(local=str(converted), shuffle=True, batch_size=batch_size)
        return torch_loader(dataset, batch_size)()

    return batches


OTHERS: dict[str, tuple[str, Callable[[Data, int, Path], Batches]]] = {
    "datasets": ("datasets", hugging_face),
    "mosaicml-streaming": ("streaming", mosaic),
}
"""Libraries that `make setup` does not install: their modules, and the functions that open them."""


def contenders(data: Data, batch_size: int, folder: Path) -> dict[str, Batches]:
    found = {
        "hvd_estimators, Arrow": ours(ArrowDataModule, data, batch_size),
        "hvd_estimators, Petastorm": ours(PetastormDataModule, data, batch_size),
        "petastorm": lambda: petastorm_batches(data, batch_size, PASSES),
        "torch over pyarrow.dataset": torch_loader(ScannedParquet(data.file, batch_size), None),
    }
    for name, (module, make) in OTHERS.items():
        if importlib.util.find_spec(module):
            found[name] = make(data, batch_size, folder)
    return found


def speed_alone(batches: Batches) -> float:
    """Return `speed` of a separate process, because threads of a pipeline can outlive it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(speed(batches)))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        process.join()


def speed(batches: Batches) -> float:
    """Return the rows per second of all passes, or of the first seconds."""
    rows = 0
    started = time.perf_counter()
    with batches() as found:
        for batch in found:
            columns = batch._asdict() if hasattr(batch, "_asdict") else batch
            rows += len(next(iter(columns.values())))
            if time.perf_counter() - started > SECONDS:
                break
    return rows / (time.perf_counter() - started)


def main() -> None:
    options_parser = parser(__doc__, rows=2_000_000, repeats=3)
    options_parser.add_argument("--batch-size", type=int, default=1000)
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-peers-") as folder:
        data = next(write(Path(folder), options.rows))
        pipelines = contenders(data, options.batch_size, Path(folder))
        speeds: dict[str, list[float]] = {name: [] for name in pipelines}
        for _ in range(options.repeats):
            for name, batches in pipelines.items():
                # Petastorm's pool occasionally ends without a row.
                found = next(filter(None, (speed_alone(batches) for _ in range(TRIES))), None)
                if found is None:
                    raise SystemExit(f"{name} delivered no rows.")
                speeds[name].append(found)
    title = f"{data.name}, {data.rows} rows, batch {options.batch_size}, {PASSES} passes"
    records = compared("20 columns", speeds, "rows/s", "petastorm")
    table = [(one.name, one.value, one.ratio) for one in records]
    show_table(title, ("library", "rows/s", "times petastorm"), table)
    settings = {**vars(options), "passes": PASSES}
    left_out = [name for name in OTHERS if name not in pipelines]
    if left_out:
        settings["not_installed"] = left_out
    show_result("peers", settings, {"rows_per_second": speeds}, records)


if __name__ == "__main__":
    main()
