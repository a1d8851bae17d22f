"""Read JPEGs that `transformation_fn` decodes, with Petastorm and torch's `DataLoader` too."""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet

from benchmarks.figures import in_turns, rows_per_second
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.loading.transform import Transformation
from hvd_estimators.store import LocalStore
from hvd_estimators.torch.tensors import tensor_batches

WORKERS = 2
SIDE = 224
BATCH = 32
DIFFERENT = 64
LOADER = f"DataLoader, {WORKERS} workers"


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": np.array(Image.open(io.BytesIO(row["image"])).convert("RGB"))}


class Images(torch.utils.data.Dataset[Any]):
    """All rows in memory, for torch's `DataLoader`."""

    def __init__(self, images: list[bytes]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return decoded({"image": self._images[index]})


def of_jpegs(folder: Path, rows: int, repeats: int) -> dict[str, list[float]]:
    """Read a pass with each contender in turns; return the rows per second."""
    images = list(itertools.islice(itertools.cycle(_jpegs()), rows))
    folder.mkdir()
    file = folder / "part-0.parquet"
    parquet.write_table(pa.table({"image": images}), file, row_group_size=max(rows // 4, 1))
    loader = torch.utils.data.DataLoader(
        Images(images), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )
    with contextlib.ExitStack() as stack:
        reads: dict[str, Callable[[], Any]] = {
            "ours, thread": _ours(stack, folder, "thread", 1),
            "ours, 1 process": _ours(stack, folder, "process", 1),
            f"ours, {WORKERS} processes": _ours(stack, folder, "process", WORKERS),
            f"Petastorm, TransformSpec, {WORKERS} threads": lambda: _petastorm(file),
            LOADER: lambda: loader,
        }
        contenders = {
            name: rows_per_second(rows, lambda read=read: sum(len(b["image"]) for b in read()))
            for name, read in reads.items()
        }
        return in_turns(contenders, repeats, warm_up=1)


def _jpegs() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    for _ in range(DIFFERENT):
        image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).resize((SIDE, SIDE))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        yield file.getvalue()


def _ours(stack: contextlib.ExitStack, folder: Path, pool: str, workers: int) -> Callable[[], Any]:
    """Open a validation reader, whose passes end; its processes stay from pass to pass."""
    store = LocalStore(str(folder))
    manifest = read_manifest(store, str(folder), None, ["image"], allow_text={"image": True})
    plan = plan_shards(manifest.train.row_groups, 1)
    module = stack.enter_context(
        ArrowDataModule(
            train_dir=manifest.train.path,
            val_dir=manifest.train.path,
            columns=manifest.columns,
            train_plan=plan,
            val_plan=plan,
            val_batch_size=BATCH,
            val_reader_worker_count=workers,
            reader_pool_type=pool,
            transformation=Transformation(decoded),
        )
    )
    return lambda: tensor_batches(module.val_chunks())


def _petastorm(file: Path) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from petastorm import TransformSpec, make_batch_reader
        from petastorm.pytorch import BatchedDataLoader

        def decode(frame: Any) -> Any:
            frame["image"] = [decoded({"image": image})["image"] for image in frame["image"]]
            return frame

        fields = [("image", np.uint8, (SIDE, SIDE, 3), False)]
        spec = TransformSpec(decode, edit_fields=fields)
        reader = make_batch_reader(file.as_uri(), workers_count=WORKERS, transform_spec=spec)
        with BatchedDataLoader(reader, batch_size=BATCH) as loader:
            yield from loader
