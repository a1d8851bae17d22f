"""Buffers computed from batches, reduced according to ``buffer_reduction``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import rank_warnings
import resuming
import torch
from lightning_reference import fit as fit_lightning
from pytorch_lightning import LightningModule
from rank_warnings import Warnings
from reference import WIDTH, fit, write_rows
from resuming import kept_checkpoints
from test_resuming import assert_equal_bits
from tracked_buffers import BATCH, EPOCHS, REDUCTIONS, ROWS, expected_buffers

pytestmark = pytest.mark.integration


def setup_module() -> None:
    cloudpickle.register_pickle_by_value(resuming)
    cloudpickle.register_pickle_by_value(rank_warnings)


class Tracking(torch.nn.Module):
    """Model with buffers that depend on the rows of its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.last = torch.nn.Linear(WIDTH, 1)
        for name in ("running_max", "running_min", "total", "latest", "first", "other"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.maximum(self.running_max, x.max(), out=self.running_max)
            torch.minimum(self.running_min, x.min(), out=self.running_min)
            self.total += x.sum()
            self.rows += len(x)
            for buffer in (self.latest, self.first, self.other):
                buffer.copy_(x.mean())
        return self.last(x)


class Steps(LightningModule):
    def configure_model(self) -> None:
        self.net = Tracking()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch["features"])[:, 0], batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Reduced before each validation, also within an epoch.
        self.log("rows", self.net.rows.float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def torch_run(store: Any, backend: Any, **params: Any) -> torch.nn.Module:
    net = Tracking()
    given = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.01)}
    return fit(store, 2, "sgd", backend=backend, **given, **params)[0].getModel()


def lightning_run(store: Any, backend: Any, **params: Any) -> torch.nn.Module:
    trainer_args = {"val_check_interval": 2}
    given = {"model": Steps(), "trainer_args": trainer_args, "validation": 0.1}
    model = fit_lightning(backend, store, **given, **params)
    assert model.getHistory()[-1]["validation"]["rows"] == EPOCHS * ROWS
    return model.getModel().net


@pytest.mark.parametrize(
    ("run", "library"),
    [
        (torch_run, "horovod"),
        pytest.param(lightning_run, "horovod", marks=pytest.mark.soak),
        (lightning_run, "torch"),
    ],
)
def test_torch_and_lightning(backend: Any, store: Any, run: Any, library: str) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    write_rows(Path(store.get_val_data_path()), 10, seed=1)
    common = {"batch_size": BATCH, "epochs": EPOCHS, "buffer_reduction": REDUCTIONS}
    common["collectives"] = library
    kept = {"checkpoint_every_n_steps": 3, "keep_checkpoints": 99}
    whole = run(store, backend, run_id="kept", **kept, **common)
    expected = expected_buffers(columns)
    # By default a buffer of this kind keeps rank 0's value.
    expected["other"] = expected["first"]
    for name, value in expected.items():
        assert getattr(whole, name).item() == pytest.approx(value, rel=1e-5), name
    buffers = dict(whole.named_buffers())
    positions = []
    for run_id, position in kept_checkpoints(store, "kept"):
        positions.append(position)
        resumed = run(store, backend, run_id=run_id, **common)
        assert_equal_bits(dict(resumed.named_buffers()), buffers)
    assert {(0, 48), (1, 0), (1, 32)} <= {*positions}


class Codebook(torch.nn.Module):
    """Net that subtracts the nearest code, and sums up the rows of each code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.last = torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 1)
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", torch.zeros(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.codes).argmin(dim=1)
        if self.training:
            self.counts.index_add_(0, nearest, torch.ones(len(x)))
            self.sums.index_add_(0, nearest, x)
        found: torch.Tensor = self.last(self.norm(x) - self.codes[nearest])
        return found


def test_buffers_that_differ_between_the_ranks_are_named(
    backend: Any, store: Any, tmp_path: Path
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    columns = write_rows(Path(store.get_train_data_path()), ROWS)

    def run(**params: Any) -> tuple[Any, list[str]]:
        net = Codebook()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        params.update(callbacks=[Warnings(tmp_path)], batch_size=BATCH, epochs=EPOCHS)
        model, _ = fit(store, 2, "sgd", backend=backend, model=net, optimizer=optimizer, **params)
        return model.getModel(), [Warnings.of(tmp_path, rank) for rank in (0, 1)]

    found, (text, other) = run()
    assert "different values of counts, sums, because" in text
    assert "buffer_reduction={'counts': 'sum'}" in text
    assert text.count("buffer_reduction") == 1
    assert other == ""
    expected = Codebook().train()
    for _ in range(EPOCHS):
        expected(torch.from_numpy(columns["features"]))
    assert not torch.equal(found.counts, expected.counts)
    found, texts = run(buffer_reduction={"counts": "sum", "sums": "sum"})
    assert texts == ["", ""]
    torch.testing.assert_close(found.counts, expected.counts)
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-5, atol=1e-5)
