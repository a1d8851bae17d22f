"""Models in MLflow's format: requirements, signature and the import path."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from packaging.requirements import Requirement

from hvd_estimators.saving import mlflow_flavor
from hvd_estimators.saving.mlflow_flavor import find_requirements


def install(folder: Path, source: dict[str, Any] | None) -> None:
    """Install a distribution ``net-lib`` with the module ``netlib``, as pip records it."""
    (folder / "netlib").mkdir(parents=True)
    (folder / "netlib" / "__init__.py").touch()
    info = folder / "net_lib-1.2+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: net-lib\nVersion: 1.2+cpu\n")
    (info / "top_level.txt").write_text("netlib\n")
    (info / "RECORD").write_text("netlib/__init__.py,,0\n")
    if source is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", **source}))


@pytest.mark.parametrize(
    ("source", "is_own", "is_named"),
    [
        (None, False, True),
        ({"archive_info": {}}, False, True),
        ({"dir_info": {"editable": True}}, False, False),
        (None, True, True),
        ({"archive_info": {}}, True, False),
    ],
)
def test_code_that_no_index_has_is_copied(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: dict[str, Any] | None,
    is_own: bool,
    is_named: bool,
) -> None:
    install(tmp_path, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    if is_own:
        monkeypatch.setattr(mlflow_flavor, "_OWN", "netlib")
    requirements, code = find_requirements(["netlib", "json", "__main__"])
    assert ("net-lib==1.2" in requirements) == is_named
    assert (str(tmp_path / "netlib") in code) == (not is_named)
    assert not any(Path(path).name in ("json", "__main__") for path in code)


def test_a_checkout_on_the_import_path_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", None)
    (tmp_path / "netlib.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path))
    requirements, code = find_requirements(["netlib"])
    assert str(tmp_path / "netlib.py") in code
    assert not any(line.startswith("net-lib") for line in requirements)


def test_metadata_of_a_build_does_not_publish_a_source_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, None)
    (tmp_path / "net_lib-1.2+cpu.dist-info").rename(tmp_path / "net_lib.egg-info")
    (tmp_path / "net_lib.egg-info" / "METADATA").rename(tmp_path / "net_lib.egg-info" / "PKG-INFO")
    (tmp_path / "net_lib.egg-info" / "RECORD").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(mlflow_flavor, "_OWN", "netlib")
    requirements, code = find_requirements(["netlib"])
    assert code == [str(tmp_path / "netlib")]
    assert not any(line.startswith("net-lib") for line in requirements)


def test_requirements_are_installed_versions_of_declared_dependencies() -> None:
    requirements = list(map(Requirement, find_requirements(["torch"])[0]))
    for requirement in requirements:
        assert requirement.specifier.contains(version(requirement.name))
        assert "+" not in str(requirement)
    setup = configparser.ConfigParser()
    setup.read(Path(mlflow_flavor.__file__).parents[2] / "setup.cfg")
    declared = {Requirement(r).name for r in setup["options"]["install_requires"].split()}
    assert {requirement.name for requirement in requirements} - {"torch"} <= declared
    assert "torch" in {requirement.name for requirement in requirements}


def test_keras_without_tensorflow_runs_on_torch_and_needs_only_it() -> None:
    program = (
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"
        "from hvd_estimators.keras import KerasModel\n"
        "from hvd_estimators.saving.mlflow_flavor import framework_modules\n"
        "assert framework_modules('hvd_estimators.keras') == ['keras', 'torch']\n"
    )
    environment = {name: v for name, v in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class Predictor:
    """Predictor of the first feature's sum and its text."""

    feature_columns = ("image", "flag", "word", "count", "number")

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        sums = [np.float64(np.sum(cell)) for cell in frame["image"]]
        return pd.DataFrame({"sum": sums, "scores": [np.ones(2) for _ in sums]})


@pytest.mark.parametrize(("side", "count"), [(2, 5), (200, 2), (500, 1)])
def test_signature_and_example_follow_from_training_rows(side: int, count: int) -> None:
    pytest.importorskip("mlflow")
    rows = {
        "image": np.arange(7 * side * side, dtype=np.float32).reshape(7, side, side),
        "flag": np.array([True, False] * 3 + [True]),
        "word": np.array(list("abcdefg"), object),
        "count": np.arange(7, dtype=np.int16),
        "number": np.linspace(0, 1, 7, dtype=np.float32),
        "label": np.arange(7),
    }
    example, signature = mlflow_flavor._describe(Predictor(), rows)
    types = {column.name: str(column.type) for column in signature.inputs.inputs}
    assert types == {
        "image": "Array(Array(double))",
        "flag": "DataType.boolean",
        "word": "DataType.string",
        "count": "DataType.long",
        "number": "DataType.double",
    }
    outputs = {column.name: str(column.type) for column in signature.outputs.inputs}
    assert outputs == {"sum": "DataType.double", "scores": "Array(double)"}
    assert len(example) == count
    for name in example:
        np.testing.assert_array_equal(example[name].tolist(), rows[name][:count])
    assert mlflow_flavor._describe(Predictor(), None) == (None, None)


def test_copied_code_does_not_replace_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "data" / "sparkml" / "stages" / "0_TorchModel_1"
    stage.mkdir(parents=True)
    monkeypatch.setattr(mlflow_flavor, "load_predictor", lambda path: path)
    code = str(tmp_path / "code")
    monkeypatch.setattr(sys, "path", [code, "elsewhere"])
    assert mlflow_flavor._load_pyfunc(str(tmp_path / "data" / "sparkml")) == str(stage)
    assert sys.path == ["elsewhere", code]
    # The package is the copied code.
    monkeypatch.setattr(sys, "path", [code, "elsewhere"])
    monkeypatch.setattr(mlflow_flavor, "__file__", f"{code}/hvd_estimators/saving/flavor.py")
    mlflow_flavor._load_pyfunc(str(tmp_path / "data" / "sparkml"))
    assert sys.path == [code, "elsewhere"]
