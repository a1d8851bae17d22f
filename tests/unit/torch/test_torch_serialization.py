"""Serialized modules and optimizers."""

import copy
import io
import pickle
import threading
import types

import pytest
import torch
from torch.nn.utils import parametrize

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.trial import check_sendable
from hvd_estimators.torch.serialization import (
    Pickler,
    check_parameters,
    dump_module,
    dump_optimizer,
    load_module,
    load_optimizer,
    load_state,
    load_trained,
    module_file,
    optimizer_content,
    restore_optimizer,
    save_state,
    trained_file,
)
from hvd_estimators.torch.trainer import load_objects, move_stateful


def saved(state):
    file = io.BytesIO()
    save_state(state, file)
    file.seek(0)
    return file


class Own(torch.optim.SGD):
    """Optimizer class that only the user's program defines."""


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
    return load_module(dump_module((module, optimizer)))


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
def test_a_serialized_pair_continues_training_like_the_original(make, steps):
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
    """User-written parametrization of two tensors."""

    def forward(self, a, b):
        return a / 2 + b

    def right_inverse(self, x):
        return x, x / 2


class Repeated(torch.nn.Module):
    """Module with parametrizations, two of them in a layer that refers to its parent."""

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


def test_parametrizations_are_serialized_with_their_modules():
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
    # They still work: the weight can be assigned, and the parametrization removed.
    loaded_module.last.bias = torch.ones(1)
    torch.testing.assert_close(loaded_module.last.bias, torch.ones(1))
    parametrize.remove_parametrizations(loaded_module.first, "weight")
    assert type(loaded_module.first) is torch.nn.Linear
    torch.testing.assert_close(loaded_module.first.weight, module.first.weight)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 3))])
def test_torchscript_modules_are_serialized_and_not_trained(make):
    module = make(network().eval())
    loaded = load_module(dump_module(module))
    assert isinstance(loaded, torch.jit.ScriptModule)
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(loaded(x), module(x))
    with pytest.raises(ParamError, match=r"^model: found TorchScript"):
        check_parameters(module, torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize("others", ["all", "one"])
def test_optimizers_of_other_parameters_are_rejected(others):
    module, other = network(), torch.nn.Linear(7, 1)
    foreign = list(other.parameters())
    parameters = foreign if others == "all" else [*module.parameters(), foreign[0]]

    with pytest.raises(ParamError, match=r"optimizer: .* shape \(1, 7\) that is not one of"):
        check_parameters(module, torch.optim.SGD(parameters, lr=0.1))


def test_plain_torch_can_read_saved_state():
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


class Outer(torch.optim.Optimizer):
    """Optimizer wrapper that skips the base class's ``__init__``, like timm's Lookahead."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = {}

    def step(self, closure=None):
        return self.inner.step(closure)


class Lookahead(Outer):
    """Wrapper with slow weights, whose state has keys of its own, as torch-optimizer's."""

    def __init__(self, inner):
        super().__init__(inner)
        self.state = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    def __getstate__(self):
        return {"inner": self.inner, "param_groups": self.param_groups, "state": self.state}

    def step(self, closure=None):
        self.inner.step()
        with torch.no_grad():
            for parameter, slow in self.state.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self):
        fast = self.inner.state_dict()
        return {
            "slow": list(self.state.values()),
            "fast": fast["state"],
            "of": fast["param_groups"],
        }

    def load_state_dict(self, state):
        for slow, saved in zip(self.state.values(), state["slow"], strict=True):
            slow.copy_(saved)
        # As in torch-optimizer, wrapper and inner optimizer have different groups afterwards.
        groups = self.param_groups
        self.inner.load_state_dict({"state": state["fast"], "param_groups": state["of"]})
        self.param_groups = [dict(group) for group in groups]


def test_a_wrapper_whose_state_has_other_keys_resumes_bit_for_bit():
    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()

    def sent(net):
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        copied = copy.deepcopy(net)
        return copied, load_optimizer(dump_optimizer(Lookahead(inner), net), copied)

    net = torch.nn.Linear(2, 1)
    whole, first, again = (sent(net) for _ in range(3))
    for model in (whole, whole, whole, first):
        step(*model)
    file = saved({**optimizer_content(first[1], first[0]), "model": first[0].state_dict()})
    content = load_state(file)
    again[0].load_state_dict(content["model"])
    restore_optimizer(again[1], again[0], content)
    # A schedule or a scaling of the rate must reach the optimizer that steps.
    assert again[1].param_groups is again[1].inner.param_groups
    for _ in range(2):
        step(*again)
    assert torch.equal(again[0].weight, whole[0].weight)
    assert not torch.equal(again[0].weight, net.weight)


class NeedsArguments:
    """Object that pickles, and whose class cannot create it without an argument."""

    def __new__(cls, model):
        return super().__new__(cls)

    def __init__(self, model):
        self.model = model


def test_stateful_networks_are_on_the_ranks_device():
    teacher = torch.nn.BatchNorm1d(2)
    move_stateful([{"not": "moved"}, teacher], torch.device("meta"))
    assert all(tensor.is_meta for tensor in teacher.state_dict().values())


def test_an_object_that_a_rank_cannot_load_is_a_typed_error(tmp_path):
    file = module_file({"stateful": [NeedsArguments(torch.nn.Linear(1, 1))]})
    with pytest.raises(ParamError, match=r"cannot load it \(TypeError: .*NeedsArguments.__new__"):
        load_objects(file, Store.create(str(tmp_path)), torch.device("cpu"))


def test_attributes_of_optimizers_are_serialized_without_process_state():
    net = torch.nn.Linear(2, 1)
    inner = torch.optim.LBFGS(net.parameters(), lr=0.5)
    inner.register_state_dict_pre_hook(lambda *_: pytest.fail("a hook of another process"))
    # The scheduler replaces the optimizer's step().
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


def test_steps_and_hooks_that_torch_does_not_send_are_rejected():
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_parameters(module, optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ParamError, match=r"^optimizer: .* a step hook.* on_train_begin\(\)"):
        check_parameters(module, optimizer)
    handle.remove()
    check_parameters(module, optimizer)
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ParamError, match=r"^optimizer: .* a replaced step\(\)"):
        check_parameters(module, optimizer)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_rejected(register):
    module = network()
    handle = getattr(module[2].bias, register)(lambda gradient: None)
    with pytest.raises(ParamError, match=r"'2\.bias' has a hook.* on_train_begin\(\)"):
        check_parameters(module, None)
    handle.remove()
    check_parameters(module, None)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_of_modules_are_rejected(make):
    module = network()
    module[1].register_buffer("adjacency", make(torch.eye(3)))
    with pytest.raises(ParamError, match=r"^model: '1\.adjacency' is sparse .* in forward\(\)"):
        check_parameters(module, None)


def test_objects_that_refer_to_each_other_are_sent_together():
    net = network()
    first, second = torch.optim.SGD(net.parameters(), 0.1), torch.optim.LBFGS(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.5)
    view = net[1].running_mean[:2]

    def used():
        return net, net[1].running_mean, scheduler, view

    document = dump_module((net, first, [Outer(second), second], scheduler, used))
    copied_net, optimizer, (outer, bound), its_scheduler, call = load_module(document)

    assert its_scheduler.optimizer is outer.inner is bound
    parameters = [id(p) for p in copied_net.parameters()]
    assert [id(p) for p in bound._params] == parameters
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == parameters
    found, mean, same, its_view = call()
    assert found is copied_net
    assert mean is copied_net[1].running_mean
    assert same is its_scheduler
    mean += 1
    assert torch.equal(its_view, mean[:2])


def test_trained_objects_return_together_and_without_hooks_of_the_rank(caplog):
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.3})
    step(module, optimizer)
    lock = threading.Lock()
    optimizer.register_step_post_hook(lambda *_: lock)

    def loss():
        return module[0].weight

    trained, (own, its_loss) = load_trained(
        trained_file(module, network, (optimizer, loss)), network
    )
    assert its_loss() is trained[0].weight is own.param_groups[0]["params"][0]
    assert own.param_groups[1]["lr"] == 0.3
    optimizer._optimizer_step_post_hooks.clear()
    assert step(trained, own) == step(module, optimizer)
    for name, value in module.state_dict().items():
        assert torch.equal(trained.state_dict()[name], value)
    # An object that cannot be pickled costs the others all but the weights.
    module.steps = 7
    trained, others = load_trained(trained_file(module, network, (lock,)), network)
    assert (hasattr(trained, "steps"), others) == (False, ())
    assert torch.equal(trained[2].weight, module[2].weight)
    assert "cannot be pickled (TypeError: cannot pickle '_thread.lock' object)" in caplog.text


def test_parameter_groups_added_in_training_are_restored():
    def pair():
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
        return net, torch.optim.Adam([net[0].weight], lr=0.1)

    net, optimizer = pair()
    optimizer.param_groups[0]["params"].append(net[0].bias)
    optimizer.add_param_group({"params": [net[1].weight], "lr": 0.2})
    optimizer.add_param_group({"params": [net[2].bias], "lr": 0.3})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    content = optimizer_content(optimizer, net)
    assert content["groups"] == [["0.weight", "0.bias"], ["1.weight"], ["2.bias"]]

    other, found = pair()
    restore_optimizer(found, other, content)
    groups = found.param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.2, 0.3]
    named = {id(p): name for name, p in other.named_parameters()}
    names = [[named[id(p)] for p in group["params"]] for group in groups]
    assert names == [["0.weight", "0.bias"], ["1.weight"], ["2.bias"]]
    for parameter, original in ((other[2].bias, net[2].bias), (other[0].bias, net[0].bias)):
        assert torch.equal(found.state[parameter]["exp_avg"], optimizer.state[original]["exp_avg"])
    # For example a parameter of a loss, which does not exist elsewhere.
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    other, found = pair()
    with pytest.raises(ParamError, match="training has added parameters that are not the model's"):
        restore_optimizer(found, other, optimizer_content(optimizer, net))
