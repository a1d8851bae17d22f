"""Averaging of gradients over ranks, with a fake collective that multiplies by ten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import backward as imported_backward
from torch.utils.checkpoint import checkpoint

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch import gradients
from hvd_estimators.torch.collectives import using
from hvd_estimators.torch.gradients import GradientAverager
from hvd_estimators.torch.loss_weights import WeightedLoss


class Collective:
    """Fake collective of two ranks; records the names of the tensors sent."""

    def __init__(self) -> None:
        self.size = 2
        self.names: list[str] = []

    @property
    def sent(self) -> int:
        return len(self.names)

    def reduce(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return tensor * 10

    def reduce_async(self, tensor: torch.Tensor, op: str, name: str) -> Any:
        assert op == "mean"
        self.names.append(name)
        return lambda: tensor.mul_(10)

    def average_sparse_async(self, tensor: torch.Tensor, name: str) -> Any:
        self.names.append(name)
        return lambda: tensor * 10


@pytest.fixture
def collective() -> Iterator[Collective]:
    stands: Any = Collective()
    with using(stands):
        yield stands


@pytest.fixture
def averager() -> Iterator[Callable[..., GradientAverager]]:
    made = []

    def make(*args: Any, **kwargs: Any) -> GradientAverager:
        made.append(GradientAverager(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.remove()


def net_and_optimizer() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    net = torch.nn.Linear(1, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.0)


def backward(net: torch.nn.Module) -> None:
    net(torch.ones(1, 1)).sum().backward()


def test_gradients_are_averaged_once_at_the_end_of_the_last_pass(
    collective: Collective, averager: Any
) -> None:
    net, optimizer = net_and_optimizer()
    follows = averager(net, [optimizer])
    for step in (1, 2, 3):
        optimizer.zero_grad()
        with follows.averaging(accumulate=True):
            backward(net)
        assert net.weight.grad == 1.0
        assert follows.pending
        with follows.averaging():
            backward(net)
        assert net.weight.grad == 20.0
        assert collective.sent == step
        # The second step is skipped, as a gradient scaler does.
        if step != 2:
            optimizer.step()
        assert net.weight.grad == 20.0
        assert collective.sent == step
        assert not follows.pending


class Own(torch.optim.SGD):
    """Optimizer whose step calls the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Optimizer that wraps another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("wrap", [lambda of: Own(of, 0.0), lambda of: Lookahead(Own(of, 0.0))])
@pytest.mark.parametrize("in_closure", [False, True])
def test_a_step_within_a_step_reduces_nothing_again(
    collective: Collective, averager: Any, wrap: Any, in_closure: bool
) -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = wrap(net.parameters())
    averager(net, [optimizer])
    for step in (1, 2):
        optimizer.zero_grad()
        if in_closure:
            optimizer.step(lambda: backward(net))
        else:
            backward(net)
            optimizer.step()
        assert net.weight.grad == 10.0
        assert collective.sent == step


def test_each_call_of_a_closure_averages_gradients_set_by_hand(
    collective: Collective, averager: Any
) -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3, tolerance_change=0.0)
    averager(net, [optimizer])
    found = []

    def closure() -> float:
        for number, parameter in enumerate(net.parameters(), start=2 + len(found)):
            parameter.grad = torch.full_like(parameter, float(number))
        return 1.0

    def measured() -> float:
        loss = closure()
        found.append(loss)
        return loss

    optimizer.step(measured)
    assert len(found) == collective.sent > 1
    assert net.weight.grad == 10.0 * (1 + len(found))


def test_ranks_without_a_pass_or_gradient_still_take_part(
    collective: Collective, averager: Any
) -> None:
    net, optimizer = net_and_optimizer()
    with averager(net, [optimizer]).averaging():
        pass
    assert collective.sent == 1
    # No rank had a gradient.
    assert net.weight.grad is None
    optimizer.zero_grad()
    (net.weight * 3.0).sum().backward()
    assert net.weight.grad == 30.0
    optimizer.step()
    assert collective.sent == 2
    # A user may set gradients without a backward pass.
    net.weight.grad = torch.ones(1, 1)
    optimizer.step()
    assert net.weight.grad == 10.0


def test_the_order_of_buckets_does_not_depend_on_the_backward_pass(
    collective: Collective, averager: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", 1)
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
    net = torch.nn.ModuleList(layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    follows = averager(net, [optimizer])
    order = [f"gradients.{number}.weight" for number in (2, 1, 0)]
    x = torch.ones(1, 1)
    one, two, three = layers
    sent_within: list[int] = []
    x.requires_grad_(True)
    x.register_hook(lambda _: sent_within.append(collective.sent))
    for run in (
        lambda: three(two(one(x))),
        lambda: one(two(three(x))),
        lambda: one(three(x)),  # No rank, or another rank, uses the second layer.
    ):
        collective.names.clear()
        with follows.averaging():
            run().sum().backward()
        assert collective.names == order
    # In the usual order, buckets are sent during the pass; otherwise they wait for the first.
    assert sent_within == [2, 0, 0]


def test_a_backward_pass_within_another_one_is_rejected(
    collective: Collective, averager: Any
) -> None:
    net, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    averager(net, [optimizer])
    with pytest.raises(ParamError, match="Set use_reentrant=False"):
        checkpoint(net, x, use_reentrant=True).sum().backward()
    optimizer.zero_grad()
    net(x).sum().backward()
    once = [parameter.grad.clone() for parameter in net.parameters()]
    optimizer.zero_grad()
    checkpoint(net, x, use_reentrant=False).sum().backward()
    assert [parameter.grad.tolist() for parameter in net.parameters()] == [
        gradient.tolist() for gradient in once
    ]


def test_the_gradients_of_a_failed_pass_are_averaged_at_the_step(
    collective: Collective, averager: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", 1)
    net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    net(x).square().sum().backward()
    single = [parameter.grad.clone() for parameter in net.parameters()]
    averager(net, [optimizer])
    for backward in (torch.autograd.backward, imported_backward):
        optimizer.zero_grad()
        with pytest.raises(ZeroDivisionError):
            net(Failing.apply(torch.ones(1, 2, requires_grad=True))).sum().backward()
        optimizer.step()  # It averages the gradients of the failed pass.
        optimizer.zero_grad()
        collective.names.clear()
        backward(net(x).square().sum())
        assert collective.sent == 2
        for parameter, expected in zip(net.parameters(), single, strict=True):
            torch.testing.assert_close(parameter.grad, expected * 10)


class Failing(torch.autograd.Function):
    """A number whose backward pass fails."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def of_rows(net: torch.nn.Module, value: float) -> torch.Tensor:
    """Return a mean, of which ``value`` is the gradient."""
    mean: torch.Tensor = net(torch.full((1, 1), value)).sum()
    return mean


def stating(mean: float, weight: float | None) -> WeightedLoss:
    """Return a loss with a stated weight, or a mean over two rows."""
    value = torch.tensor(mean)
    return WeightedLoss(value, 2) if weight is None else WeightedLoss(value, weight, "stated")


def test_losses_with_several_weights_are_divided_apart_unless_they_accumulate(
    collective: Collective, averager: Any
) -> None:
    collective.size = 1
    net, optimizer = net_and_optimizer()
    weights = averager(net, [optimizer]).weights

    def step(passes: int, *of_batch: float | None) -> float:
        weights.start(1, passes, passes)
        scaled = [of_rows(net, 3.0) * weights.of_call([stating(3.0, w)])[0] for w in of_batch]
        torch.stack(scaled).sum().backward()
        gradient: float = net.weight.grad.item()
        optimizer.zero_grad()
        return gradient

    assert step(1, 2.0, 5.0) == pytest.approx(6.0)
    assert step(2, None, None) == pytest.approx(6.0)
    for of_batch in ((2.0, 5.0), (2.0, None), (None, 2.0)):
        with pytest.raises(ParamError, match="must be the only loss of its batch"):
            step(2, *of_batch)
    weights.start(1, 2, 2, is_last=False)
    weights.of_call([stating(3.0, 2.0)])
    weights.start(1, 2, 2)
    with pytest.raises(ParamError, match="must be the only loss of its batch"):
        weights.of_call([stating(3.0, None)])
