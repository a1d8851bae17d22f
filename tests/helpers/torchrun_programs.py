"""Programs for ``torchrun`` that do not use this package.

Each trains the same net on the same rows and returns its weights, at least on rank 0.
`train_alone` returns the expected weights.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

ROWS, STEPS = 16, 3


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.rand(ROWS, 3, generator=generator)
    return TensorDataset(features, features.sum(1, keepdim=True))


def make_net() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_on(net: torch.nn.Module, features: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = make_optimizer(net.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(features), labels).backward()
        optimizer.step()


def weights(net: torch.nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def train_alone() -> dict[str, list[Any]]:
    """Train in one process, on all rows in each step."""
    net = make_net()
    train_on(net, *rows().tensors)
    return weights(net)


def assert_trained_as_alone(found: dict[str, list[Any]]) -> None:
    expected = train_alone()
    assert found.keys() == expected.keys()
    assert make_net()[0].weight.tolist() != expected["0.weight"]
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values))


def own_rows() -> list[torch.Tensor]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [tensor[rank::size] for tensor in rows().tensors]


def train_ddp() -> dict[str, list[Any]]:
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    try:
        net = DistributedDataParallel(make_net())
        train_on(net, *own_rows())
        return weights(net.module)
    finally:
        torch.distributed.destroy_process_group()


def train_fsdp() -> dict[str, list[Any]]:
    """Train with sharded parameters, and save and load a full state dict."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    try:
        net = make_net()
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh)
        train_on(net, *own_rows())
        shard = net[0].weight.to_local()  # type: ignore[operator,union-attr]
        assert shard.numel() < 12
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(net, options=options)
        if torch.distributed.get_rank() > 0:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder, "state.pt"))
            saved = make_net()
            saved.load_state_dict(torch.load(Path(folder, "state.pt"), weights_only=True))
        return weights(saved)
    finally:
        torch.distributed.destroy_process_group()


def train_lightning() -> dict[str, list[Any]]:
    from lightning.pytorch import LightningModule, Trainer

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.parameters())

    module = Regression()
    size = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=size // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    try:
        trainer.fit(module, DataLoader(rows(), batch_size=ROWS // size))
        assert trainer.world_size == size
        return weights(module.net)
    finally:
        torch.distributed.destroy_process_group()


def train_accelerate() -> dict[str, list[Any]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    try:
        net = make_net()
        loader = DataLoader(rows(), batch_size=ROWS // accelerator.num_processes)
        net, optimizer, loader = accelerator.prepare(net, make_optimizer(net.parameters()), loader)
        for _ in range(STEPS):
            for features, labels in loader:
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.mse_loss(net(features), labels))
                optimizer.step()
        return weights(accelerator.unwrap_model(net))
    finally:
        accelerator.end_training()
        accelerator.free_memory()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


PROGRAMS = (train_ddp, train_fsdp, train_lightning, train_accelerate)
