"""Last batches of one row: batch normalization, and networks that squeeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import exact_params
from fewer_ranks import FourShards
from pytorch_lightning import LightningModule
from rank_pool import shared_ranks
from reference import WIDTH, assert_same_weights, global_batches, write_rows
from torch.nn import functional

from hvd_estimators import lightning as hvd_lightning
from hvd_estimators import torch as hvd_torch
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration


class FourShardsEstimator(FourShards, TorchEstimator):
    pass


def normalized() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
    )


def train_parts(columns: Any, steps: list[list[slice]], epochs: int) -> torch.nn.Module:
    """Train in one process that normalizes each part of a step by itself, as ranks do."""
    net = normalized()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x, y = (torch.from_numpy(columns[name]) for name in ("features", "label"))
    for parts in steps * epochs:
        outputs = torch.cat([net(x[part]).reshape(-1) for part in parts])
        optimizer.zero_grad()
        ((outputs - torch.cat([y[part] for part in parts])) ** 2).mean().backward()
        optimizer.step()
    return net


class NormalizedModule(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = normalized()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(self.net(batch["features"])[:, 0], batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "dry_run"),
    [
        (TorchEstimator, True),
        (TorchEstimator, False),
        (FourShardsEstimator, True),
        (FourShardsEstimator, False),
        (LightningEstimator, True),
    ],
)
def test_batch_normalization_gets_two_rows_on_each_rank(
    store: Any, kind: Any, dry_run: bool
) -> None:
    shards = 4 if kind is FourShardsEstimator else 2
    columns = write_rows(Path(store.get_train_data_path()), 17 * shards)
    given: dict[str, Any] = {"model": NormalizedModule()}
    if kind is not LightningEstimator:
        net = normalized()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        given = {"model": net, "optimizer": optimizer, "loss": functional.mse_loss}
    params = exact_params(shared_ranks(2), store, batch_size=16, epochs=2, dry_run=dry_run)
    model = kind(**params, **given).fit_on_parquet()
    starts = [17 * shard for shard in range(shards)]
    steps = [[slice(s, s + 15) for s in starts], [slice(s + 15, s + 17) for s in starts]]
    found = model.getModel()
    found = found.net if kind is LightningEstimator else found
    assert_same_weights(found, train_parts(columns, steps, 2))


class Squeezed(torch.nn.Module):
    """Network of many tutorials: one row gives an output without the dimension of rows."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear = torch.nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze()


class SqueezedModule(LightningModule):
    def __init__(self, label: str, outputs: int) -> None:
        super().__init__()
        self.label = label
        self.net = Squeezed(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self(batch["features"])
        return functional.mse_loss(output, batch[self.label].reshape(output.shape))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize(("label", "outputs"), [("label", 1), ("features", WIDTH)])
@pytest.mark.parametrize("framework", ["torch", "LightningModule"])
def test_networks_that_squeeze_train_and_predict_one_row(
    store: Any, tmp_path: Path, framework: str, label: str, outputs: int
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 33)
    write_rows(Path(store.get_val_data_path()), 3, seed=1)
    net: Any = Squeezed(outputs)
    params: dict[str, Any] = {
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05),
        "loss": functional.mse_loss,
        "metrics": [functional.l1_loss],
        "validation": True,
    }
    if framework == "LightningModule":
        net, params = SqueezedModule(label, outputs), {}
    kind = TorchEstimator if framework == "torch" else LightningEstimator
    model = kind(
        **params,
        **exact_params(
            shared_ranks(2),
            store,
            model=net,
            label_cols=[label],
            batch_size=16,
            val_batch_size=1,
            epochs=2,
        ),
    ).fit_on_parquet()

    x, y = torch.from_numpy(columns["features"]), torch.from_numpy(columns[label])
    alone = torch.nn.Linear(WIDTH, outputs)
    alone.load_state_dict(Squeezed(outputs).linear.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    batches = global_batches(33, 2, 16)
    assert len(batches[-1]) == 2  # one row on each rank
    for rows in batches * 2:
        optimizer.zero_grad()
        ((alone(x[rows]) - y[rows].reshape(-1, outputs)) ** 2).mean().backward()
        optimizer.step()
    linear = (model.getModel().net if framework == "LightningModule" else model.getModel()).linear
    assert_same_weights(linear, alone)

    expected = alone(x).detach().numpy()[:, 0] if outputs == 1 else alone(x).detach().numpy()
    model.save(str(tmp_path / "model"))
    package = hvd_torch if framework == "torch" else hvd_lightning
    for rows in (1, 3):
        # The last of three rows is a batch of its own.
        predictor = package.load_predictor(str(tmp_path / "model"), batch_size=2)
        found = predictor.predict({"features": columns["features"][:rows]})[f"{label}__output"]
        np.testing.assert_allclose(found, expected[:rows], rtol=1e-4, atol=1e-5)
    if framework == "LightningModule":
        return
    document, load, combine = model._make_evaluator()
    sums = load(document).start()
    for row in range(3):
        sums.add({name: array[row : row + 1] for name, array in columns.items()})
    (count, values), error = combine([sums.state()]), expected[:3] - columns[label][:3]
    assert count == 3
    assert values["loss"] == pytest.approx(float((error**2).mean()), rel=1e-4)
    assert values["l1_loss"] == pytest.approx(float(np.abs(error).mean()), rel=1e-4)
