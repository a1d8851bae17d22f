"""Selection of a module's outputs for predictions, and joint losses of all outputs."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from objectives import objective_of

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.inference.output_columns import output_columns
from hvd_estimators.torch.dry_run import check_fit, check_initialized, check_own_step, takes_one_row
from hvd_estimators.torch.objective import JointLoss, Objective, check_joint
from hvd_estimators.torch.tensors import TensorSpec, require_tensors, select_outputs

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


def test_errors_about_missing_outputs_list_the_existing_outputs() -> None:
    for outputs, selection, message in (
        ((ONE, TWO), [2], r"outputs: found position 2, .* a tuple of 2, .* 0 to 1"),
        (ONE, [1], "outputs: found position 1, .* a Tensor"),
        (ONE, ["logits"], r"outputs: found 'logits', .* no names.*outputs=\[0\]"),
        ({"a": ONE}, ["b"], "outputs: found 'b', .* a dict of 1 with the names a"),
    ):
        with pytest.raises(ShapeError, match=message):
            select_outputs(outputs, [], selection)
    with pytest.raises(ShapeError, match=r"tuple of NoneType.*outputs"):
        require_tensors(select_outputs((ONE, None), ["y"], [1]), (ONE, None))
    with pytest.raises(ShapeError, match=r"no output is named y. Set outputs"):
        select_outputs({"a": ONE, "b": TWO}, ["y"])


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
        assert torch.equal(JointLoss(function)(**offered), ONE + ONE)
    with pytest.raises(ParamError, match=r"sample_weight_col is set, .* found outputs"):
        check_joint(lambda outputs: outputs)
    check_joint(lambda **given: given)


class Several(torch.nn.Module):
    """Module that returns one output per row and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), self.linear.weight.abs().sum()


def test_the_dry_run_explains_how_to_omit_outputs() -> None:
    net, spec = Several(), TensorSpec(("x",), ("y",))
    with pytest.raises(ShapeError, match=r"2 outputs, .* 1 label .*outputs .*\[0\].*'joint'"):
        check_fit(net, objective_of(spec), COLUMNS)
    picked = dataclasses.replace(spec, outputs=(0,))
    assert check_fit(net, objective_of(picked), COLUMNS) == [(1,)]

    def loss(outputs: Any, labels: Any) -> torch.Tensor:
        return F.mse_loss(outputs[0].reshape(-1), labels[0]) + outputs[1]

    joint = dataclasses.replace(spec, pairs=False)
    with pytest.raises(ShapeError, match=r"at position 1 has shape \(\) for 3 rows.*outputs can"):
        check_fit(net, objective_of(joint, loss, joint=True), COLUMNS)
    chosen = dataclasses.replace(joint, outputs=(0,))
    assert check_fit(net, objective_of(chosen, loss, joint=True), COLUMNS) == [(1,)]
    with pytest.raises(ShapeError, match=r"outputs and labels: IndexError.*\(3, 1\), \(\)"):
        check_fit(net, objective_of(chosen, lambda outputs: outputs[5], joint=True), COLUMNS)
    with pytest.raises(ParamError, match=r"^loss: expected one number .*found shape \(3, 1\)"):
        check_fit(net, objective_of(chosen, lambda outputs: outputs[0], joint=True), COLUMNS)


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


def test_an_error_names_the_weights_of_lazy_layers_that_no_row_has_reached() -> None:
    net = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ParamError, match=r"model: '0\.weight', .* have no shape yet.*Call"):
        check_initialized(net)
    net(torch.zeros(2, 4))
    check_initialized(net)
