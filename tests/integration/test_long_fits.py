"""Long fits and large rows: memory, files and threads of ranks do not grow with their number."""

from __future__ import annotations

import collections
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import reference
import torch
from parquet_files import write_columns
from reference import write_rows
from variants import others_in_soak

from hvd_estimators import Store
from hvd_estimators.launch import LocalBackend
from hvd_estimators.torch import TorchEstimator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def own_memory() -> int:
    """Return the bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Sample:
    """Callback that notes what each rank holds, after each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        sample = {
            "memory": own_memory(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }
        with open(self.folder / f"rank-{os.environ['HOROVOD_RANK']}", "a") as file:
            file.write(json.dumps(sample) + "\n")


def files_by_kind(store: Any) -> dict[str, int]:
    """Return the number of files of a store in each folder of the run."""
    folder = Path(store.run_paths("mine").run_path)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return dict(collections.Counter(str(path.parent.relative_to(folder)) for path in files))


def fit(store: Any, folder: Path, epochs: int) -> None:
    write_rows(Path(store.get_train_data_path()), 64)
    params = {"batch_size": 16, "epochs": epochs, "run_id": "mine", "verbose": 1}
    params |= {"callbacks": [Sample(folder)], "backend": LocalBackend(2), "shuffle": True}
    reference.fit(store, 2, "adam", **params)


@pytest.mark.soak
def test_two_hundred_epochs_hold_as_much_as_twenty(tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(reference)
    files, descriptors, threads = [], [], []
    for epochs in (20, 200):
        folder = tmp_path / str(epochs)
        folder.mkdir()
        store: Any = Store.create(str(folder / "store"))
        fit(store, folder, epochs)
        files.append(files_by_kind(store))
        descriptors.append(len(os.listdir("/proc/self/fd")))
        threads.append(threading.active_count())
    assert files[0] == files[1]
    # The driver after a second fit of ten times the epochs; other tests may have left some.
    assert descriptors[1] < descriptors[0] + 10
    assert threads[1] < threads[0] + 5
    for rank in range(2):
        lines = (tmp_path / "200" / f"rank-{rank}").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == 200
        for name in ("descriptors", "threads"):
            # Threads that read ahead end some epochs before training.
            later = {sample[name] for sample in samples[20:150]}
            assert max(later) - min(later) <= 2, (name, sorted(later))
        grown = samples[-1]["memory"] - samples[50]["memory"]
        # A leak of one batch, gradient or record per step would be seen as well as one per epoch.
        assert grown < 8 * 2**20, f"rank {rank} has grown by {grown / 2**20:.1f} MiB"


ROW_BYTES = 2**20


def by_length(row: dict[str, Any]) -> dict[str, Any]:
    """Replace the text by its first character, and the bytes by their length."""
    text, raw = row["text"], row["raw"]
    assert len(text) == ROW_BYTES
    digit, length = np.float32(text[0]), np.float32(len(raw) / ROW_BYTES)
    return {"text": digit, "raw": length, "label": row["label"]}


class Line(torch.nn.Module):
    """Linear function of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, text: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.stack([text.reshape(-1), raw.reshape(-1)], dim=1))


class PeakMemory:
    """Callback that notes the peak of a rank's memory, which only grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (self.folder / f"peak-{os.environ['HOROVOD_RANK']}").write_text(str(peak))


@pytest.mark.soak
@pytest.mark.parametrize("data_module", others_in_soak("arrow", "petastorm"))
def test_rows_of_two_megabytes_are_trained_on_in_bounded_memory(
    tmp_path: Path, data_module: str
) -> None:
    store: Any = Store.create(str(tmp_path / "store"))
    rows = 300
    digits = [str(number % 10) for number in range(rows)]
    for part in range(3):
        mine = digits[part * 100 : (part + 1) * 100]
        write_columns(
            Path(store.get_train_data_path()),
            {
                "text": np.array([digit * ROW_BYTES for digit in mine], object),
                "raw": np.array([os.urandom(ROW_BYTES) for _ in mine], object),
                "label": np.array([float(digit) for digit in mine], np.float32),
            },
            row_group_size=20,
            name=f"part-{part}.parquet",
        )
    net = Line()
    model = TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["text", "raw"],
        label_cols=["label"],
        transformation_fn=by_length,
        transformation_edit_fields=[(name, np.float32, (), False) for name in ("text", "raw")],
        batch_size=10,
        epochs=12,
        store=store,
        data_module=data_module,
        callbacks=[PeakMemory(tmp_path)],
        backend=LocalBackend(2),
        verbose=0,
    ).fit_on_parquet()
    # The label is the first character.
    found = model.getModel()(torch.tensor([3.0, 8.0]), torch.ones(2)).detach().numpy()
    np.testing.assert_allclose(found.reshape(-1), [3.0, 8.0], atol=1.0)
    for rank in range(2):
        peak = int((tmp_path / f"peak-{rank}").read_text())
        assert peak < 2.5 * 2**30, f"rank {rank} used {peak / 2**30:.1f} GiB"
