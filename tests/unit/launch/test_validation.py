"""Unsupported arguments of backends: those of horovod.spark and unknown ones."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hvd_estimators.exceptions import did_you_mean
from hvd_estimators.launch import LocalBackend, SparkBackend
from hvd_estimators.launch.validation import interface_names

BACKENDS = [LocalBackend, SparkBackend]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("use_mpi", True, "Gloo is always the controller"),
        ("use_gloo", False, "Gloo is always the controller"),
        ("extra_mpi_args", "-v", "Gloo is always the controller"),
    ],
)
def test_arguments_of_horovod_spark_have_no_effect_and_are_logged(
    caplog: pytest.LogCaptureFixture, backend: Any, name: str, value: Any, instead: str
) -> None:
    with caplog.at_level(logging.WARNING):
        backend(2, **{name: value})
    assert f"{backend.__name__}: {name} has no effect. " in caplog.text
    assert instead in caplog.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_match_the_defaults_are_accepted_silently(
    caplog: pytest.LogCaptureFixture, backend: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        backend(2, use_gloo=True, use_mpi=False, nics=None)
    assert not caplog.records


def test_spark_only_arguments_are_warned_about_on_one_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        LocalBackend(1, start_timeout=5, executable="/usr/bin/python3", nics={"eth1"})
    assert "start_timeout has no effect" in caplog.text
    assert "executable has no effect" in caplog.text
    assert "nics has no effect. Ranks on this machine meet at 127.0.0.1" in caplog.text


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
