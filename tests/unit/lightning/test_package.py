"""``lightning.pytorch`` and ``pytorch_lightning``: either, both, and never mixed."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning.package import FLAVORS, is_lightning, one_flavor

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def test_mixed_packages_are_rejected_and_named() -> None:
    modules = {package: importlib.import_module(package).LightningModule() for package in PACKAGES}
    for package, flavor in zip(PACKAGES, FLAVORS, strict=True):
        callback = importlib.import_module(f"{package}.callbacks").EarlyStopping("loss")
        named = [("model", modules[package]), ("callbacks", callback), ("loss", print)]
        assert one_flavor(named) == flavor
        assert is_lightning(callback, "Callback")
        assert not is_lightning(callback, "LightningModule")
    with pytest.raises(
        ParamError,
        match=r"model \(LightningModule\) comes from the package lightning\.pytorch, and callbacks "
        r"\(EarlyStopping\) from pytorch_lightning\.",
    ):
        one_flavor([("model", modules["lightning.pytorch"]), ("callbacks", callback)])


SCRIPT = """
import sys
for hidden in {hidden}:
    sys.modules[hidden] = None
import importlib
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.lightning.checkpoint import RunCheckpoint
from hvd_estimators.lightning.strategy import WeightedStrategy
from hvd_estimators.lightning.package import of_flavor, one_flavor
assert "lightning" not in sys.modules or sys.modules["lightning"] is None
assert not sys.modules.get("pytorch_lightning")
package = importlib.import_module("{package}")
flavor = one_flavor([("model", package.LightningModule()), ("callbacks", None)])
assert flavor.name == "{package}"
assert issubclass(of_flavor(RunCheckpoint, flavor), package.Callback)
assert of_flavor(WeightedStrategy, flavor).strategy_name == "horovod"
package.Trainer(accelerator="cpu", logger=False)
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
