"""Models and estimators that are saved and loaded again, in all environments."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.errors import PythonException

from hvd_estimators.exceptions import StoreError
from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.versions]

ROWS = [(n % 5 / 4.0, float(n % 7) / 6.0) for n in range(24)]
COLUMNS: dict[str, Any] = {"label_columns": ["label"], "output_shapes": [[1]]}
BESIDE_SCRIPT = """
import torch
from lightning.pytorch import LightningModule

class Sum(LightningModule):
    def forward(self, x, y):
        return torch.stack([x, y], 1).float().sum(1)
"""


def check_sums(spark: Any, model: Any) -> None:
    df = spark.createDataFrame(ROWS, ["a.b", "é"]).repartition(1)
    found = model.transform(df).collect()
    expected = [row[0] + row[1] for row in found]
    assert len(found) == len(ROWS)
    np.testing.assert_allclose([row["label__output"] for row in found], expected, rtol=1e-6)


def test_a_saved_class_of_a_module_beside_the_script_needs_the_file(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums_beside_script.py").write_text(BESIDE_SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("sums_beside_script").Sum()
    LightningModel(model=net, feature_columns=["a.b", "é"], **COLUMNS).save(f"{tmp_path / 'model'}")
    # The class is pickled by reference, like a class of any other module.
    with pytest.raises(PythonException, match=r"'sums_beside_script'.*addPyFile\('sums_beside"):
        check_sums(spark, LightningModel.load(f"{tmp_path / 'model'}"))
    spark.sparkContext.addPyFile(f"{tmp_path / 'sums_beside_script.py'}")
    check_sums(spark, LightningModel.load(f"{tmp_path / 'model'}"))


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_a_model_of_an_unknown_format_is_rejected(spark: Any, version: Any, tmp_path: Path) -> None:
    model = TorchModel(model=torch.nn.Linear(2, 1), feature_columns=["features"], **COLUMNS)
    model.save(f"{tmp_path / 'model'}")
    (part,) = (tmp_path / "model" / "metadata").glob("part-*")
    document = json.loads(part.read_text())
    assert document["formatVersion"] == 1
    part.write_text(json.dumps({**document, "formatVersion": version}))
    for crc in part.parent.glob(".*.crc"):
        crc.unlink()
    message = r"formatVersion" if version == "1" else rf"format {version}.*reads 1.*Install"
    with pytest.raises(StoreError, match=message) as caught:
        TorchModel.load(f"{tmp_path / 'model'}")
    assert str(tmp_path / "model") in str(caught.value)
