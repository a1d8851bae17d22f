"""When gradients become means over the ranks, with a collective that multiplies by ten instead."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

from hvd_estimators.torch.averaging import GradientAverager


class Collective:
    """Stands for two ranks; counts what is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        monkeypatch.setattr(hvd, "size", lambda: 2)
        monkeypatch.setattr(hvd, "grouped_allreduce_async_", self.send)
        monkeypatch.setattr(hvd, "synchronize", lambda tensors: [t.mul_(10) for t in tensors])

    def send(self, tensors: list[torch.Tensor], **_: Any) -> list[torch.Tensor]:
        self.sent += 1
        return tensors


def net_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Linear(1, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.0)


def test_gradients_are_means_when_the_pass_ends_and_are_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collective = Collective(monkeypatch)
    net, optimizer = net_and_optimizer()
    averager = GradientAverager(optimizer, net, passes_per_step=2, by_end_of_pass=True)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        assert net.weight.grad == 1.0
        assert averager.pending
        net(torch.ones(1, 1)).sum().backward()
        assert net.weight.grad == 20.0
        assert collective.sent == step
        # In the second a scaler, say, finds that there is no step to take.
        if step != 2:
            optimizer.step()
        assert net.weight.grad == 20.0
        assert collective.sent == step
        assert not averager.pending


def test_what_took_no_part_is_sent_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = Collective(monkeypatch)
    net, optimizer = net_and_optimizer()
    net.bias.requires_grad_(True)
    GradientAverager(optimizer, net, by_end_of_pass=True)
    for step in (1, 2):
        optimizer.zero_grad()
        (net.weight * 3.0).sum().backward()
        assert collective.sent == step - 1
        optimizer.step()
        assert net.weight.grad == 30.0
        assert collective.sent == step


def test_otherwise_steps_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = Collective(monkeypatch)
    net, optimizer = net_and_optimizer()
    averager = GradientAverager(optimizer, net)
    net(torch.ones(1, 1)).sum().backward()
    assert collective.sent == 1
    assert net.weight.grad == 1.0
    assert averager.pending
    optimizer.step()
    assert net.weight.grad == 10.0
    assert collective.sent == 1
