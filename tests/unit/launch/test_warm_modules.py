"""Modules that a call will import, read from its pickle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import cloudpickle
import pytest

from hvd_estimators.launch.rank.process import pickle_call
from hvd_estimators.launch.warm.modules import modules_of
from hvd_estimators.training.call_transfer import StoredCall, train_stored

# As for functions defined in a notebook.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def of(fn: Any, *args: Any) -> tuple[str, ...]:
    return modules_of(pickle_call(fn, args, {}))


def test_imports_of_a_function_and_its_nested_functions_are_found() -> None:
    def train() -> Any:
        import horovod.torch as hvd
        import my_torch
        import torch.nn.functional as functional

        def later() -> Any:
            import pandas as pd

            return pd

        return hvd, functional, my_torch, later

    assert of(train) == ("horovod.torch", "pandas", "torch")
    assert of(lambda: 1) == ()


def test_a_function_with_an_optimizer_imports_what_optimizers_need() -> None:
    import torch
    from torch.optim import SGD

    def of_module() -> Any:
        import torch

        return torch.optim.SGD

    optimizer = SGD([torch.ones(1)], lr=1)
    assert of(of_module) == of(lambda: SGD) == of(len, optimizer) == ("torch", "torch._dynamo")
    assert of(lambda model: model.optim) == ()


def test_values_name_the_modules_of_their_classes() -> None:
    import numpy as np

    assert of(len, np.arange(3)) == ("numpy",)


def test_the_start_of_a_string_is_not_mistaken_for_a_module() -> None:
    assert of(len, "torch is a text", "torchvision", "keras-like", "numpy/x") == ()
    # A package is not all of its modules, even if this process has imported them.
    import horovod.torch

    assert of(len, horovod.__name__) == ()


def test_the_trainer_of_an_estimator_is_found() -> None:
    call: Any = StoredCall(None, "", "", "", "hvd_estimators.torch.trainer")  # type: ignore[arg-type]
    found = of(train_stored, call)
    assert "hvd_estimators.torch.trainer" in found
    # Torch imports this module when the trainer creates an optimizer.
    code = (
        "import sys, torch; torch.optim.SGD([torch.ones(1)], lr=1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("torch._dynamo" in found) == (told.stdout.strip() == "True")
    assert "hvd_estimators" not in found
    # The same modules are known before the call is stored.
    put: Any = StoredCall(None, "/s/call", "0a" * 32, "/s/state", "hvd_estimators.torch.trainer")  # type: ignore[arg-type]
    assert of(train_stored, put) == found


def test_the_client_of_the_drivers_store_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    call: Any = StoredCall(None, "", "", "", "hvd_estimators.torch.trainer")  # type: ignore[arg-type]
    for is_used in (False, True):
        monkeypatch.delitem(sys.modules, "s3fs", raising=False)
        if is_used:
            monkeypatch.setitem(sys.modules, "s3fs", sys)
        assert ("s3fs" in of(train_stored, call)) == is_used


def test_code_is_found_in_a_large_call() -> None:
    def train(data: bytes) -> Any:
        import torch

        return torch, data

    assert of(train, bytes(5 * 2**20)) == ("torch",)
    assert of(len, bytes(5 * 2**20), train) == ("torch",)


def test_modules_that_affect_other_jobs_are_left_out(compat: None) -> None:
    def train() -> Any:
        import horovod.spark.task as task
        import horovod.torch as hvd

        return hvd, task

    assert of(train) == ("horovod.torch", "torch")
