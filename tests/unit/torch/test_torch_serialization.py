"""Modules and optimizers as bytes."""

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.trial import check_sendable
from hvd_estimators.torch.serialization import (
    Pickler,
    dump_module,
    dump_optimizer,
    dump_with_references,
    load_module,
    load_optimizer,
    load_optimizer_state,
    load_state,
    load_with_references,
    optimizer_content,
    restore_optimizer,
    save_state,
)


def saved(state):
    file = io.BytesIO()
    save_state(state, file)
    file.seek(0)
    return file


class Tied(torch.nn.Module):
    """Uses one weight twice."""

    def __init__(self):
        super().__init__()
        self.encode = torch.nn.Linear(3, 3)
        self.decode = torch.nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x))


class Own(torch.optim.SGD):
    """An optimizer that only the user's program knows."""


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )


def step(module, optimizer):
    loss = module(torch.arange(12.0).reshape(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def round_trip(module, optimizer):
    document = dump_optimizer(optimizer, module)
    loaded = load_module(dump_module(module))
    return loaded, load_optimizer(document, loaded)


OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "the user's own": lambda p: Own(p, lr=0.1),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_pair_that_was_sent_trains_on_as_the_original_would(make, steps):
    module = network()
    optimizer = make(module.parameters())
    for _ in range(steps):
        step(module, optimizer)

    loaded_module, loaded = round_trip(module, optimizer)

    assert type(loaded) is type(optimizer)
    own = [p for group in loaded.param_groups for p in group["params"]]
    for held, parameter in zip(own, loaded_module.parameters(), strict=True):
        assert held is parameter
    for _ in range(3):
        assert step(loaded_module, loaded) == step(module, optimizer)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(loaded_module.state_dict()[name], value, rtol=0, atol=0)


class Halved(torch.nn.Module):
    """A parametrization that the user wrote, of two tensors."""

    def forward(self, a, b):
        return a / 2 + b

    def right_inverse(self, x):
        return x, x / 2


class Repeated(torch.nn.Module):
    """Has parametrizations, twice in a module that refers to its parent."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        norms = torch.nn.utils.parametrizations
        self.first = norms.weight_norm(torch.nn.Linear(3, 4))
        self.recurrent = torch.nn.GRU(4, 4, batch_first=True)
        norms.weight_norm(self.recurrent, "weight_hh_l0")
        self.turned = norms.orthogonal(torch.nn.Linear(4, 4))
        self.last = norms.spectral_norm(torch.nn.Linear(4, 1))
        parametrize.register_parametrization(self.last, "bias", Halved())
        vars(self.last)["parent"] = self

    def forward(self, x):
        return self.last(self.turned(self.recurrent(self.first(x)[:, None])[0][:, -1]))


def test_modules_with_parametrizations_are_sent_with_them():
    module = Repeated()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    step(module, optimizer)

    check_sendable("model", module, Pickler)
    loaded_module, loaded = round_trip(module, optimizer)

    assert parametrize.is_parametrized(loaded_module.turned, "weight")
    assert loaded_module.last.parent is loaded_module
    for _ in range(3):
        assert step(loaded_module, loaded) == step(module, optimizer)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(loaded_module.state_dict()[name], value, rtol=0, atol=0)
    # They go on as such: assigned to, and removed.
    loaded_module.last.bias = torch.ones(1)
    torch.testing.assert_close(loaded_module.last.bias, torch.ones(1))
    parametrize.remove_parametrizations(loaded_module.first, "weight")
    assert type(loaded_module.first) is torch.nn.Linear
    torch.testing.assert_close(loaded_module.first.weight, module.first.weight)


def test_the_original_is_not_bound_to_its_copy():
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = copy.deepcopy(module.state_dict())

    step(*round_trip(module, optimizer))

    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_parameter_groups_keep_their_parameters_and_options():
    module = network()
    optimizer = torch.optim.Adam(
        [
            {"params": module[2].parameters(), "lr": 0.5, "name": "head"},
            {"params": [module[0].bias], "weight_decay": 0.1},
        ],
        lr=0.01,
    )
    step(module, optimizer)

    loaded_module, loaded = round_trip(module, optimizer)

    head, bias = loaded.param_groups
    assert (head["lr"], head["name"], bias["lr"], bias["weight_decay"]) == (0.5, "head", 0.01, 0.1)
    assert [id(p) for p in head["params"]] == [id(p) for p in loaded_module[2].parameters()]
    assert [id(p) for p in bias["params"]] == [id(loaded_module[0].bias)]
    moments = loaded.state[loaded_module[0].bias]
    torch.testing.assert_close(moments["exp_avg"], optimizer.state[module[0].bias]["exp_avg"])
    assert moments["step"] == 1


def test_a_weight_that_is_used_twice_stays_one():
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    loaded_module, loaded = round_trip(module, optimizer)

    assert loaded_module.decode.weight is loaded_module.encode.weight
    assert len(loaded.param_groups[0]["params"]) == 3
    assert step(loaded_module, loaded) == step(module, optimizer)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 3))])
def test_torchscript_modules_and_their_optimizers_are_sent_too(make):
    module = make(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    step(module, optimizer)

    loaded_module, loaded = round_trip(module, optimizer)

    assert isinstance(loaded_module, torch.jit.ScriptModule)
    for _ in range(2):
        assert step(loaded_module, loaded) == pytest.approx(step(module, optimizer))


def test_modules_of_the_main_program_and_of_functions_are_sent_by_value():
    class Double(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    document = dump_module(Double())

    assert b"Double" in document
    assert load_module(document)(torch.ones(1)).item() == 2


@pytest.mark.parametrize("others", ["all", "one"])
def test_an_optimizer_of_other_parameters_is_refused(others):
    module, other = network(), torch.nn.Linear(7, 1)
    foreign = list(other.parameters())
    parameters = foreign if others == "all" else [*module.parameters(), foreign[0]]

    with pytest.raises(ParamError, match=r"optimizer: .* shape \(1, 7\) that is not one of"):
        dump_optimizer(torch.optim.SGD(parameters, lr=0.1), module)


def test_state_survives_and_can_be_read_by_torch_alone():
    module = network()
    optimizer = torch.optim.Adam(module.parameters())
    step(module, optimizer)
    history = [{"epoch": 0, "train": {"loss": 0.5, "all_metrics": []}, "validation": None}]

    file = saved(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    )

    state = load_state(file)
    assert state["history"] == history
    assert state["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    other = network()
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True)["model"])
    for name, value in module.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0)


def test_loading_state_runs_no_code_from_the_file(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "touched"), "w")

    file = saved({"model": Evil()})

    with pytest.raises(pickle.UnpicklingError):
        load_state(file)
    assert not (tmp_path / "touched").exists()


def test_an_optimizer_made_with_numpys_scalars_is_saved_and_loaded():
    net = network()
    rates = np.logspace(-2, -1, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=rates[0], momentum=np.float32(0.5))
    step(net, optimizer)

    state = load_state(saved({"optimizer": optimizer.state_dict(), "steps": np.int64(1)}))

    assert state["steps"] == 1
    loaded = torch.optim.SGD(net.parameters(), lr=1.0)
    loaded.load_state_dict(state["optimizer"])
    group = loaded.param_groups[0]
    assert (group["lr"], group["momentum"]) == (rates[0], 0.5)
    assert type(group["lr"]) is type(group["momentum"]) is float


class Outer(torch.optim.Optimizer):
    """Wraps an optimizer as timm's Lookahead does, without its base class's ``__init__``."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = {}

    def step(self, closure=None):
        return self.inner.step(closure)


def test_attributes_of_optimizers_are_sent_and_what_belongs_to_this_process_is_not():
    net = torch.nn.Linear(2, 1)
    inner = torch.optim.LBFGS(net.parameters(), lr=0.5)
    inner.register_step_pre_hook(lambda *_: pytest.fail("a hook of another process"))
    # It replaces step() of the object.
    torch.optim.lr_scheduler.StepLR(inner, 1)
    inner.function = open
    copied = copy.deepcopy(net)
    found = load_optimizer(dump_optimizer(Outer(inner), net), copied)

    assert type(found) is Outer
    assert found.param_groups is found.inner.param_groups
    assert [id(p) for p in found.inner._params] == [id(p) for p in copied.parameters()]
    assert found.inner.function is open
    before = copied.weight.clone()

    def closure():
        copied.zero_grad()
        loss = copied(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    found.step(closure)
    assert not torch.equal(copied.weight, before)


def test_optimizers_among_the_users_objects_are_bound_to_the_model_with_their_attributes():
    net = torch.nn.Linear(2, 1)
    first, second = torch.optim.SGD(net.parameters(), 0.1), torch.optim.LBFGS(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.5)
    document = dump_with_references((scheduler, [Outer(second), second]), net, first, (second,))
    copied = copy.deepcopy(net)
    optimizer = load_optimizer(dump_optimizer(first, net), copied)
    found, (outer, bound) = load_with_references(document, copied, optimizer)

    assert found.optimizer is outer.inner is bound
    assert [id(p) for p in bound._params] == [id(p) for p in copied.parameters()]


def test_hooks_of_all_optimizers_see_the_steps_of_a_class_that_was_sent_by_value():
    source = """
        import torch
        from hvd_estimators.torch.serialization import dump_optimizer
        class Mine(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)
        net = torch.nn.Linear(2, 1)
        print(dump_optimizer(Mine(net.parameters(), 0.1), net).hex())
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    sent = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    optimizer = load_optimizer(bytes.fromhex(sent.split()[-1]), torch.nn.Linear(2, 1))
    seen = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        optimizer.step()
    finally:
        hook.remove()
    assert seen[0] is optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Adam", "NAdam", "RAdam", "Adadelta", "Rprop", "Adamax"])
def test_an_optimizer_that_was_saved_steps_bit_for_bit_as_one_that_was_not(kind, dtype):
    def make():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2, dtype=dtype)
        return net, getattr(torch.optim, kind)(net.parameters(), lr=0.01)

    def train(net, optimizer, steps):
        for step in steps:
            x = torch.linspace(-1, 1, 12, dtype=dtype).reshape(4, 3) * (step + 1)
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()

    whole, whole_optimizer = make()
    train(whole, whole_optimizer, range(5))
    first, first_optimizer = make()
    train(first, first_optimizer, range(3))
    state = load_state(saved(first_optimizer.state_dict()))
    again, optimizer = make()
    again.load_state_dict(first.state_dict())
    load_optimizer_state(optimizer, state)
    train(again, optimizer, range(3, 5))
    for found, expected in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_groups_that_training_added_are_restored():
    def pair():
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
        return net, torch.optim.Adam([net[0].weight], lr=0.1)

    net, optimizer = pair()
    optimizer.param_groups[0]["params"].append(net[0].bias)
    optimizer.add_param_group({"params": [net[1].weight], "lr": 0.2})
    # That of a loss, say, which does not exist elsewhere.
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.add_param_group({"params": [net[2].bias], "lr": 0.3})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    content = optimizer_content(optimizer, net)
    assert content["groups"] == [["0.weight", "0.bias"], ["1.weight"], [""], ["2.bias"]]

    other, found = pair()
    restore_optimizer(found, other, content)
    groups = found.param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.2, 0.3]
    named = {id(p): name for name, p in other.named_parameters()}
    names = [[named[id(p)] for p in group["params"]] for group in groups]
    assert names == [["0.weight", "0.bias"], ["1.weight"], ["2.bias"]]
    for parameter, original in ((other[2].bias, net[2].bias), (other[0].bias, net[0].bias)):
        assert torch.equal(found.state[parameter]["exp_avg"], optimizer.state[original]["exp_avg"])
    # As old as a version that kept no names.
    older, again = pair()
    restore_optimizer(again, older, {"optimizer": pair()[1].state_dict()})
