"""Weights of a loss train on two ranks as in one process, and a resumed run restores them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from estimators import exact_params
from rank_pool import StandingBackend, shared_ranks
from reference import global_batches, write_rows

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

ROWS, BATCH, EPOCHS, CLASSES, SIZE = 37, 8, 2, 3, 5

Make = Callable[[], torch.nn.Module]


class Proxies(torch.nn.Module):
    """Loss with one trained vector per class, as in metric learning."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = torch.nn.Parameter(torch.randn(CLASSES, SIZE, dtype=torch.float64))

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = embeddings @ self.proxies.T
        return torch.nn.functional.cross_entropy(scores, labels)


def make_net() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Linear(4, SIZE).double()


def classes_of(label: torch.Tensor) -> torch.Tensor:
    return label.abs().long() % CLASSES


@pytest.fixture(scope="module")
def ranks() -> StandingBackend:
    return shared_ranks(2)


def settings(ranks: Any, store: Any, run_id: str, epochs: int) -> dict[str, Any]:
    more = {"epochs": epochs, "run_id": run_id, "column_dtypes": {"features": "float64"}}
    return exact_params(ranks, store, batch_size=BATCH, **more)


class Recorder:
    """Callback that writes a loss's weights to the folder of the run's epochs."""

    def __init__(self, loss_func: torch.nn.Module, folder: Path) -> None:
        self._functions = (lambda: loss_func,)
        self._folder = folder

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        from hvd_estimators.torch.collectives import current

        state = self._functions[0]().state_dict()
        torch.save(state, self._folder / f"{epoch}-{current().rank}.pt")


def fit_with_own_optimizer(make: Make, common: dict[str, Any], folder: Path) -> list[Any]:
    """Train as in the README with two optimizers; return the weights of net and loss."""
    net, loss_func = make_net(), make()
    loss_optimizer = torch.optim.SGD(loss_func.parameters(), lr=0.5, momentum=0.9)

    def step(model: Any, optimizer: Any, _: Any, loss_fn: Any, inputs: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        loss_optimizer.zero_grad()
        embeddings = model(*inputs)
        loss = loss_fn.scale(loss_func(embeddings, classes_of(labels[0])))
        loss.backward()
        optimizer.step()
        loss_optimizer.step()
        return embeddings, loss

    model = TorchEstimator(
        **common,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        train_minibatch_fn=step,
        stateful=[loss_optimizer],
        callbacks=[Recorder(loss_func, folder)],
    ).fit_on_parquet()
    of_ranks = [torch.load(folder / f"{common['epochs'] - 1}-{rank}.pt") for rank in (0, 1)]
    for name, value in of_ranks[0].items():
        assert torch.equal(value, of_ranks[1][name]), f"ranks have different {name}"
    return [*model.getModel().state_dict().values(), *of_ranks[0].values()]


def loss_of_class(loss_func: Any) -> Any:
    return lambda output, label: loss_func(output, classes_of(label))


def fit_in_module(make: Make, common: dict[str, Any], folder: Path) -> list[Any]:
    """Train with one optimizer, with the loss in the module."""
    net = make_net()
    net.loss_func = make()
    groups = [
        {"params": [net.weight, net.bias], "lr": 0.1},
        {"params": net.loss_func.parameters(), "lr": 0.5, "momentum": 0.9},
    ]
    model = TorchEstimator(
        **common, model=net, optimizer=torch.optim.SGD(groups), loss=loss_of_class(net.loss_func)
    ).fit_on_parquet()
    return list(model.getModel().state_dict().values())


def train_alone(make: Make, batches: Any) -> list[Any]:
    net, loss_func = make_net(), make()
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1),
        torch.optim.SGD(loss_func.parameters(), lr=0.5, momentum=0.9),
    ]
    for x, y in batches * EPOCHS:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_func(net(x), classes_of(y)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [*net.state_dict().values(), *loss_func.state_dict().values()]


def seeded(make: Make) -> Make:
    def made() -> torch.nn.Module:
        torch.manual_seed(11)
        return make().double()

    return made


def check(ranks: Any, store: Any, tmp_path: Path, name: str, make: Make, fit: Any) -> None:
    """Train for one epoch, resume for another one, and compare with one process."""
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    x, y = (torch.from_numpy(columns[c]) for c in ("features", "label"))
    batches = [(x[rows].double(), y[rows]) for rows in global_batches(ROWS, 2, BATCH)]
    expected, start = train_alone(make, batches), make().state_dict()
    assert not all(map(torch.equal, expected[2:], start.values())), "the loss is not trained"
    for epochs in (1, EPOCHS):
        common = settings(ranks, store, f"{fit.__name__}-{name}", epochs)
        found = fit(make, common, tmp_path)
    assert len({result.weights_digest for result in ranks.results}) == 1
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fit", [fit_with_own_optimizer, fit_in_module])
def test_weights_of_a_loss_train_and_resume_as_in_one_process(
    ranks: Any, store: Any, tmp_path: Path, fit: Any
) -> None:
    check(ranks, store, tmp_path, "proxies", seeded(Proxies), fit)


def test_weights_of_a_loss_in_the_optimizer_of_the_model_are_an_error(store: Any) -> None:
    net, loss_func = make_net(), Proxies()
    optimizer = torch.optim.SGD([*net.parameters(), *loss_func.parameters()], lr=0.1)
    common = settings(None, store, "error", 1)
    estimator = TorchEstimator(**common, model=net, optimizer=optimizer, loss=loss_func)
    with pytest.raises(ParamError, match=r"put the loss into the module .*loss_func = loss_func"):
        estimator.fit_on_parquet()
