"""Layers that are gathered one after another, and params that sharding rejects."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from hvd_estimators.exceptions import ParamError
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.torch.checks import check_sharding
from hvd_estimators.torch.settings import TorchSettings
from hvd_estimators.torch.shard_files import without_tensors
from hvd_estimators.torch.sharding import ShardingOptions


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer(), torch.nn.Dropout()])
        self.heads = torch.nn.ModuleList([torch.nn.Linear(2, 2)])


def test_the_entries_of_lists_are_gathered_one_after_another() -> None:
    net = Net()
    first, second, _ = net.layers
    assert ShardingOptions("full").layers_of(torch.nn.Sequential(net)) == [first, second]
    # Inner ones come first, as fully_shard needs.
    found = ShardingOptions("full", ("Linear", "Layer")).layers_of(net)
    assert found == [net.heads[0], *second.parts[::-1], second, *first.parts[::-1], first]
    assert ShardingOptions("full").layers_of(torch.nn.Linear(2, 2)) == []
    # Lists and dicts of layers are not called themselves.
    inner = [torch.nn.ModuleDict({"a": Layer()}), torch.nn.ModuleList([Layer(), Layer()])]
    nested = torch.nn.ModuleList(inner)
    assert ShardingOptions("full").layers_of(torch.nn.Sequential(nested)) == [
        *(layer for container in inner for layer in container.children())
    ]
    second.parts[0].weight = net.heads[0].weight  # gathered with the rest
    assert ShardingOptions("full").layers_of(torch.nn.Sequential(net)) == [first]
    with pytest.raises(ParamError, match=r"no layer of class 'Layre'.*Did you mean 'Layer'"):
        ShardingOptions("full", ("Layre",)).layers_of(net)


class WithSums(torch.nn.Sequential):
    """Layer with running statistics."""

    def __init__(self) -> None:
        super().__init__(torch.nn.BatchNorm1d(2))


class Batches(DataModule):
    """Batches of the user, of unknown numbers."""


def test_values_without_parts_are_unchanged() -> None:
    weights = Net().state_dict()
    value = {"model": weights, "groups": [["a"], ("b", 1)]}
    made, found = without_tensors(value)
    assert not found
    assert made.keys() == value.keys()
    assert made["groups"] == value["groups"]
    assert made["model"]._metadata == weights._metadata
    assert all(made["model"][name] is tensor for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sharding": "none", "shard_modules": ["A"]}, r"^shard_modules: found \['A'\] without"),
        ({"sharding": "none", "activation_checkpointing": True}, "^activation_checkpointing: "),
        ({"sharding": "none", "cpu_offload": True}, "^cpu_offload: found True without sharding"),
        ({"collectives": "horovod"}, "^collectives: found 'horovod' with sharding='full'"),
        ({"train_minibatch_fn": print}, "^train_minibatch_fn: found .*Leave"),
        ({"gradient_compression": mock.Mock()}, "^gradient_compression: found"),
        ({"batch_size_fn": len}, "^batch_size_fn: found"),
        ({"data_module": Batches, "validation": True}, "^data_module: found Batches with sharding"),
        ({"precision": "fp16"}, "^precision: found 'fp16'.*bf16"),
        ({"loss": torch.nn.Linear(2, 1)}, "^loss: Linear has parameters.*part of the model"),
        ({"model": torch.compile(torch.nn.Linear(2, 2))}, "^model: found .*without torch.compile"),
        ({"model": torch.nn.Embedding(2, 2, sparse=True)}, "^model: the layer '' has sparse"),
        ({"model": torch.nn.PReLU(0)}, r"^model: the parameter 'weight' of shape \(0,\) cannot"),
        (
            {
                "model": torch.nn.ModuleDict({"a": torch.nn.ModuleList([WithSums(), WithSums()])}),
                "shard_modules": ["WithSums"],
                "activation_checkpointing": True,
            },
            "^activation_checkpointing: found a BatchNorm1d in a layer",
        ),
        ({"shard_modules": ["Conv"]}, "^shard_modules: the model has no layer of class 'Conv'"),
    ],
)
def test_what_cannot_be_sharded_is_named(params: dict[str, Any], message: str) -> None:
    given = {"model": Net(), "loss": functional.mse_loss, "sharding": "full", **params}
    estimator = TorchEstimator(**given, feature_cols=["x"], label_cols=["y"])
    with pytest.raises(ParamError, match=message):
        check_sharding(TorchSettings.of(estimator))


def test_sharding_needs_torch_distributed() -> None:
    of = lambda **params: TorchSettings.of(TorchEstimator(**params)).collectives  # noqa: E731
    assert of(sharding="full") == of(sharding="optimizer") == of(collectives="torch") == "torch"
    assert of() == of(sharding="none") == "auto"
