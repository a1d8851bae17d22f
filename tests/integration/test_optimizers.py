"""Optimizers on two ranks train as in one process, and resume bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import optimizers
import pytest
import torch
from estimators import exact_params
from optimizers import (
    Make,
    import_timm_optimizers,
    make_net,
    other_optimizers,
    step_of,
    torch_optimizers,
    train_alone,
)
from pytorch_lightning import LightningModule
from rank_pool import StandingBackend, shared_ranks
from reference import global_batches, write_rows

from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

ROWS, BATCH, EPOCHS = 37, 8, 2


@pytest.fixture(scope="module")
def ranks() -> StandingBackend:
    cloudpickle.register_pickle_by_value(optimizers)
    backend = shared_ranks(2)
    backend.run(import_timm_optimizers_there)
    return backend


def import_timm_optimizers_there() -> None:
    import_timm_optimizers()


def settings(backend: Any, store: Any, run_id: str, epochs: int) -> dict[str, Any]:
    dtypes = {"features": "float64", "label": "float64"}
    more = {"epochs": epochs, "run_id": run_id, "column_dtypes": dtypes, "dry_run": False}
    return exact_params(backend, store, batch_size=BATCH, **more)


def mse_of_any_dtype(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, label.to(output.dtype))


def fit_torch(name: str, make: Make, common: dict[str, Any]) -> torch.nn.Module:
    net = make_net(name)
    optimizer = make(list(net.parameters()))
    estimator = TorchEstimator(
        **common,
        model=net,
        optimizer=optimizer,
        loss=mse_of_any_dtype,
        train_minibatch_fn=step_of(optimizer),
    )
    return estimator.fit_on_parquet().getModel()


class Module(LightningModule):
    def __init__(self, name: str, make: Make) -> None:
        super().__init__()
        self.net = make_net(name)
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch["features"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return self.make(list(self.net.parameters()))


def fit_lightning(name: str, make: Make, common: dict[str, Any]) -> torch.nn.Module:
    estimator = LightningEstimator(**common, model=Module(name, make), logger=False)
    return estimator.fit_on_parquet().getModel().net


def assert_trains(
    ranks: Any, store: Any, fit: Any, name: str, make: Make, expected: Any, whole: bool
) -> None:
    """Train for one epoch, resume for another one, and compare with one process."""
    for epochs in (1, EPOCHS):
        found = fit(name, make, settings(ranks, store, f"{fit.__name__}-{name}-parts", epochs))
    assert len({result.weights_digest for result in ranks.results}) == 1
    for (key, value), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-8, atol=1e-10, msg=f"{name} {key}")
    if whole:
        once = fit(name, make, settings(ranks, store, f"{fit.__name__}-{name}-whole", EPOCHS))
        for value, other in zip(found.parameters(), once.parameters(), strict=True):
            assert torch.equal(value, other), f"{name} does not resume bit for bit"


def check_all(ranks: Any, store: Any, fits: Any, makers: dict[str, Make], whole: bool) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    x, y = (torch.from_numpy(columns[name]).double() for name in ("features", "label"))
    batches = [(x[rows], y[rows]) for rows in global_batches(ROWS, 2, BATCH)]
    failures = {}
    for name, make in makers.items():
        expected = train_alone(name, make, batches, EPOCHS)
        for fit in fits:
            try:
                assert_trains(ranks, store, fit, name, make, expected, whole)
            except Exception as error:
                failures[f"{fit.__name__} {name}"] = f"{type(error).__name__}: {error}"
    assert not failures, "\n".join(f"{k}: {v[-1500:]}" for k, v in failures.items())


def test_optimizers_of_torch_train_and_resume_as_one_process(ranks: Any, store: Any) -> None:
    check_all(ranks, store, [fit_torch], torch_optimizers(), whole=False)


def chosen(names: list[str]) -> dict[str, Make]:
    makers = {**torch_optimizers(), **other_optimizers()}
    return {name: makers[name] for name in names}


def test_optimizers_of_other_packages_train_and_resume_as_one_process(
    ranks: Any, store: Any
) -> None:
    names = ["lion_pytorch.Lion", "timm.optim.Lookahead", "schedulefree.AdamWScheduleFree"]
    names += ["schedulefree.SGDScheduleFreeClosure", "own.SlowWeights"]
    check_all(ranks, store, [fit_torch], chosen(names), whole=True)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("fit", [fit_torch, fit_lightning])
def test_all_optimizers_train_and_resume_bit_for_bit(ranks: Any, store: Any, fit: Any) -> None:
    makers = {**torch_optimizers(), **other_optimizers()}
    if fit is fit_lightning:  # which trains in the closure that this optimizer does not call
        del makers["own.SlowWeights"]
    check_all(ranks, store, [fit], makers, whole=True)


class Noisy(torch.optim.SGD):
    """Optimizer that adds different noise to the weights on each rank."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += 0.01 * torch.randn_like(parameter)
        return loss


def make_kron(parameters: Any) -> torch.optim.Optimizer:
    return import_timm_optimizers().get_optimizer_class("kron")(parameters, lr=0.01)


@pytest.mark.parametrize(
    "make",
    [
        Noisy,
        # Compiling its steps takes much longer than the training.
        pytest.param(make_kron, marks=pytest.mark.soak),
    ],
)
def test_an_optimizer_that_draws_random_numbers_is_rejected(
    ranks: Any, store: Any, make: Make
) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    # The error comes from the digests of the ranks after the first epoch.
    message = r"After epoch 0, .* different weights: net.0.weight, net.0.bias, .*'random'"
    with pytest.raises(AssertionError, match=message):
        fit_torch("", make, settings(ranks, store, "random", 3))
