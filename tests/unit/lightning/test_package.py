"""``lightning.pytorch`` and ``pytorch_lightning``: either, both, and never mixed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning import HorovodStrategy
from hvd_estimators.lightning.package import FLAVORS, flavor_of, is_lightning, one_flavor

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def make_module(package: str) -> Any:
    class Line(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(self.layer.weight)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return -self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    return Line()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_strategy_works_with_either_packages_trainer(package: str) -> None:
    module = make_module(package)
    strategy = HorovodStrategy(package=package)
    trainer = importlib.import_module(package).Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert trainer.strategy is strategy
    assert isinstance(strategy, HorovodStrategy)
    assert is_lightning(strategy, "strategies.DDPStrategy")
    trainer.fit(module, torch.utils.data.DataLoader([torch.tensor([2.0])] * 3))
    # Three steps, each of 0.5 * 2.
    assert module.layer.weight.item() == 3.0


def test_the_strategys_package_is_that_of_its_plugin() -> None:
    for package in PACKAGES:
        importlib.import_module(package)
    with pytest.raises(ParamError, match=r"package: .* one of 'lightning.pytorch', 'pytorch_li"):
        HorovodStrategy()
    for package in PACKAGES:
        plugin = importlib.import_module(f"{package}.plugins").MixedPrecision("bf16-mixed", "cpu")
        strategy = HorovodStrategy(precision_plugin=plugin)
        assert flavor_of(strategy) == flavor_of(plugin)
        assert strategy.precision_plugin is plugin


def test_mixed_packages_are_rejected_and_named() -> None:
    modules = {package: make_module(package) for package in PACKAGES}
    for package, flavor in zip(PACKAGES, FLAVORS, strict=True):
        callback = importlib.import_module(f"{package}.callbacks").EarlyStopping("loss")
        named = [("model", modules[package]), ("callbacks", callback), ("loss", print)]
        assert one_flavor(named) == flavor
        assert is_lightning(callback, "Callback")
        assert not is_lightning(callback, "LightningModule")
    with pytest.raises(
        ParamError,
        match=r"model \(Line\) comes from the package lightning\.pytorch, and callbacks "
        r"\(EarlyStopping\) from pytorch_lightning\.",
    ):
        one_flavor([("model", modules["lightning.pytorch"]), ("callbacks", callback)])


SCRIPT = """
import sys
for hidden in {hidden}:
    sys.modules[hidden] = None
import importlib, torch
from hvd_estimators.lightning import HorovodStrategy, LightningEstimator
from hvd_estimators.lightning.checkpoint import RunCheckpoint
from hvd_estimators.lightning.package import default_flavor, of_flavor
assert "lightning" not in sys.modules or sys.modules["lightning"] is None
assert not sys.modules.get("pytorch_lightning")
flavor = default_flavor()
assert flavor.name == "{package}"
package = importlib.import_module("{package}")
trainer = package.Trainer(strategy=HorovodStrategy(), devices=1, accelerator="cpu", logger=False)
assert trainer.strategy.world_size == 1
assert issubclass(of_flavor(RunCheckpoint, flavor), package.Callback)
loaded = {{name for name in ("lightning", "pytorch_lightning") if sys.modules.get(name)}}
assert loaded == {{"{package}".partition(".")[0]}}, loaded
"""


@pytest.mark.parametrize(
    ("package", "hidden"),
    [
        ("lightning.pytorch", ("pytorch_lightning", "lightning_fabric")),
        ("pytorch_lightning", ("lightning",)),
    ],
)
def test_one_package_suffices(package: str, hidden: tuple[str, ...]) -> None:
    script = SCRIPT.format(package=package, hidden=hidden)
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_error_without_lightning_names_the_install_command() -> None:
    script = (
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "from hvd_estimators.lightning.package import default_flavor\n"
        "default_flavor()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert "DependencyError" in done.stderr
    assert 'hvd_estimators>[lightning]"' in done.stderr
