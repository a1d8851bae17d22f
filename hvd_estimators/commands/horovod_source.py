"""Horovod's source, changed before it is compiled.

Each file of ``patches/`` is one change and starts with its reason. They apply in the order of their
names, to the source of `toolchain.HOROVOD_VERSION` exactly, which pip verifies by its hash. Beside
them, the source gets two things that depend on the build:

* `BUILD_FILE` states what the wheel is built for. It provides the wheel's version and
  requirements, and imports of ``horovod.torch`` and ``horovod.tensorflow`` check it.
* With ``--with-compat``, `hvd_estimators.compat` replaces the complete ``horovod.spark``.
"""

from __future__ import annotations

import inspect
import pprint
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_estimators._util.install_hints import BUILD_HOROVOD
from hvd_estimators.launch.horovod_build import BUILD_FILE, BUILD_VARIABLE, difference

PATCHES = sorted(Path(__file__).with_name("patches").glob("*.patch"))
"""Changes of the source, in the order in which they apply."""

_RECORD_MODULE = '''\
"""Written by hvd-estimators build-horovod: what this Horovod was built for, and a check of it."""

from __future__ import annotations

import importlib

{name} = {record}


{difference}

def check(framework):
    """Raise an ImportError if the installed framework is not the one of the build."""
    module = importlib.import_module(framework)
    cuda = getattr(getattr(module, "version", None), "cuda", None)
    problem = difference({name}, framework, module.__version__, cuda)
    if problem:
        remedy = "Install one that was built for it, or build it again: {build}"
        raise ImportError(f"{{problem[0].upper()}}{{problem[1:]}}. {{remedy}}", name="horovod")
'''

# `hvd_estimators.compat.finder` looks for the attribute.
_COMPAT_PACKAGE = """\
# Written by hvd-estimators build-horovod --with-compat, in the place of Horovod's own.
import importlib as _importlib
import os as _os
import sys as _sys

HVD_ESTIMATORS_COMPAT = True

if _os.environ.get("HVD_ESTIMATORS_HOROVOD_SPARK") == "1":
    raise ImportError(
        "HVD_ESTIMATORS_HOROVOD_SPARK=1 asks for the frozen horovod.spark, which this Horovod was "
        "built without. Run: hvd-estimators build-horovod --without-compat"
    )

_importlib.import_module("hvd_estimators.compat")
_sys.modules[__name__] = _importlib.import_module("hvd_estimators.compat.spark")
"""


def write_build_files(source: Path, record: Mapping[str, Any]) -> None:
    """Write what depends on the build into Horovod's source.

    Parameters
    ----------
    source : Path
        The folder of Horovod's ``setup.py``.
    record : mapping
        What the wheel is built for; see `BuildRecipe.record`.
    """
    (source / BUILD_FILE).write_text(record_module(record))
    if record["compat"]:
        shutil.rmtree(source / "horovod/spark")
        (source / "horovod/spark").mkdir()
        (source / "horovod/spark/__init__.py").write_text(_COMPAT_PACKAGE)


def record_module(record: Mapping[str, Any]) -> str:
    """Return the text of a wheel's `BUILD_FILE`."""
    return _RECORD_MODULE.format(
        name=BUILD_VARIABLE,
        record=pprint.pformat(dict(record), width=96, sort_dicts=False),
        difference=inspect.getsource(difference),
        build=BUILD_HOROVOD,
    )
