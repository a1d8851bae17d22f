"""The learning rate of N ranks, and of the model that is given back."""

import pytest
import torch

from hvd_estimators.torch.learning_rate import LearningRate


def make(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def rates(groups):
    return [group["lr"] for group in groups]


@pytest.mark.parametrize("scale", [1, 2, 3, 7, 49])
def test_rates_are_multiplied_for_training_and_come_back_exactly(scale):
    optimizer = make(0.1, 0.003)

    learning_rate = LearningRate(optimizer, scale)

    assert rates(optimizer.param_groups) == [0.1 * scale, 0.003 * scale]
    assert rates(learning_rate.unscaled_state()["param_groups"]) == [0.1, 0.003]
    assert rates(optimizer.param_groups) == [0.1 * scale, 0.003 * scale]  # training goes on


def test_a_rate_that_was_changed_in_training_is_divided():
    optimizer = make(0.5, 0.25)
    learning_rate = LearningRate(optimizer, 4)

    optimizer.param_groups[0]["lr"] *= 0.5

    assert rates(learning_rate.unscaled_state()["param_groups"]) == [0.25, 0.25]


def test_resuming_from_the_unscaled_state_scales_once_however_often_it_happens():
    optimizer = make(0.1)
    for _ in range(5):
        state = LearningRate(optimizer, 3).unscaled_state()
        optimizer = make(123.0)
        optimizer.load_state_dict(state)

    LearningRate(optimizer, 3)

    assert rates(optimizer.param_groups) == [0.1 * 3]


def test_rates_that_are_tensors_are_scaled_and_the_given_one_is_left():
    given = torch.tensor(0.5)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=given)

    learning_rate = LearningRate(optimizer, 4)

    assert float(optimizer.param_groups[0]["lr"]) == 2.0
    assert float(learning_rate.unscaled_state()["param_groups"][0]["lr"]) == 0.5
    assert float(given) == 0.5


def test_the_state_holds_what_else_the_optimizer_remembers():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    learning_rate = LearningRate(optimizer, 2)
    parameter.grad = torch.ones(1)
    optimizer.step()

    state = learning_rate.unscaled_state()

    assert parameter.item() == 0.0  # one step of 0.5 * 2
    assert state["state"][0]["momentum_buffer"].item() == 1.0
    assert state["param_groups"][0]["momentum"] == 0.9


def test_groups_without_a_rate_are_left_alone():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    optimizer = Plain([torch.nn.Parameter(torch.zeros(1))])

    assert "lr" not in LearningRate(optimizer, 2).unscaled_state()["param_groups"][0]
