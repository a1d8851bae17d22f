"""Which modules a call will import, as its bytes tell."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import cloudpickle

from hvd_estimators.launch.rank.process import pickle_call
from hvd_estimators.launch.warm.client import modules_of
from hvd_estimators.training.call_transfer import StoredCall, train_stored

# As the functions of a notebook.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def of(fn: Any, *args: Any) -> tuple[str, ...]:
    return modules_of(pickle_call(fn, args, {}))


def test_what_a_function_imports_is_found_wherever_it_does() -> None:
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


def test_values_name_the_modules_of_their_classes() -> None:
    import numpy as np

    assert of(len, np.arange(3)) == ("numpy",)


def test_a_texts_beginning_is_not_taken_for_a_module() -> None:
    assert of(len, "torch is a text", "torchvision", "keras-like", "numpy/x") == ()


def test_an_estimator_says_which_trainer_it_has() -> None:
    call: Any = StoredCall(None, "", "", "", "hvd_estimators.torch.trainer")  # type: ignore[arg-type]
    found = of(train_stored, call)
    assert "hvd_estimators.torch.trainer" in found
    # What torch imports when the trainer makes an optimizer.
    code = (
        "import sys, torch; torch.optim.SGD([torch.ones(1)], lr=1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("torch._dynamo" in found) == (told.stdout.strip() == "True")
    assert "hvd_estimators" not in found
    # Before there is anything to call, the same is known.
    put: Any = StoredCall(None, "/s/call", "0a" * 32, "/s/state", "hvd_estimators.torch.trainer")  # type: ignore[arg-type]
    assert of(train_stored, put) == found


def test_a_function_by_reference_and_unknown_modules_import_nothing_ahead() -> None:
    import json.tool

    assert of(json.tool.main) == ()
    own: Any = StoredCall(None, "", "", "", "acme.trainer")  # type: ignore[arg-type]
    assert of(train_stored, own) == ()


def test_a_large_call_is_looked_at_where_its_code_is() -> None:
    def train(data: bytes) -> Any:
        import torch

        return torch, data

    assert of(train, bytes(5 * 2**20)) == ("torch",)
    assert of(len, bytes(5 * 2**20), train) == ("torch",)


def test_what_changes_other_jobs_imports_is_left_to_the_ranks(compat: None) -> None:
    def train() -> Any:
        import horovod.spark.task as task
        import horovod.torch as hvd

        return hvd, task

    assert of(train) == ("horovod.torch", "torch")
