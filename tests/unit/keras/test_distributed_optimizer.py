"""Checks and changed settings before ranks average gradients."""

from __future__ import annotations

import logging

import keras
import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import DistributedOptimizer
from hvd_estimators.keras.callbacks import turn_off_jit_compile
from hvd_estimators.keras.gradients import is_distributed


def make_model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def test_optimizers_are_wrapped_once_with_at_least_one_pass() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(ParamError, match="backward_passes_per_step: expected 1 or more, found 0"):
        DistributedOptimizer(optimizer, backward_passes_per_step=0)
    assert not is_distributed(optimizer)
    assert DistributedOptimizer(optimizer) is optimizer
    assert is_distributed(optimizer)
    with pytest.raises(ParamError, match="Wrap it once"):
        DistributedOptimizer(optimizer)


def test_xla_is_disabled_with_a_log_message(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    model.compile("sgd", "mse", jit_compile=False)
    with caplog.at_level(logging.WARNING):
        turn_off_jit_compile(model)
        assert not caplog.records
        model.compile("sgd", "mse", jit_compile=True)
        turn_off_jit_compile(model)
    assert not model.jit_compile
    assert "XLA cannot compile the operations between ranks" in caplog.text
