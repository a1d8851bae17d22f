"""Losses with denominators other than rows: ranks train and evaluate as one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import exact_params
from parquet_files import write_columns
from pytorch_lightning import LightningModule
from reference import assert_same_weights, global_batches
from torch.nn import functional

from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

TOKENS, LENGTH, ROWS, BATCH = 9, 5, 23, 4
RATE = 0.3
CLASS_WEIGHT = torch.linspace(0.2, 2.0, TOKENS)


class TokenNet(torch.nn.Module):
    """Net that returns logits of each token, with classes as second dimension, and a number."""

    def __init__(self, with_number: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(TOKENS, 6)
        self.logits = torch.nn.Linear(6, TOKENS)
        self.number = torch.nn.Linear(6, 1)
        self.with_number = with_number

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = torch.tanh(self.embedding(input_ids))
        logits = self.logits(hidden).transpose(1, 2)
        if not self.with_number:
            return logits
        return logits, self.number(hidden.mean(dim=1)).reshape(-1)


def write_tokens(path: Path, rows: int = ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write rows of tokens, some of them padding, and return them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, rows)
    lengths[: rows // 2] = 1  # Rank 0 has fewer targets than rank 1.
    mask = np.arange(LENGTH) < lengths[:, None]
    columns = {
        "input_ids": np.where(mask, rng.integers(1, TOKENS, (rows, LENGTH)), 0),
        "label": np.where(mask, rng.integers(1, TOKENS, (rows, LENGTH)), -100),
        "number": rng.normal(size=rows).astype(np.float32),
    }
    for index, part in enumerate(np.array_split(np.arange(rows), 2)):
        rows_of_file = {name: array[part] for name, array in columns.items()}
        write_columns(path, rows_of_file, name=f"part-{index}.parquet")
    return {name: torch.from_numpy(array) for name, array in columns.items()}


def write_both(store: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write training and validation rows."""
    train = write_tokens(Path(store.get_train_data_path()))
    return train, write_tokens(Path(store.get_val_data_path()), 11, seed=1)


Step = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def train_alone(
    net: torch.nn.Module,
    columns: dict[str, torch.Tensor],
    loss: Step,
    ranks: int = 2,
    passes: int = 1,
) -> torch.nn.Module:
    """Train an epoch in one process, over the global batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net.train()
    batches = global_batches(len(columns["label"]), ranks, BATCH)
    for first in range(0, len(batches), passes):
        rows = np.concatenate(batches[first : first + passes])
        optimizer.zero_grad()
        loss(net, {name: column[rows] for name, column in columns.items()}).backward()
        optimizer.step()
    return net.eval()


def by_tokens(net: Any, batch: Any, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(net(batch["input_ids"]), batch["label"], **options)


def stated(output: torch.Tensor, label: torch.Tensor) -> dict[str, Any]:
    return {"loss": functional.cross_entropy(output, label), "denominator": (label != -100).sum()}


def settings(backend: Any, store: Any, **params: Any) -> dict[str, Any]:
    labels = params.get("label_cols", ["label"])
    features = params.get("feature_cols", ["input_ids"])
    model = params["model"]
    if not isinstance(model, LightningModule):
        params.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=RATE))
        params.setdefault("loss", torch.nn.CrossEntropyLoss())
    dtypes = {c: "int64" for c in (*features, *labels) if c != "number"}
    own = {"feature_cols": features, "batch_size": BATCH, "epochs": 1, "column_dtypes": dtypes}
    return exact_params(backend, store, **{**own, **params})


def torch_fit(backend: Any, store: Any, **params: Any) -> Any:
    return TorchEstimator(**settings(backend, store, **params)).fit_on_parquet()


def lightning_fit(backend: Any, store: Any, **params: Any) -> Any:
    return LightningEstimator(**settings(backend, store, logger=False, **params)).fit_on_parquet()


def test_losses_of_several_labels_have_separate_denominators(backend: Any, store: Any) -> None:
    columns, held_out = write_both(store)
    model = torch_fit(
        backend,
        store,
        model=TokenNet(with_number=True),
        label_cols=["label", "number"],
        loss=[
            torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHT),
            functools.partial(functional.mse_loss, reduction="sum"),
        ],
        loss_weights=[0.75, 0.05],
        backward_passes_per_step=2,
        validation=0.5,
    )

    def loss(net: Any, batch: Any) -> torch.Tensor:
        logits, number = net(batch["input_ids"])
        tokens = functional.cross_entropy(logits, batch["label"], weight=CLASS_WEIGHT)
        return 0.75 * tokens + 0.05 * ((number - batch["number"]) ** 2).sum()

    expected = train_alone(TokenNet(with_number=True), columns, loss, passes=2)
    assert_same_weights(model.getModel(), expected)
    with torch.no_grad():
        reference = float(loss(model.getModel(), held_out))
    assert model.getHistory()[-1]["validation"]["loss"] == pytest.approx(reference, rel=1e-5)


def contrast(outputs: torch.Tensor) -> torch.Tensor:
    """Return a loss that compares each row with all others."""
    unit = functional.normalize(outputs.reshape(len(outputs), -1), dim=1)
    return (unit @ unit.T).logsumexp(dim=1).mean()


def test_a_contrastive_loss_of_gathered_outputs_trains_as_one_process(
    backend: Any, store: Any
) -> None:
    columns = write_tokens(Path(store.get_train_data_path()), 9)

    def step(
        model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any
    ) -> Any:
        import horovod.torch as hvd

        optimizer.zero_grad()
        outputs = model(*inputs).contiguous()
        everywhere = hvd.allgather(outputs, name="outputs")
        everywhere.register_hook(lambda gradient: gradient * hvd.size())
        loss = contrast(everywhere)
        loss.backward()
        optimizer.step()
        return outputs, loss

    model = torch_fit(backend, store, model=TokenNet(), train_minibatch_fn=step)
    expected = train_alone(TokenNet(), columns, lambda net, b: contrast(net(b["input_ids"])))
    assert_same_weights(model.getModel(), expected)


class ByLoss(torch.optim.Optimizer):
    """Optimizer with steps proportional to the closure's loss, which a line search also uses."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] * loss)
        return loss


class TokenModule(LightningModule):
    """Module that states its denominator, in automatic or manual optimization."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.net = TokenNet()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.found(batch)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            found = self.found(batch)
            self.manual_backward(found)
            return found["loss"]

        optimizer = self.optimizers()
        optimizer.step(closure)
        return None

    def found(self, batch: Any) -> dict[str, Any]:
        return stated(self.net(batch["input_ids"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return ByLoss(self.parameters())


def step_with_closure(
    model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any
) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(*inputs), labels)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    return model(*inputs), loss


def scaling_step(
    model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any
) -> Any:
    """Scale the closure's loss for the backward pass only."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = stated(model(*inputs), labels[0])
        loss_fn.scale(**found).backward()
        return found["loss"]

    loss = optimizer.step(closure)
    return model(*inputs), loss


@pytest.mark.parametrize("kind", ["torch step", "scaling step", "automatic", "manual"])
def test_closures_divide_the_loss_by_the_denominator_of_all_ranks(
    backend: Any, store: Any, kind: str
) -> None:
    columns = write_tokens(Path(store.get_train_data_path()))
    options: dict[str, Any] = {"weight": CLASS_WEIGHT} if kind == "torch step" else {}
    steps = {"scaling step": scaling_step, "torch step": step_with_closure}
    if kind in ("automatic", "manual"):
        model = TokenModule(manual=kind == "manual")
        net = lightning_fit(backend, store, model=model).getModel().net
    else:
        model = TokenNet()
        net = torch_fit(
            backend,
            store,
            model=model,
            optimizer=ByLoss(model.parameters()),
            loss=torch.nn.CrossEntropyLoss(**options),
            train_minibatch_fn=steps[kind],
            dry_run=False,
        ).getModel()
    expected = TokenNet()
    optimizer = ByLoss(expected.parameters())
    for rows in global_batches(len(columns["label"]), 2, BATCH):
        batch = {name: column[rows] for name, column in columns.items()}

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = by_tokens(expected, batch, **options)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_weights(net, expected)
