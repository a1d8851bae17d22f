"""Users' steps, modules and callbacks use the default process group in fits of two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning_reference import Regression
from lightning_reference import fit as fit_lightning
from reference import OPTIMIZERS, fit, global_batches, make_net, write_rows
from torchmetrics import MeanSquaredError

# The ranks are shared by all tests of a module, and do not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.integration

ROWS, BATCH = 41, 8
LIBRARIES = ("horovod", "torch")


def train_alone(columns: dict[str, np.ndarray]) -> torch.nn.Sequential:
    """Train on the global batches."""
    net = make_net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    for rows in 2 * global_batches(ROWS, 2, BATCH):
        output = net(torch.from_numpy(columns["features"][rows])).reshape(-1)
        loss = torch.nn.functional.mse_loss(output, torch.from_numpy(columns["label"][rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def assert_same_state(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-5)


class Gathering:
    """Callback that exchanges objects when an epoch ends."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, dist.get_rank())
        first = [f"{ranks} {epoch}"]
        dist.broadcast_object_list(first, src=0)
        dist.barrier()
        with open(f"{self.path}/{dist.get_rank()}", "a") as file:
            print(first[0], dist.get_backend(), file=file)


def step_by_hand(
    module: Any, optimizer: Any, transform: Any, loss_fn: Any, inputs: Any, labels: Any
) -> Any:
    """Step, and check the sum of the rows of all ranks."""
    optimizer.zero_grad()
    outputs, labels = transform(module(*inputs), labels)
    loss = loss_fn(outputs, labels)
    loss.backward()
    optimizer.step()
    rows = torch.tensor([0, 0])
    rows[dist.get_rank()] = len(inputs[0])
    dist.all_reduce(rows)
    assert rows.min() > 0, rows
    return outputs, loss


@pytest.mark.parametrize(
    ("library", "step"), [("horovod", None), ("torch", None), ("torch", step_by_hand)]
)
def test_steps_callbacks_and_metrics_use_the_default_group(
    backend: Any, store: Any, tmp_path: Path, library: str, step: Any
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    net = make_net()
    model, _ = fit(
        store,
        2,
        "sgd",
        backend=backend,
        model=net,
        optimizer=OPTIMIZERS["sgd"](net.parameters()),
        metrics=[MeanSquaredError()],
        train_minibatch_fn=step,
        validation_path=store.get_train_data_path(),
        callbacks=[Gathering(str(tmp_path))],
        batch_size=BATCH,
        epochs=2,
        collectives=library,
    )
    expected = train_alone(columns)
    assert_same_state(model.getModel(), expected)
    name = {"horovod": "horovod", "torch": "gloo"}[library]
    for rank in range(2):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        assert lines == [f"[0, 1] {epoch} {name}" for epoch in range(2)]
    output = expected.eval()(torch.from_numpy(columns["features"])).reshape(-1)
    error = torch.nn.functional.mse_loss(output, torch.from_numpy(columns["label"])).item()
    found = model.history_frame().query("stage == 'validation' and epoch == 1")
    values = found.set_index("name")["value"]
    assert set(values.index) == {"loss", "MeanSquaredError"}
    assert list(values) == pytest.approx([error] * 2, rel=1e-4)


class Exchanging(Regression):
    """Module whose step counts the rows of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        errors = (self(batch["features"]) - batch["label"]) ** 2
        rows = torch.tensor(float(len(errors)))
        dist.all_reduce(rows)
        counts = self.all_gather(torch.tensor(len(errors)))
        assert counts.sum() == rows, (counts, rows)
        self.log("rows", rows, on_step=True, on_epoch=False)
        self.log("synced", errors.mean(), sync_dist=True)
        return errors.mean()


@pytest.mark.parametrize("library", LIBRARIES)
def test_lightning_modules_use_the_default_group(backend: Any, store: Any, library: str) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    model = fit_lightning(
        backend, store, model=Exchanging("sgd"), batch_size=BATCH, epochs=2, collectives=library
    )
    assert_same_state(model.getModel().net, train_alone(columns))
