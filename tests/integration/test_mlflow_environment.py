"""A model in MLflow predicts in a new environment made from its requirements."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_estimators.saving import mlflow_flavor
from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.soak, pytest.mark.spark, pytest.mark.timeout(3600)]

PREDICT = """
import json, sys
import mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
print(json.dumps(model.predict(model.input_example)["y__output"].tolist()))
"""


@pytest.mark.parametrize("has_index", [False, True], ids=["code", "wheel"])
def test_a_model_predicts_in_a_clean_environment(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_index: bool
) -> None:
    pytest.importorskip("mlflow")
    wheels = tmp_path / "wheels"
    if has_index:
        # A folder with this package's wheel serves as the index.
        monkeypatch.setattr(mlflow_flavor, "_is_published", lambda *_: True)
        # A build leaves files behind, so it runs in a copy.
        root, source = tmp_path / "source", Path(mlflow_flavor.__file__).parents[2]
        shutil.copytree(source / "hvd_estimators", root / "hvd_estimators")
        for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.rst", "LICENSE", "NOTICE"):
            shutil.copy(source / name, root / name)
        build = ["wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}", str(root)]
        subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    model = TorchModel(
        model=torch.nn.Linear(2, 1),
        feature_columns=["x"],
        label_columns=["y"],
        input_shapes=[[-1, 2]],
    )
    rows = np.array([[0.5, 1.0], [2.0, -3.0]], np.float32)
    path = tmp_path / "model"
    description = importlib.import_module("mlflow.models").Model()
    mlflow_flavor.save_model(str(path), description, model, lambda: {"x": rows})
    assert (path / "code").exists() == (not has_index)

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    install = ["install", "--quiet", f"--find-links={wheels}", "-r", "requirements.txt"]
    run: Any = {"cwd": path, "env": environment, "check": True}
    subprocess.run([python, "-m", "pip", *install], **run)
    done = subprocess.run([python, "-c", PREDICT, str(path)], stdout=subprocess.PIPE, **run)

    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(rows))[:, 0]
    np.testing.assert_allclose(json.loads(done.stdout), expected.numpy(), rtol=1e-6)
