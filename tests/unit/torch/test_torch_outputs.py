"""Selection of a module's outputs for predictions, and joint losses of all outputs."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.inference.output_columns import output_columns
from hvd_estimators.torch.dry_run import (
    check_own_step,
    takes_one_row,
)
from hvd_estimators.torch.objective import JointLoss, Objective, check_joint
from hvd_estimators.torch.tensors import TensorSpec, select_outputs

F = torch.nn.functional
ONE, TWO = torch.ones(3, 1), torch.ones(3, 2)
COLUMNS = {"x": np.ones((3, 4), np.float32), "y": np.ones(3, np.float32)}


@dataclasses.dataclass
class Found:
    loss: Any
    logits: torch.Tensor


Pair = collections.namedtuple("Pair", ["mean", "variance"])


@pytest.mark.parametrize(
    ("outputs", "selection", "expected"),
    [
        (ONE, [0], [ONE]),
        ((ONE, TWO), [1], [TWO]),
        ([ONE, None, TWO], [2, 0], [TWO, ONE]),
        ((TWO, None), None, [TWO]),
        ({"a": ONE, "b": TWO}, ["b", "a"], [TWO, ONE]),
        ({"a": ONE, "b": TWO}, [1], [TWO]),
        (Found(None, TWO), ["logits"], [TWO]),
        (Pair(ONE, TWO), ["variance"], [TWO]),
        (Pair(ONE, TWO), [0], [ONE]),
    ],
)
def test_outputs_are_selected_by_position_and_by_name(
    outputs: Any, selection: Any, expected: Any
) -> None:
    found = select_outputs(outputs, ["y"], selection)
    assert [id(output) for output in found] == [id(output) for output in expected]
    # Outputs that are already selected stay, whatever the positions.
    assert select_outputs(found, ["y"], selection) is found


def test_columns_are_named_after_labels_or_outputs() -> None:
    def names(**params: Any) -> list[str]:
        return output_columns(params.get)

    assert names(label_columns=["y"]) == ["y__output"]
    assert names(label_columns=["y"], outputs=["logits"]) == ["y__output"]
    assert names(label_columns=["y"], outputs=[0, "std"]) == ["output_0", "std__output"]
    assert names(label_columns=[], outputs=[3]) == names(label_columns=[]) == ["output"]
    assert names(label_columns=[], output_shapes=[[1], []]) == ["output_0", "output_1"]
    assert names(label_columns=["y"], output_shapes=[[1], []]) == ["y__output"]
    joint = {"loss_form": "joint", "label_columns": ["y"]}
    assert names(**joint, output_shapes=[[1], []]) == ["output_0", "output_1"]
    assert names(**joint, output_shapes=[[1]]) == ["y__output"]
    assert names(**joint, outputCols=["mine"]) == ["mine"]


def test_joint_losses_get_their_arguments_by_name() -> None:
    offered = {"outputs": ONE, "labels": [TWO], "inputs": [ONE], "sample_weights": None}

    class Module(torch.nn.Module):
        def forward(self, inputs: Any, outputs: Any) -> Any:
            return outputs + inputs[0]

    for function in (
        lambda outputs, inputs: outputs + inputs[0],
        lambda **given: given["outputs"] + given["inputs"][0],
        Module(),
    ):
        check_joint(function, weighted=False)
        assert torch.equal(JointLoss(function)(**offered), ONE + ONE)
    for function, message in (
        (lambda recon, x, mu: recon, "found recon, x, mu. Wrap it"),
        (F.mse_loss, "found input, target, .* Wrap it"),
        (lambda: ONE, "found no names"),
    ):
        with pytest.raises(ParamError, match=message):
            check_joint(function, weighted=False)
    with pytest.raises(ParamError, match=r"sample_weight_col is set, .* found outputs"):
        check_joint(lambda outputs: outputs, weighted=True)


def objective(step: Any, loss: Any = F.mse_loss) -> Objective:
    return Objective(TensorSpec(("x",), ("y",)), (loss,), None, (1.0,), (), step)


def test_the_dry_run_uses_the_custom_step_and_changes_nothing() -> None:
    class Recurrent(torch.nn.Module):
        """Module that needs a hidden state, which only the step provides."""

        def __init__(self) -> None:
            super().__init__()
            self.cell, self.calls = torch.nn.RNNCell(4, 1), 0

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.cell(x, hidden)

    net = Recurrent()
    optimizer = torch.optim.Adam(net.parameters())
    second = torch.optim.SGD([net.cell.bias_hh], lr=1.0, momentum=0.9)
    seen: list[int] = []

    def step(model: Any, first: Any, arrange: Any, loss_fn: Any, inputs: Any, labels: Any) -> Any:
        assert model.training
        assert first.param_groups[0]["params"][0] is model.cell.weight_ih
        assert second.param_groups[0]["params"][0] is model.cell.bias_hh
        seen.append(1)
        outputs, arranged = arrange(model(inputs[0], torch.zeros(len(inputs[0]), 1)), labels)
        loss = loss_fn(outputs, arranged)
        loss.backward()
        first.step()
        second.step()
        return outputs, loss

    before = {name: value.clone() for name, value in net.state_dict().items()}
    kind, globals_ = type(net), Recurrent.forward.__globals__
    assert check_own_step(net, optimizer, objective(step), COLUMNS, 1) == [(1,)]
    assert (seen, net.calls) == ([], 0)
    assert not optimizer.state
    assert not second.state
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert type(net) is kind
    assert Recurrent.forward.__globals__ is globals_

    def fails(model: Any, *_: Any) -> Any:
        raise ValueError("3 rows")

    with pytest.raises(ShapeError, match=r"train_minibatch_fn failed on .*x \(3, 4\).*y \(3,\)"):
        check_own_step(net, optimizer, objective(fails), COLUMNS, 1)


def test_one_row_suffices_for_batch_normalization_over_several_values() -> None:
    def takes(module: torch.nn.Module, *shape: int) -> Any:
        one, two = (lambda copy, rows=rows: copy(torch.ones(rows, *shape)) for rows in (1, 2))
        return takes_one_row(module, one, [two])

    images = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    pooled = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(1))
    assert takes(torch.nn.Linear(4, 1), 4) is True
    assert takes(torch.nn.BatchNorm1d(4), 4) is False
    assert (takes(images, 1, 5, 5), takes(pooled, 1, 5, 5)) == (True, False)
    assert takes(images, 2) is None
    assert int(images[1].num_batches_tracked) == 0
