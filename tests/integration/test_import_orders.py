"""TensorFlow and torch in one process: also triton, which must not run on TensorFlow's LLVM."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# torch.compile imports all of triton; jit_compile uses TensorFlow's LLVM.
USE_BOTH = """
import tensorflow, torch, torch._dynamo, triton
from torch._dynamo.testing import CompileCounter
doubled = tensorflow.function(lambda x: 2 * x, jit_compile=True)(tensorflow.constant([1.0, 2.0]))
counter = CompileCounter()
tripled = torch.compile(lambda x: 3 * x, backend=counter)(torch.ones(2))
print(doubled.numpy().tolist(), tripled.tolist(), counter.frame_count)
"""


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join(lines) + USE_BOTH
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.soak
def test_tensorflow_before_triton_crashes_without_this_package() -> None:
    assert run("import tensorflow").returncode == -signal.SIGSEGV


# What ranks of Keras do over torch's group, in both orders of the imports.
SUM_IN_A_FUNCTION = """
import os
import tensorflow as tf
from hvd_estimators.keras.collectives import session
with session("torch") as collectives:
    summed = tf.function(lambda x: collectives.sum(x @ x, "sum"), autograph=False)
    square = torch.ones(256, 256)
    print(summed(tf.ones((256, 256)))[0, 0].numpy(), (square @ square)[0, 0], flush=True)
# As ranks end.
os._exit(0)
"""


@pytest.mark.parametrize("first", ["torch", "tensorflow"])
def test_torch_reduces_tensors_of_tensorflow(first: str) -> None:
    second = {"torch": "tensorflow", "tensorflow": "torch"}[first]
    program = f"import {first}, {second}, torch" + SUM_IN_A_FUNCTION
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["256.0", "tensor(256.)"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "lines",
    [
        ["import tensorflow", "import hvd_estimators", "import lightning"],
        ["from hvd_estimators.keras import KerasEstimator", "import hvd_estimators.lightning"],
    ],
    ids=" then ".join,
)
def test_frameworks_can_be_imported_in_any_order(lines: list[str]) -> None:
    done = run(*lines)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[2.0, 4.0] [3.0, 3.0] 1"
