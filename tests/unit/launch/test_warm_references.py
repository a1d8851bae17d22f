"""Which modules a call will import that names its function only."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_estimators.launch.rank.process import pickle_call
from hvd_estimators.launch.rank.user_call import call_without_notifications
from hvd_estimators.launch.warm.modules import modules_behind, modules_of_call

MODULES = {
    "__init__.py": "",
    "training.py": """
        import json
        from typing import TYPE_CHECKING

        from acme_launched.layers import Block

        if TYPE_CHECKING:
            import tensorflow

        def prepare():
            import pandas

        def train(rate):
            import horovod.torch as hvd

            return hvd, help_out(rate)

        def help_out(rate):
            return json, Block

        class Job:
            def __call__(self):
                return prepare()

            @staticmethod
            def start():
                return help_out(0)
        """,
    "layers.py": "from numpy import ndarray\n\nclass Block: pass\n",
    "plain.py": "def add(a, b):\n    return a + b\n",
    "strange.py": """
        class Proxy:
            def __getattr__(self, name):
                raise RuntimeError(name)

            @property
            def __class__(self):
                raise RuntimeError("class")

        proxy = Proxy()

        def use():
            import torch

            return proxy
        """,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's package, which can be imported as ``acme_launched`` until the test ends."""
    import textwrap

    folder = tmp_path / "acme_launched"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("acme_launched")]:
        del sys.modules[name]


def module(name: str) -> Any:
    return importlib.import_module(f"acme_launched.{name}")


def test_a_function_by_reference_brings_in_what_it_and_its_module_import(package: Path) -> None:
    training = module("training")

    # pandas is another function's, TensorFlow a type checker's.
    assert modules_behind(training.train) == {"horovod.torch", "numpy", "torch"}
    assert modules_behind(training.help_out) == {"numpy"}
    assert modules_behind(training.Job()) == {"pandas", "numpy"}
    assert modules_behind(module("plain").add) == set()


def test_functions_are_found_among_arguments_and_in_partials(package: Path) -> None:
    training = module("training")
    call: Any = (training.train, (0.1,), {})

    assert modules_behind(functools.partial(training.train, 1)) == {
        "horovod.torch",
        "numpy",
        "torch",
    }
    assert modules_behind(len, [{"callback": training.Job().__call__}]) == {"pandas", "numpy"}
    found = modules_of_call(
        pickle_call(call_without_notifications, call, {}), call_without_notifications, call, {}
    )
    mine = "hvd_estimators.launch.rank.user_call"
    assert found == ("horovod.torch", mine, "numpy", "torch")


def test_objects_that_do_not_like_to_be_looked_at_are_left_alone(package: Path) -> None:
    strange = module("strange")

    assert modules_behind(strange.use, strange.proxy) == {"torch"}


def test_looking_imports_nothing(package: Path) -> None:
    training = module("training")
    before = set(sys.modules)

    modules_behind(training.train, training.Job())

    assert set(sys.modules) == before
