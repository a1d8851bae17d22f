"""Classes that load objects saved by another class."""

from __future__ import annotations

import sys
import types

import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import KerasModel
from hvd_estimators.lightning import LightningModel
from hvd_estimators.saving.saved import class_of
from hvd_estimators.torch import TorchModel

OWN = "hvd_estimators.torch.model.TorchModel"


def test_classes_load_their_own_and_related_classes_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sub = type("Sub", (TorchModel,), {"__module__": "a_users_program"})
    program = types.ModuleType("a_users_program")
    program.Sub = sub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_program", program)
    assert class_of(TorchModel, OWN, "/m") is TorchModel
    assert class_of(TorchModel, "a_users_program.Sub", "/m") is sub
    assert class_of(sub, OWN, "/m") is sub
    lightning = "hvd_estimators.lightning.model.LightningModel"
    assert class_of(TorchModel, lightning, "/m") is LightningModel
    with pytest.raises(ParamError, match="not a LightningModel"):
        class_of(LightningModel, OWN, "/m")
    # Unknown classes.
    for unknown in ("a_users_program.Gone", "no_such_module.Model", "Model"):
        assert class_of(TorchModel, unknown, "/m") is TorchModel


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (OWN, "TorchModel.load"),
        ("hvd_estimators.torch.estimator.TorchEstimator", "TorchEstimator.load"),
        ("pyspark.ml.pipeline.PipelineModel", "PipelineModel.load"),
        ("org.apache.spark.ml.feature.StringIndexer", "StringIndexer.load"),
    ],
)
def test_the_error_for_another_class_names_the_class_to_load_with(found: str, remedy: str) -> None:
    with pytest.raises(ParamError, match="not a KerasModel") as caught:
        class_of(KerasModel, found, "/m")
    assert str(caught.value) == (
        f"path: '/m' holds a {found}, not a KerasModel. Load it with {remedy}."
    )
