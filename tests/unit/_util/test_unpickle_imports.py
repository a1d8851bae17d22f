"""Unpickling that leaves the classes of the process that wrote the pickle unchanged."""

from __future__ import annotations

import enum
import io
import os
import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest

from hvd_estimators._util import unpickle_imports

SOURCE = """
import abc, dataclasses, enum

SCALE = 1.0

class Base(abc.ABC):
    count = 0

    @abc.abstractmethod
    def apply(self, x): ...

@dataclasses.dataclass
class Net(Base):
    factor: float = 1.0

    def apply(self, x):
        return SCALE * self.factor * x

class Kind(enum.Enum):
    ONE = 1

    def describe(self):
        return f"{self.name} {SCALE}"
"""


@pytest.fixture
def notebook() -> dict[str, Any]:
    """Globals of a program whose classes cannot be imported."""
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, found)
    return found


def test_live_classes_keep_their_globals_and_attributes(notebook: dict[str, Any]) -> None:
    net, kind = notebook["Net"](2.0), notebook["Kind"].ONE
    document = cloudpickle.dumps((net, kind, notebook["Base"]))
    notebook["Base"].count = 5
    method = notebook["Net"].apply
    copy, same_kind, base = unpickle_imports.loads(document)
    assert copy is not net
    assert copy == net
    assert type(copy) is notebook["Net"]
    assert same_kind is kind
    assert base is notebook["Base"]
    assert base.count == 5
    assert notebook["Net"].apply is method
    notebook["SCALE"] = 10.0
    assert copy.apply(3) == net.apply(3) == 60.0
    assert kind.describe() == "ONE 10.0"
    # The standard library's loader, in contrast, detaches them.
    pickle.loads(document)
    notebook["SCALE"] = 100.0
    assert net.apply(3) == 6.0


def test_classes_defined_by_a_pickle_are_updated_by_the_next(notebook: dict[str, Any]) -> None:
    net = notebook["Net"](2.0)
    first = cloudpickle.dumps(net)
    notebook["Net"].apply = lambda self, x: -x
    second = cloudpickle.dumps(net)
    script = (
        "import sys\n"
        "from hvd_estimators._util.unpickle_imports import load, loads\n"
        "first = load(sys.stdin.buffer)\n"
        "assert first.apply(3) == 6.0\n"
        "second = load(sys.stdin.buffer)\n"
        "assert type(second) is type(first)\n"
        "assert second.apply(3) == -3\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=first + second, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_modules_that_pickles_import_are_recorded() -> None:
    program: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import fractions, decimal as d, xml.dom\n"
        "def half(x): return d.Decimal(1) / fractions.Fraction(x)",
        program,
    )
    document = cloudpickle.dumps((program["half"], enum.IntFlag))
    with unpickle_imports.recording_modules() as modules:
        unpickle_imports.loads(document)
    assert modules >= {"fractions", "decimal", "enum", "cloudpickle"}
    assert "xml" not in modules
    before = set(modules)
    unpickle_imports.loads(cloudpickle.dumps(io.StringIO))
    assert modules == before


def test_workers_import_keras_with_the_drivers_backend() -> None:
    send = (
        "import sys, cloudpickle\n"
        "from hvd_estimators.keras import backend\n"
        "from hvd_estimators._util.unpickle_imports import first_imports\n"
        "steps = (*first_imports(), backend.on_tensorflow)\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(steps))\n"
    )
    receive = (
        "import sys\n"
        "from hvd_estimators._util.unpickle_imports import load\n"
        "*_, on_tensorflow = load(sys.stdin.buffer)\n"
        "assert not on_tensorflow()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    sent = subprocess.run(
        [sys.executable, "-c", send],
        env={**environment, "KERAS_BACKEND": "torch"},
        capture_output=True,
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", receive], env=environment, input=sent.stdout, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
