"""Fine-tuning of a residual network with batch normalization on few rows, as in SynapseML."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from lightning_reference import fit
from parquet_files import write_columns
from pytorch_lightning import LightningModule
from reference import assert_same_weights

pytestmark = pytest.mark.integration

F = torch.nn.functional
BATCH, SIZE = 16, 6


class Block(torch.nn.Module):
    """Two convolutions with batch normalization, plus the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norms[0](self.convolutions[0](x)).relu()
        return (x + self.norms[1](self.convolutions[1](hidden))).relu()


class Residual(LightningModule):
    """Frozen stem, tuned block, and head with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), Block(4)).requires_grad_(False)
        self.block = Block(4)
        self.head = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.stem(image)).mean(dim=(2, 3)))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"].long())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        tuned = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(tuned, lr=0.05, momentum=0.9)


def write(store: Any, rows: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    columns = {
        "image": rng.normal(size=(rows, 3 * SIZE * SIZE)).astype(np.float32),
        "label": rng.integers(0, 3, rows).astype(np.float32),
    }
    for path in (store.get_train_data_path(), store.get_val_data_path()):
        # Data of many files can have a first row group as small as this one.
        write_columns(path, columns, row_group_size=1)
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return {**tensors, "image": tensors["image"].reshape(rows, 3, SIZE, SIZE)}


def as_image(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "image": row["image"].reshape(3, SIZE, SIZE)}


def tune(backend: Any, store: Any, **params: Any) -> Any:
    return fit(
        backend,
        store,
        model=Residual(),
        feature_cols=["image"],
        transformation_fn=as_image,
        transformation_edit_fields=[("image", np.float32, (3, SIZE, SIZE), False)],
        validation=True,
        **params,
    )


@pytest.mark.parametrize(
    ("rows", "last"),
    [
        pytest.param(48, 16, id="a smaller last batch"),
        # 17 rows on each rank would leave one, which has no statistics.
        pytest.param(34, 15, id="no last batch of one row"),
    ],
)
def test_few_rows_train_two_ranks(backend: Any, store: Any, rows: int, last: int) -> None:
    columns, share = write(store, rows), rows // 2
    model = tune(backend, store, batch_size=BATCH, epochs=2)

    # Each rank normalizes its batches; gradients are the mean over all rows.
    expected = Residual().train()
    optimizer = expected.configure_optimizers()
    statistics = [copy.deepcopy(expected) for _ in range(2)]
    for _ in range(2):
        for start, stop in ((0, last), (last, share)):
            gradients = []
            for rank, own in enumerate(statistics):
                own.load_state_dict(
                    {**own.state_dict(), **dict(expected.named_parameters())}, strict=True
                )
                batch = slice(share * rank + start, share * rank + stop)
                own.zero_grad()
                own.loss({name: column[batch] for name, column in columns.items()}).backward()
                gradients.append([p.grad for p in own.parameters() if p.requires_grad])
            tuned = [p for p in expected.parameters() if p.requires_grad]
            for parameter, *both in zip(tuned, *gradients, strict=True):
                parameter.grad = sum(both) / 2
            optimizer.step()
    assert_same_weights(model.getModel(), expected)
    assert len({result.weights_digest for result in backend.results}) == 1
    assert model.getHistory()[-1]["validation"]["val_loss"] > 0
