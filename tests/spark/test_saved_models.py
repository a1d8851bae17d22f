"""Saved models stay loadable by later versions, in all environments.

The files in ``saved``, which `saved_models` wrote, must remain readable.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saved_models
from pyspark.errors import PythonException
from pyspark.ml import PipelineModel

from hvd_estimators.exceptions import StoreError
from hvd_estimators.keras import KerasModel
from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.versions]

SAVED = Path(__file__).with_name("saved")
EXPECTED = json.loads((SAVED / "expected.json").read_text())
CLASSES: dict[str, Any] = {
    "keras": KerasModel,
    "lightning": LightningModel,
    "pipeline": PipelineModel,
    "torch": TorchModel,
}


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_a_saved_model_loads_and_predicts_the_same(spark: Any, kind: str) -> None:
    if kind == "lightning":
        # The class is pickled by reference, like that of any module beside a user's program.
        with pytest.raises(PythonException, match=r"module 'saved_models'.*addPyFile\('saved_mod"):
            saved_models.predictions(spark, kind, LightningModel.load(f"{SAVED / kind}"))
        spark.sparkContext.addPyFile(f"{saved_models.__file__}")
    model = CLASSES[kind].load(f"{SAVED / kind}")
    found = saved_models.predictions(spark, kind, model)
    np.testing.assert_allclose(found, EXPECTED[kind], rtol=1e-5, atol=1e-6)
    own = model.stages[-1] if kind == "pipeline" else model
    history = own.getHistory()
    assert len(history["loss"] if kind == "keras" else history) == 2


def test_a_saved_estimator_loads_with_its_params(spark: Any) -> None:
    estimator = TorchEstimator.load(f"{SAVED / 'estimator'}")
    assert (estimator.getBatchSize(), estimator.getEpochs()) == (8, 2)
    assert estimator.getFeatureCols() == ["features"]
    assert not estimator.isSet("store")
    assert [layer.__class__.__name__ for layer in estimator.getModel()] == [
        "Linear",
        "Tanh",
        "Linear",
    ]
    assert estimator.getOptimizer().defaults["lr"] == 0.01


def test_a_model_of_a_later_version_is_rejected(spark: Any, tmp_path: Path) -> None:
    shutil.copytree(SAVED / "torch", tmp_path / "model")
    (part,) = (tmp_path / "model" / "metadata").glob("part-*")
    document = json.loads(part.read_text())
    part.write_text(json.dumps({**document, "formatVersion": document["formatVersion"] + 1}))
    with pytest.raises(StoreError, match=r"format 2.*reads up to 1.*later version") as caught:
        TorchModel.load(f"{tmp_path / 'model'}")
    assert str(tmp_path / "model") in str(caught.value)
