"""TensorFlow and torch in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]


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
