"""Learning rates are multiplied by the number of ranks during a step, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_estimators.torch.optimizer_step import OptimizerStep, StepOptions, StepRate, learning_rates


def make(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def step(optimizer: torch.optim.Optimizer) -> list[float]:
    """Step with gradients of one and return how far each parameter moved."""
    parameters = [group["params"][0] for group in optimizer.param_groups]
    before = [parameter.item() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    optimizer.step()
    return [old - parameter.item() for old, parameter in zip(before, parameters, strict=True)]


@pytest.mark.parametrize("scale", [1, 2, 3, 7, 49])
def test_scaled_rates_are_visible_only_during_a_step(scale: int) -> None:
    optimizer = make(0.1, 0.003)
    StepRate(optimizer, scale)

    assert step(optimizer) == pytest.approx([0.1 * scale, 0.003 * scale])
    assert rates(optimizer) == [0.1, 0.003]
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.1, 0.003]


def test_schedulers_see_unscaled_rates() -> None:
    optimizer = make(0.5)
    StepRate(optimizer, 4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))

    assert step(optimizer) == [2.0]
    scheduler.step()
    assert scheduler.get_last_lr() == rates(optimizer) == [0.25]
    assert step(optimizer) == [1.0]


def test_tensor_rates_are_scaled_without_changing_the_given_tensor() -> None:
    given = torch.tensor(0.5)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=given)
    StepRate(optimizer, 4)

    assert step(optimizer) == [2.0]
    assert rates(optimizer)[0] is given
    assert float(given) == 0.5


def test_a_rate_set_during_a_step_is_the_scaled_rate() -> None:
    optimizer = make(0.5)
    rate = StepRate(optimizer, 4)
    optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=1.0))

    assert step(optimizer) == [1.0]
    assert rates(optimizer) == [0.25]
    rate.remove()
    assert step(optimizer) == [1.0]


def test_rates_are_scaled_during_steps_but_not_in_closures() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    rate = StepRate(optimizer, 3)
    seen = []

    def closure() -> Any:
        (group,) = optimizer.param_groups
        seen.append(group["lr"])
        parameter.grad = torch.tensor([1.0])
        group["lr"] = 0.05  # as in a warm-up before the step

    optimizer.step(closure)
    optimizer.step(closure=closure)
    # Two steps with three times the rate that the closure has set.
    assert parameter.item() == pytest.approx(0.7)
    assert seen == [0.1, 0.05]
    assert optimizer.param_groups[0]["lr"] == 0.05
    # A scheduler sets the rate of one rank, too.
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert parameter.item() == pytest.approx(0.67)
    rate.remove()
    optimizer.step()
    assert parameter.item() == pytest.approx(0.66)


def test_rates_are_lowered_after_a_closure_that_fails() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    StepRate(optimizer, 3)

    def failing() -> None:
        raise ValueError("no loss")

    for _ in range(2):
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(failing)
        assert rates(optimizer) == [0.1]
    assert step(optimizer) == pytest.approx([0.3])
    assert rates(optimizer) == [0.1]


def test_an_optimizer_that_computes_its_rate_has_none_to_scale() -> None:
    class OwnRate(torch.optim.SGD):
        """As Adafactor of timm: the group's rate is None, and `step` computes one."""

        def step(self, closure: Any = None) -> None:
            assert self.param_groups[0]["lr"] is None
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(0.5 * parameter.grad)

    optimizer = OwnRate([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["lr"] = None
    StepRate(optimizer, 4)

    assert step(optimizer) == [0.5]
    assert rates(optimizer) == [None]
    assert learning_rates(optimizer) == []
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1})
    assert learning_rates(optimizer) == [0.1]


def test_a_rank_without_rows_steps_with_the_gradients_of_others() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    step = OptimizerStep(optimizer, StepOptions(precision="fp16"), torch.device("cpu"))
    scale = step.objects["scaler"].get_scale()
    parameter.grad = torch.tensor([3.0 * scale])  # averaged with a rank that scaled its loss
    step.step()
    assert parameter.item() == pytest.approx(-1.5)
