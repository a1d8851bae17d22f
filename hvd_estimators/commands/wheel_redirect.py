"""Replacement of the frozen ``horovod.spark`` in a Horovod wheel.

Horovod's wheel contains ``horovod.spark`` of 2023. If a migrated program still had an old import,
it would silently use that package. Therefore its ``__init__.py`` is changed to raise an
ImportError, unless an environment variable requests the old package. The benchmarks that compare
with the old package set this variable.

With ``--with-compat`` the complete package is replaced by modules of the same names, which
re-export those of `hvd_estimators.compat`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hvd_estimators._util.horovod_spark_names import HOMES

SPARK_FOLDER = "horovod/spark/"
"""Folder of ``horovod.spark`` in a wheel."""

SPARK_MODULE = f"{SPARK_FOLDER}__init__.py"
"""Module ``horovod.spark`` in a wheel."""

SIGN = "# Written by hvd-estimators build-horovod"
"""First words of the files that this package changes in a wheel."""

_GUARD = f"""\
{SIGN}; what follows it is Horovod's own.
import os as _os

if _os.environ.get("HVD_ESTIMATORS_HOROVOD_SPARK") != "1":
    raise ImportError(
        "horovod.spark stopped in 2023 and does not run on today's Spark, PyArrow, Keras, torch "
        "and Lightning. hvd_estimators takes its place, with the same parameters: import from\\n"
        "    hvd_estimators.keras instead of horovod.spark.keras (KerasEstimator, KerasModel),\\n"
        "    hvd_estimators.torch instead of horovod.spark.torch (TorchEstimator, TorchModel),\\n"
        "    hvd_estimators.lightning instead of horovod.spark.lightning (TorchEstimator, "
        "TorchModel),\\n"
        "    hvd_estimators.store instead of horovod.spark.common.store (Store, LocalStore),\\n"
        "    hvd_estimators.launch instead of horovod.spark.common.backend (SparkBackend),\\n"
        "    hvd_estimators instead of horovod.spark.common.util (prepare_data, ...).\\n"
        "docs/migrating.rst of hvd_estimators has the whole table. The frozen package itself can "
        "be imported with HVD_ESTIMATORS_HOROVOD_SPARK=1 in the environment."
    )

"""


# `hvd_estimators.compat.finder` looks for the attribute.
_COMPAT_SIGN = f"{SIGN} --with-compat, in the place of Horovod's own."
_COMPAT_PACKAGE = f"""\
{_COMPAT_SIGN}
import importlib as _importlib
import os as _os
import sys as _sys

HVD_ESTIMATORS_COMPAT = True

if _os.environ.get("HVD_ESTIMATORS_HOROVOD_SPARK") == "1":
    raise ImportError(
        "HVD_ESTIMATORS_HOROVOD_SPARK=1 asks for the frozen horovod.spark, which this Horovod was "
        "installed without. Run: hvd-estimators build-horovod --without-compat"
    )

_importlib.import_module("hvd_estimators.compat")
_sys.modules[__name__] = _importlib.import_module("hvd_estimators.compat.spark")
"""


def installed_horovod_spark() -> str | None:
    """Return the kind of the installed ``horovod.spark``, without importing Horovod.

    Returns
    -------
    str or None
        ``"compat"``: the names of this package; ``"off"``: an ImportError; ``"frozen"``: the
        package of 2023; None: Horovod or its ``spark`` package is not installed.
    """
    spec = find_spec("horovod")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        module = Path(folder, "spark", "__init__.py")
        if module.is_file():
            text = module.read_text()
            if text.startswith(_COMPAT_SIGN):
                return "compat"
            return "off" if text.startswith(SIGN) else "frozen"
    return None


def spark_modules(original: bytes, with_compat: bool) -> dict[str, bytes]:
    """Return the files of a finished wheel's ``horovod.spark``: names in the wheel to contents.

    Parameters
    ----------
    original : bytes
        The content of `SPARK_MODULE`.
    with_compat : bool
        Whether the files replace the complete package by that of `hvd_estimators.compat`.
        Otherwise `SPARK_MODULE` raises, and the other files of the package stay.
    """
    return compat_modules() if with_compat else {SPARK_MODULE: _GUARD.encode() + original}


def compat_modules() -> dict[str, bytes]:
    """Return the files that replace ``horovod/spark``: names in the wheel to contents."""
    modules = {}
    for key, homes in HOMES.items():
        if not key:
            continue
        path = key.replace(".", "/")
        is_package = any(module.startswith(f"{key}.") for module in HOMES)
        lines = [_COMPAT_SIGN]
        for name, home in sorted(homes.items()):
            module, _, original_name = home.partition(":")
            lines.append(f"from {module} import {original_name or name} as {name}")
        file = f"{path}/__init__.py" if is_package else f"{path}.py"
        modules[SPARK_FOLDER + file] = "".join(f"{line}\n" for line in lines).encode()
    return {**modules, SPARK_MODULE: _COMPAT_PACKAGE.encode()}
