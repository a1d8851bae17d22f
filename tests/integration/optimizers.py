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
    return Net(bias="muon" not in name.lower(), sparse="Sparse" in name)


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
    makers["timm.optim.SGDP"] = lambda p: timm.SGDP(p, lr=0.01)
    makers["timm.optim.Lookahead"] = lambda p: timm.Lookahead(torch.optim.Adam(p, lr=0.01), k=3)
    for name in timm.list_optimizers():
        # The optimizers of apex and bitsandbytes need CUDA.
        if not name.startswith(("fused", "bnb")):
            makers[f"timm-{name}"] = lambda p, name=name: _from_factory(timm, name, p)
    # Some differentiate gradients and are rejected.
    for name in (*SECOND_ORDER, *RANDOM):
        del makers[name]
    return makers


SECOND_ORDER = ("timm.optim.Adahessian", "timm-adahessian")
# These optimizers draw random numbers in their steps, and so differ between ranks.
RANDOM = ("timm-kron", "timm-kronc", "timm-kronw")


def _from_factory(timm: ModuleType, name: str, parameters: Any) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if timm.get_optimizer_info(name).has_momentum else {}
    made: torch.optim.Optimizer = timm.get_optimizer_class(name)(parameters, lr=0.01, **options)
    return made


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


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    return parameter is not None and parameter.default is parameter.empty


def train_alone(name: str, make: Make, batches: Any, epochs: int) -> Net:
    """Train in one process, with plain torch."""
    net = make_net(name)
    optimizer: Any = make(list(net.parameters()))
    for _ in range(epochs):
        if hasattr(optimizer, "train"):
            optimizer.train()
        for x, y in batches:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return net
