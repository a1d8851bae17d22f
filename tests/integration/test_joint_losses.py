"""Losses of several outputs or without labels, and outputs without a label: as one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_reference import fit as fit_lightning
from parquet_files import write_columns
from pytorch_lightning import LightningModule
from reference import assert_same_weights, global_batches

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator, load_predictor

pytestmark = pytest.mark.integration

F = torch.nn.functional
ROWS, BATCH = 37, 6
"""Of 19 and 18 rows for two ranks: the last batches are of different sizes."""


def write(store: Store) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=(ROWS, 4)).astype(np.float32),
        "noise": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "y": rng.integers(0, 3, ROWS),
        "w": rng.uniform(0.1, 3.0, ROWS).astype(np.float32),
    }
    for path in (store.get_train_data_path(), store.get_val_data_path()):
        write_columns(path, columns, row_group_size=17)
    return {name: torch.from_numpy(array) for name, array in columns.items()}


class Variational(torch.nn.Module):
    """Three outputs, one loss, no labels; the noise is a column, which makes it reproducible."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder, self.decoder = torch.nn.Linear(4, 4), torch.nn.Linear(2, 4)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> Any:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        latent = mean + noise * (0.5 * log_variance).exp()
        return self.decoder(latent), mean, log_variance


def elbo(outputs: Any, x: torch.Tensor) -> torch.Tensor:
    reconstruction, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp())
    return (reconstruction - x).pow(2).sum(dim=1).mean() + divergence.sum(dim=1).mean()


class Attentive(torch.nn.Module):
    """Logits and a term of the loss, as returned by TabNet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mask, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        mask = self.mask(x).softmax(dim=1)
        return {"logits": self.head(mask * x), "sparsity": -(mask * mask.log()).sum(dim=1)}


class Generating(Attentive):
    """Logits, and a loss that is None without targets, as returned by minGPT."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)["logits"], None


def weighted(outputs: Any, labels: Any, sample_weights: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(outputs["logits"], labels[0], reduction="none")
    return ((losses + 0.3 * outputs["sparsity"]) * sample_weights).mean()


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).float().mean()


def train_alone(
    module: torch.nn.Module,
    loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    columns: dict[str, torch.Tensor],
    epochs: int = 2,
) -> torch.nn.Module:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(epochs):
        for rows in global_batches(ROWS, 2, BATCH):
            optimizer.zero_grad()
            loss(module, {name: column[rows] for name, column in columns.items()}).backward()
            optimizer.step()
    return module


def fit_torch(backend: Any, store: Store, **params: Any) -> Any:
    fixed = {"shuffle": False, "scale_learning_rate": False, "random_seed": 3, "verbose": 0}
    return TorchEstimator(backend=backend, store=store, **{**fixed, **params}).fit_on_parquet()


def of_vae(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return elbo(module(batch["x"], batch["noise"]), batch["x"])


def of_weighted(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return weighted(module(batch["x"]), [batch["y"]], batch["w"])


def of_logits(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"])[0], batch["y"])


def own_step(
    model: Any, optimizer: Any, arrange: Any, loss_fn: Any, inputs: Any, labels: Any
) -> Any:
    optimizer.zero_grad()
    outputs, arranged = arrange(model(*inputs), labels)
    loss = loss_fn(outputs, arranged)
    loss.backward()
    optimizer.step()
    return outputs, loss


VAE: dict[str, Any] = {
    "loss": lambda outputs, inputs: elbo(outputs, inputs[0]),
    "loss_form": "joint",
    "feature_cols": ["x", "noise"],
    "label_cols": [],
    "outputs": [0],
}
LABELLED: dict[str, Any] = {
    "feature_cols": ["x"],
    "label_cols": ["y"],
    "column_dtypes": {"y": "int64"},
    "metrics": [accuracy],
}
CASES = {
    "vae": (Variational, of_vae, VAE),
    "vae by an own step": (Variational, of_vae, {**VAE, "train_minibatch_fn": own_step}),
    "weights and a named output": (
        Attentive,
        of_weighted,
        {
            **LABELLED,
            "loss": weighted,
            "loss_form": "joint",
            "sample_weight_col": "w",
            "outputs": "logits",
        },
    ),
    "a loss that is None": (Generating, of_logits, {**LABELLED, "loss": F.cross_entropy}),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"))


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("case", CASES)
def test_joint_losses_train_as_one_process(
    backend: Any, store: Store, tmp_path: Path, case: str
) -> None:
    kind, loss, params = CASES[case]
    columns = write(store)
    given = kind()
    model = fit_torch(
        backend,
        store,
        model=given,
        optimizer=torch.optim.Adam(given.parameters(), lr=0.01),
        batch_size=BATCH,
        epochs=2,
        validation=True,
        **params,
    )
    expected = train_alone(kind(), loss, columns)
    assert_same_weights(model.getModel(), expected)

    measured = model.getHistory()[-1]["validation"]
    expected.eval()
    assert measured["loss"] == pytest.approx(loss(expected, columns).item(), rel=1e-4)

    # The predictions are the selected output, before and after saving.
    names = params["feature_cols"]
    raw = expected(*(columns[name] for name in names))
    prediction = raw["logits"] if isinstance(raw, dict) else raw[0]
    path = str(tmp_path / "saved")
    model.save(path)
    loaded = load_predictor(path)
    column, *classes = loaded.output_columns
    assert classes == (["prediction"] if params["loss"] is F.cross_entropy else [])
    assert column == ("y__output" if params["label_cols"] else "output")
    given_columns = {name: columns[name].numpy() for name in names}
    np.testing.assert_allclose(
        loaded.predict(given_columns)[column], prediction.detach().numpy(), rtol=1e-4, atol=1e-5
    )


class VariationalSteps(Variational, LightningModule):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return of_vae(self, batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", of_vae(self, batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_a_lightning_module_trains_without_labels(
    backend: Any, store: Store, tmp_path: Path
) -> None:
    columns = write(store)
    model = fit_lightning(
        backend,
        store,
        model=VariationalSteps(),
        feature_cols=["x", "noise"],
        label_cols=[],
        outputs=[0, 1],
        batch_size=BATCH,
        epochs=2,
        validation=True,
    )
    expected = train_alone(Variational(), of_vae, columns)
    assert_same_weights(model.getModel(), expected)
    loss = of_vae(expected, columns).item()
    assert model.getHistory()[-1]["validation"]["val_loss"] == pytest.approx(loss, rel=1e-4)
    assert model.getOutputCols() == ["output_0", "output_1"]
    assert model.getOutputShapes() == [[4], [2]]
