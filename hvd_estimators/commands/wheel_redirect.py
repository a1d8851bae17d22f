"""Replacement of the frozen ``horovod.spark`` in a Horovod wheel.

Horovod's wheel contains ``horovod.spark`` of 2023. If a migrated program still had an old import,
it would silently use that package. Therefore its ``__init__.py`` is changed to raise an
ImportError, unless an environment variable requests the old package. The benchmarks that compare
with the old package set this variable.

With ``--with-compat`` the complete package is replaced by modules of the same names, which
re-export those of `hvd_estimators.compat`. Nothing else in the wheel changes, and nothing is
compiled.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import uuid
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hvd_estimators._util.horovod_spark_names import HOMES
from hvd_estimators.exceptions import BuildError

__all__ = ["finished_folder", "installed_horovod_spark", "redirect_horovod_spark"]

REDIRECT_REVISION = 2
"""Part of the name of a finished wheel's cache folder; increment it if the written text changes."""

_FOLDER = "horovod/spark/"
_MODULE = f"{_FOLDER}__init__.py"
_SIGN = "# Written by hvd-estimators build-horovod"

_GUARD = f"""\
{_SIGN}; what follows it is Horovod's own.
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
_COMPAT_SIGN = f"{_SIGN} --with-compat, in the place of Horovod's own."
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


def finished_folder(with_compat: bool) -> str:
    """Return the name of a finished wheel's folder in the cache."""
    if not with_compat:
        return f"finished-{REDIRECT_REVISION}"
    written = hashlib.sha256(b"".join(_compat_modules().values())).hexdigest()[:8]
    return f"finished-{REDIRECT_REVISION}-compat-{written}"


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
            return "off" if text.startswith(_SIGN) else "frozen"
    return None


def _compat_modules() -> Mapping[str, bytes]:
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
        modules[_FOLDER + file] = "".join(f"{line}\n" for line in lines).encode()
    return {**modules, _MODULE: _COMPAT_PACKAGE.encode()}


def redirect_horovod_spark(wheel: Path, target: Path, with_compat: bool = False) -> None:
    """Write a copy of a wheel whose frozen ``horovod.spark`` cannot be imported by mistake.

    Parameters
    ----------
    wheel : Path
        A wheel of Horovod, as pip built it.
    target : Path
        The path of the copy, which is written atomically.
    with_compat : bool
        Whether the copy's ``horovod.spark`` is that of `hvd_estimators.compat`. Otherwise it
        raises.

    Raises
    ------
    BuildError
        If the wheel has no ``horovod.spark``, or does not list its files.
    """
    partial = target.with_name(f".{uuid.uuid4().hex}-{target.name}")
    try:
        with (
            zipfile.ZipFile(wheel) as original,
            zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as copy,
        ):
            names = original.namelist()
            records = [name for name in names if name.endswith(".dist-info/RECORD")]
            if _MODULE not in names or len(records) != 1:
                raise BuildError(
                    f"{wheel} is not a wheel of Horovod: {_MODULE!r} or its RECORD is missing."
                )
            if with_compat:
                written = _compat_modules()
                unchanged = [name for name in names if not name.startswith(_FOLDER)]
            else:
                written = {_MODULE: _GUARD.encode() + original.read(_MODULE)}
                unchanged = [name for name in names if name not in written]
            record = _record(original.read(records[0]), {*unchanged}, written)
            for name in unchanged:
                content = record if name == records[0] else original.read(name)
                copy.writestr(original.getinfo(name), content, zipfile.ZIP_DEFLATED)
            for name, content in written.items():
                # ZipInfo's default date makes equal wheels equal byte for byte.
                entry = zipfile.ZipInfo(name)
                entry.external_attr = original.getinfo(_MODULE).external_attr
                copy.writestr(entry, content, zipfile.ZIP_DEFLATED)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _record(record: bytes, unchanged: set[str], written: Mapping[str, bytes]) -> bytes:
    """Return a RECORD of the retained files and the written files.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    rows = [row for row in csv.reader(io.StringIO(record.decode())) if row[0] in unchanged]
    for name, content in written.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append([name, f"sha256={digest}", str(len(content))])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
