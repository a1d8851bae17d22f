"""Python state of modules and stateful objects is returned, saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import resuming
import torch
from lightning_reference import fit as fit_lightning
from pytorch_lightning import LightningModule
from reference import fit, make_net, write_rows
from resuming import kept_checkpoints
from test_resuming import assert_equal_bits

pytestmark = pytest.mark.integration

ROWS, BATCH = 64, 8
STEPS = ROWS // BATCH // 2


def setup_module() -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(resuming)


class Stepping(torch.nn.Module):
    """Module whose outputs depend on its Python counter of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.steps = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.seen.append(len(x))
        return self.net(x) * (1 + 0.1 * self.steps)


class Remembering(Stepping):
    """The same module with extra state for checkpoints."""

    def get_extra_state(self) -> Any:
        return {"steps": self.steps, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.steps, self.seen = state["steps"], state["seen"]


class Steps(LightningModule):
    """Module around a counting net, with a scheduler unknown to Lightning."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net
        self.epochs = 0
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def on_train_epoch_start(self) -> None:
        self.rates_of_epoch: list[float] = []
        # A resumed run calls this hook again in the epoch that it resumes.
        for group in self.optimizers().param_groups:
            group["momentum"] = 0.9 * group["momentum"]
        self.epochs += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self(batch["features"])[:, 0], batch["label"])
        self.losses.append(loss.detach())
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.lr_scheduler.step()
        self.rates_of_epoch.append(self.lr_scheduler.get_last_lr()[0])

    def on_train_epoch_end(self) -> None:
        self.log("rate", self.rates_of_epoch[-1])
        self.log("mean", torch.stack(self.losses).mean())
        self.losses.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)
        # As in published programs: a schedule for the whole run, stepped by the module.
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 3 * STEPS)
        return optimizer


class Scheduling:
    """Callback that leaves a scheduler on the module, where the module could also use it."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        module.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.module = module

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.module.scheduler.step()


def torch_run(store: Any, backend: Any, run_id: str, net: Any, **params: Any) -> Any:
    given = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5)}
    settings = {"run_id": run_id, "batch_size": BATCH, "backend": backend, **given, **params}
    return fit(store, 2, "sgd", **settings)[0]


def lightning_run(store: Any, backend: Any, run_id: str, net: Any, **params: Any) -> Any:
    settings = {"model": Steps(net), "run_id": run_id, "batch_size": BATCH, **params}
    return fit_lightning(backend, store, **settings)


def predictions(model: Any, columns: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.getModel()(torch.from_numpy(columns["features"][:4]))


@pytest.mark.parametrize("run", [torch_run, lightning_run])
def test_python_state_is_returned_and_extra_state_resumes(
    backend: Any, store: Any, run: Any
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    net = Stepping()
    plain = run(store, backend, "plain", net, epochs=2)
    assert net.steps == 0
    counting = plain.getModel() if run is torch_run else plain.getModel().net
    assert counting.steps == 2 * STEPS
    assert counting.seen == [BATCH] * 2 * STEPS
    assert not counting.training
    expected = counting.net(torch.from_numpy(columns["features"][:4])) * (1 + 0.1 * 2 * STEPS)
    torch.testing.assert_close(predictions(plain, columns), expected.detach())

    further: dict[str, Any] = {"epochs": 3}
    if run is torch_run:
        further["callbacks"] = [Scheduling()]
    whole = run(store, backend, "whole", Remembering(), **further)
    kept = {"checkpoint_every_n_steps": 3, "keep_checkpoints": 99, **further}
    run(store, backend, "kept", Remembering(), **kept)
    found = []
    for run_id, position in kept_checkpoints(store, "kept"):
        found.append(position)
        resumed = run(store, backend, run_id, Remembering(), **further)
        assert_equal_bits(resumed.getModel().state_dict(), whole.getModel().state_dict())
        assert_equal_bits(predictions(resumed, columns), predictions(whole, columns))
        if run is lightning_run and not position[1]:
            assert resumed.getHistory() == whole.getHistory()
    assert {(0, 48), (1, 0), (1, 32), (3, 0)} <= {*found}
    if run is lightning_run:
        # The schedule covers three epochs, in a run that ended after two.
        parts = run(store, backend, "parts", Remembering(), epochs=2)
        assert parts.getHistory()[-1]["train"]["rate"] == pytest.approx(0.02 / 3)
        parts = run(store, backend, "parts", Remembering(), epochs=3)
        assert parts.getHistory() == whole.getHistory()
        assert parts.getHistory()[-1]["train"]["rate"] == pytest.approx(0)
        assert_equal_bits(parts.getModel().state_dict(), whole.getModel().state_dict())
