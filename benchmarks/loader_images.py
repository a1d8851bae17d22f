"""Time JPEGs that `transformation_fn` decodes against Petastorm and torch's `DataLoader`."""

from __future__ import annotations

import contextlib
import io
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet

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
THREAD, ONE, SEVERAL = "ours, thread", "ours, 1 process", f"ours, {WORKERS} processes"
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
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], int]] = {
            THREAD: _ours(stack, folder, "thread", 1),
            ONE: _ours(stack, folder, "process", 1),
            SEVERAL: _ours(stack, folder, "process", WORKERS),
            f"Petastorm, TransformSpec, {WORKERS} threads": lambda: _petastorm(file),
            LOADER: _loader(images),
        }
        return in_turns(contenders, rows, repeats)


def in_turns(
    contenders: Mapping[str, Callable[[], int]], rows: int, repeats: int
) -> dict[str, list[float]]:
    """Let each contender read a pass of some rows, in turns; return the rows per second.

    The first turn does not count.
    """
    speeds: dict[str, list[float]] = {}
    for turn in range(repeats + 1):
        for name, contender in contenders.items():
            found = 0
            # Petastorm's pool occasionally ends without a row; such a time does not count.
            while not found:
                started = time.perf_counter()
                found = contender()
            assert found == rows, (name, found)
            if turn:
                speeds.setdefault(name, []).append(rows / (time.perf_counter() - started))
    return speeds


def _jpegs() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    for _ in range(DIFFERENT):
        image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).resize((SIDE, SIDE))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        yield file.getvalue()


def _ours(stack: contextlib.ExitStack, folder: Path, pool: str, workers: int) -> Callable[[], int]:
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
    return lambda: sum(len(batch["image"]) for batch in tensor_batches(module.val_chunks()))


def _petastorm(file: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from petastorm import TransformSpec, make_batch_reader
        from petastorm.pytorch import BatchedDataLoader

        def decode(frame: Any) -> Any:
            frame["image"] = [decoded({"image": image})["image"] for image in frame["image"]]
            return frame

        fields = [("image", np.uint8, (SIDE, SIDE, 3), False)]
        reader = make_batch_reader(
            file.as_uri(),
            workers_count=WORKERS,
            transform_spec=TransformSpec(decode, edit_fields=fields),
        )
        with BatchedDataLoader(reader, batch_size=BATCH) as loader:
            return sum(len(batch["image"]) for batch in loader)


def _loader(images: list[bytes]) -> Callable[[], int]:
    loader = torch.utils.data.DataLoader(
        Images(images), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )
    return lambda: sum(len(batch["image"]) for batch in loader)
