"""Optimizers, callbacks and averaged weights of Lightning on ranks match one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_reference import Regression, fit
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LearningRateMonitor, StochasticWeightAveraging
from pytorch_lightning.loggers import CSVLogger
from reference import (
    OPTIMIZERS,
    assert_same_weights,
    global_batches,
    make_net,
    train_alone,
    write_rows,
)
from variants import others_in_soak

pytestmark = pytest.mark.integration


class Adversarial(LightningModule):
    """Two optimizers that step alternately."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = make_net()
        self.critic = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        play(self.net, self.critic, batch, self.optimizers(), self.manual_backward)

    def configure_optimizers(self) -> Any:
        return optimizers(self.net, self.critic)


def optimizers(net: torch.nn.Module, critic: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(net.parameters(), lr=0.01),
        torch.optim.SGD(critic.parameters(), lr=0.02, momentum=0.5),
    ]


def play(net: Any, critic: Any, batch: Any, pair: Any, backward: Any) -> None:
    generator, discriminator = pair
    made = net(batch["features"])
    generator.zero_grad()
    backward(((made.reshape(-1) - batch["label"]) ** 2).mean() - critic(made).mean())
    generator.step()
    discriminator.zero_grad()
    made = net(batch["features"]).detach()
    backward(critic(made).square().mean() - critic(batch["label"][:, None]).tanh().mean())
    discriminator.step()


@pytest.mark.parametrize("library", others_in_soak("torch", "horovod"))
def test_a_gan_trains_as_one_process(backend: Any, store: Any, library: str) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 65)
    module = Adversarial()
    net, critic = make_net(), torch.nn.Linear(1, 1)
    critic.load_state_dict(module.critic.state_dict())
    pair = optimizers(net, critic)
    model = fit(backend, store, model=module, batch_size=16, epochs=2, collectives=library)
    for _ in range(2):
        for rows in global_batches(65, 2, 16):
            batch = {name: torch.from_numpy(columns[name][rows]) for name in ("features", "label")}
            play(net, critic, batch, pair, torch.Tensor.backward)
    assert_same_weights(model.getModel().net, net)
    assert_same_weights(model.getModel().critic, critic)


class Recorder(Callback):
    """Callback that logs its calls and the metrics to a file per rank."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(("batch", trainer.global_step))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append(("validation", trainer.current_epoch, values))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("epoch", trainer.current_epoch))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        import json

        path = Path(self.directory) / f"rank-{trainer.global_rank}.json"
        path.write_text(json.dumps(self.seen))


def test_callbacks_get_the_same_calls_and_exact_values_on_each_rank(
    backend: Any, store: Any, tmp_path: Path
) -> None:
    import json

    columns = write_rows(Path(store.get_train_data_path()), 65)
    held_out = write_rows(Path(store.get_val_data_path()), 101, seed=1)
    model = fit(
        backend,
        store,
        validation=0.5,
        batch_size=16,
        val_batch_size=10,
        epochs=2,
        callbacks=[Recorder(str(tmp_path))],
    )
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    assert [entry[0] for entry in seen[0]] == [*["batch"] * 3, "validation", "epoch"] * 2
    with torch.no_grad():
        output = model.getModel()(torch.from_numpy(held_out["features"])).numpy()
    errors = output - held_out["label"]
    last = seen[0][-2][2]
    assert last["val_loss"] == pytest.approx(float((errors**2).mean()), rel=1e-5)
    assert last["val_metric"] == pytest.approx(float((errors**2).mean()), rel=1e-5)
    assert last["val_most"] == pytest.approx(float(np.abs(errors).max()), rel=1e-5)
    assert model.getHistory()[-1]["validation"]["val_loss"] == last["val_loss"]
    # Values are logged per step by default in training_step: the result is that of the last step.
    batches = global_batches(65, 2, 16)
    before = train_alone(columns, (batches * 2)[:-1], OPTIMIZERS["adam"], epochs=1)
    with torch.no_grad():
        output = before(torch.from_numpy(columns["features"][batches[-1]])).reshape(-1).numpy()
    expected = ((output - columns["label"][batches[-1]]) ** 2).mean()
    found = model.getHistory()[-1]["train"]["train_mse"]
    assert found == pytest.approx(expected.item(), rel=1e-4)


def test_rates_are_scaled_for_training_and_logged_unscaled(backend: Any, store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    model = fit(
        backend,
        store,
        model=Regression("sgd"),
        batch_size=16,
        epochs=2,
        scale_learning_rate=True,
        callbacks=[LearningRateMonitor()],
        logger=CSVLogger("/nowhere", name="", version=""),
        log_every_n_steps=1,
        run_id="rates",
    )
    expected = train_alone(
        columns,
        global_batches(64, 2, 16),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=2,
    )
    assert_same_weights(model.getModel().net, expected)
    text = Path(store.get_logs_path("rates"), "metrics.csv").read_text()
    assert "lr-SGD" in text.splitlines()[0]
    assert "0.05" in text
    assert "0.1" not in text


def test_weights_are_averaged_over_the_last_epochs(backend: Any, store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    model = fit(
        backend, store, model=Regression("sgd"), batch_size=16, epochs=3, callbacks=[average]
    )
    # Averaging starts with the second epoch and uses the weights at the start of each epoch.
    nets = [
        train_alone(columns, global_batches(64, 2, 16), OPTIMIZERS["sgd"], epochs).state_dict()
        for epochs in (1, 2)
    ]
    expected = make_net()
    expected.load_state_dict({name: (nets[0][name] + nets[1][name]) / 2 for name in nets[0]})
    assert_same_weights(model.getModel().net, expected)
