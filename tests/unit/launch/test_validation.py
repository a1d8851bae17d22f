"""Arguments of backends: those of horovod.spark, and network interfaces."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_estimators.exceptions import did_you_mean
from hvd_estimators.launch import SparkBackend
from hvd_estimators.launch.validation import interface_names


@pytest.mark.parametrize(
    ("name", "value"), [("use_mpi", True), ("use_gloo", False), ("extra_mpi_args", "-v")]
)
def test_arguments_of_horovod_spark_have_no_effect_and_are_logged(
    caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    options: dict[str, Any] = {name: value}
    SparkBackend(2, **options)
    assert f"{name}" in caplog.text
    assert "Gloo is always the controller" in caplog.text


@pytest.mark.parametrize(
    ("nics", "names"),
    [
        (None, ()),
        ([], ()),
        ("eth1", ("eth1",)),
        ("eth1, ib0", ("eth1", "ib0")),
        (["ib0", "eth1", "ib0"], ("ib0", "eth1")),
        ({"ib0", "eth1"}, ("eth1", "ib0")),
    ],
)
def test_network_interfaces_are_a_string_or_a_collection(nics: Any, names: tuple[str, ...]) -> None:
    assert interface_names(nics) == names


def test_a_hint_names_the_most_similar_name() -> None:
    assert did_you_mean("batchsize", ["epochs", "batch_size"]) == " Did you mean 'batch_size'?"
    assert did_you_mean("colour", ["epochs", "batch_size"]) == ""
