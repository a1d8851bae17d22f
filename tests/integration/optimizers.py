"""All optimizers of torch and of some packages, each with a small network to train."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

WIDTH = 4

Make = Callable[[Any], torch.optim.Optimizer]


def import_timm_optimizers() -> ModuleType:
    """Import ``timm.optim`` without timm's ``__init__``, which needs torchvision."""
    if "timm.optim" not in sys.modules:
        spec = importlib.util.find_spec("timm")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for name in ("timm", "timm.models"):
            sys.modules[name] = ModuleType(name)
        package: Any = sys.modules["timm"]
        package.__path__ = list(spec.submodule_search_locations)
        models: Any = sys.modules["timm.models"]
        models.group_parameters = None
    return importlib.import_module("timm.optim")


class Net(torch.nn.Module):
    """Regression in double precision, so that errors stand out from rounding."""

    def __init__(self, bias: bool = True, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        linear = torch.nn.Linear
        self.net = torch.nn.Sequential(
            linear(WIDTH, 6, bias=bias), torch.nn.Tanh(), linear(6, 1, bias=bias)
        )
        if sparse:
            self.net = torch.nn.Embedding(128, 1, sparse=True)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.net, torch.nn.Embedding):
            # A few numbers of each row select rows of the table.
            return self.net((x * 16).long().clamp(-64, 63) + 64).sum(dim=(1, 2))
        return self.net(x)[:, 0]


def make_net(name: str) -> Net:
    # Muon takes matrices only.
    return Net(bias="muon" not in name.lower(), sparse=name.endswith("SparseAdam"))


def classes(package: ModuleType) -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizers that a package exports."""
    base = torch.optim.Optimizer
    return {
        f"{package.__name__}.{name}": value
        for name, value in sorted(vars(package).items())
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }


def torch_optimizers() -> dict[str, Make]:
    makers: dict[str, Make] = dict(classes(torch.optim))
    lbfgs = torch.optim.LBFGS
    makers["torch.optim.LBFGS"] = lambda p: lbfgs(p, lr=0.5, max_iter=4)
    makers["torch.optim.LBFGS-strong_wolfe"] = lambda p: lbfgs(
        p, max_iter=4, line_search_fn="strong_wolfe"
    )
    return makers


class SlowWeights(torch.optim.Optimizer):
    """Wrapper as torch-optimizer's Lookahead: without the base's attributes, with other keys."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = {}

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self.state.setdefault(parameter, torch.zeros_like(parameter).detach())
            with torch.no_grad():
                slow.lerp_(parameter, 0.9)
                parameter.copy_(slow)

    def state_dict(self) -> Any:
        return {"slow": list(self.state.values()), "fast": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state = dict(zip(parameters, state["slow"], strict=False))
        self.inner.load_state_dict(state["fast"])


def other_optimizers() -> dict[str, Make]:
    """Return the optimizers of timm (classes and factory names), lion and schedulefree."""
    import lion_pytorch
    import schedulefree

    timm = import_timm_optimizers()
    own = classes(torch.optim).values()
    makers: dict[str, Make] = {
        name: kind
        for package in (timm, lion_pytorch, schedulefree)
        for name, kind in classes(package).items()
        if kind not in own
    }
    makers["own.SlowWeights"] = lambda p: SlowWeights(_inner(p))
    makers["timm.optim.SGDP"] = lambda p: timm.SGDP(p, lr=0.01)
    makers["timm.optim.Lookahead"] = lambda p: timm.Lookahead(torch.optim.Adam(p, lr=0.01), k=3)
    for name in timm.list_optimizers():
        # The optimizers of apex and bitsandbytes need CUDA.
        if not name.startswith(("fused", "bnb")):
            makers[f"timm-{name}"] = lambda p, name=name: _from_factory(timm, name, p)
    # Some differentiate gradients and are rejected.
    for name in (*SECOND_ORDER, *RANDOM):
        makers.pop(name, None)
    return makers


SECOND_ORDER = ("timm.optim.Adahessian", "timm-adahessian")
# These optimizers draw random numbers in their steps, and so differ between ranks.
RANDOM = ("timm-kron", "timm-kronc", "timm-kronw")


def _from_factory(timm: ModuleType, name: str, parameters: Any) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if timm.get_optimizer_info(name).has_momentum else {}
    made: torch.optim.Optimizer = timm.get_optimizer_class(name)(parameters, lr=0.01, **options)
    return made


def _inner(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def step_with_closure(
    model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any
) -> Any:
    """Train on a batch with an optimizer that runs the model as often as it likes."""
    returned = {}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        outputs, shaped = transform_outputs(model(*inputs), labels)
        loss = loss_fn(outputs, shaped)
        loss.backward()
        returned["outputs"], returned["loss"] = outputs, loss.detach()
        return loss

    optimizer.step(closure)
    return returned["outputs"], returned["loss"]


def step_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the ``train_minibatch_fn`` that an optimizer needs, or None."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = parameter is not None and parameter.default is parameter.empty
    return step_with_closure if needs_closure else None


def train_alone(name: str, make: Make, batches: Any, epochs: int) -> Net:
    """Train in one process, with plain torch."""
    net = make_net(name)
    optimizer: Any = make(list(net.parameters()))
    step = step_of(optimizer)

    def loss_fn(outputs: Any, labels: Any) -> torch.Tensor:
        (output,), (label,) = outputs, labels
        return torch.nn.functional.mse_loss(output, label.to(output.dtype))

    for _ in range(epochs):
        if hasattr(optimizer, "train"):
            optimizer.train()
        for x, y in batches:
            if step is not None:
                step(net, optimizer, lambda raw, labels: ([raw], labels), loss_fn, [x], [y])
                continue
            optimizer.zero_grad()
            loss_fn([net(x)], [y]).backward()
            optimizer.step()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return net
