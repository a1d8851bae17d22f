"""Which classes load what was saved of another one."""

from __future__ import annotations

import sys
import types

import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import KerasModel
from hvd_estimators.saving.saved import check_class
from hvd_estimators.torch import TorchModel

OWN = "hvd_estimators.torch.model.TorchModel"


def test_a_class_loads_its_own_and_that_of_its_relatives(monkeypatch: pytest.MonkeyPatch) -> None:
    sub = type("Sub", (TorchModel,), {"__module__": "a_users_program"})
    program = types.ModuleType("a_users_program")
    program.Sub = sub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_program", program)
    check_class(TorchModel, OWN, "/m")
    check_class(TorchModel, "a_users_program.Sub", "/m")
    check_class(sub, OWN, "/m")
    # Nobody here can tell what these are.
    for unknown in ("a_users_program.Gone", "no_such_module.Model", "Model"):
        check_class(TorchModel, unknown, "/m")


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (OWN, "TorchModel.load"),
        ("hvd_estimators.torch.estimator.TorchEstimator", "TorchEstimator.load"),
        ("pyspark.ml.pipeline.PipelineModel", "PipelineModel.load"),
        ("org.apache.spark.ml.feature.StringIndexer", "StringIndexer.load"),
    ],
)
def test_what_is_of_another_class_is_refused_with_the_class_that_loads_it(
    found: str, remedy: str
) -> None:
    with pytest.raises(ParamError, match="which is no KerasModel") as caught:
        check_class(KerasModel, found, "/m")
    assert str(caught.value) == (
        f"path: '/m' holds a {found}, which is no KerasModel. Load it with {remedy}."
    )
