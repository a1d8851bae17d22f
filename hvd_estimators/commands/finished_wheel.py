"""Finishing of a compiled Horovod wheel: its version, its record, and its ``horovod.spark``.

The compiler's wheel stays in the cache unchanged, and nothing is compiled here. The finished wheel
differs from it in these points:

* Its version has a local label, such as ``0.28.1+torch2.13.0.cpu.3.3``. The label names the
  frameworks, the device and the revision. So one index can hold a wheel for each environment, and a
  requirement ``horovod==0.28.1`` matches all of them.
* It requires the frameworks in exactly the versions that it was compiled for. So pip selects the
  matching wheel of an index, and warns if a framework is upgraded later.
* `BUILD_FILE` states what it was built for, and imports of ``horovod.torch`` and
  ``horovod.tensorflow`` check it.
* Its ``horovod.spark`` of 2023 raises an ImportError, unless an environment variable requests it.
  If a migrated program still had an old import, it would silently use that package. The benchmarks
  that compare with the old package set the variable.
* With ``--with-compat``, modules of the same names replace the complete ``horovod.spark``. They
  re-export `hvd_estimators.compat`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import inspect
import io
import os
import pprint
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from hvd_estimators._util.horovod_spark_names import HOMES
from hvd_estimators._util.install_hints import BUILD_HOROVOD
from hvd_estimators.exceptions import BuildError
from hvd_estimators.launch.horovod_build import (
    BUILD_FILE,
    BUILD_VARIABLE,
    DISTRIBUTIONS,
    MARKER,
    difference,
    horovod_folders,
    patches_of,
    read_record,
)

FINISH_REVISION = 4
"""Part of a finished wheel's version and cache folder; increment it if the written text changes."""

SPARK_FOLDER = "horovod/spark/"
"""Folder of ``horovod.spark`` in a wheel."""

SPARK_MODULE = f"{SPARK_FOLDER}__init__.py"
"""Module ``horovod.spark`` in a wheel."""

SIGN = "# Written by hvd-estimators build-horovod"
"""First words of the files that this package changes in a wheel."""

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

_CHECK = f"""\
{SIGN}; what follows it is Horovod's own.
from horovod.{Path(BUILD_FILE).stem} import check as _check

_check("{{framework}}")

"""

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
        "    hvd_estimators instead of horovod.spark (run, run_elastic) and "
        "horovod.spark.common.util (prepare_data, ...).\\n"
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


def record_module(record: Mapping[str, Any]) -> str:
    """Return the text of a wheel's `BUILD_FILE`."""
    return _RECORD_MODULE.format(
        name=BUILD_VARIABLE,
        record=pprint.pformat(dict(record), width=96, sort_dicts=False),
        difference=inspect.getsource(difference),
        build=BUILD_HOROVOD,
    )


def local_version(record: Mapping[str, Any], with_compat: bool) -> str:
    """Return the version of a finished wheel: Horovod's, and a label of what it was built for.

    Labels of equal frameworks and devices are ordered by their revisions. The label of a wheel with
    this package's ``horovod.spark`` starts with ``compat``, which sorts below the others. So pip
    installs such a wheel only if its version is requested exactly.
    """
    parts = ["compat"] if with_compat else []
    parts += [f"{name}{Version(record[name]).public}" for name in DISTRIBUTIONS if record[name]]
    parts.append(f"cu{record['cuda'].replace('.', '')}" if record["cuda"] else "cpu")
    parts += [str(record["recipe"]), str(record["patches"]), str(FINISH_REVISION)]
    return str(Version(f"{record['horovod']}+{'.'.join(parts)}"))


def finished_folder(with_compat: bool) -> str:
    """Return the name of a finished wheel's folder in the cache."""
    if not with_compat:
        return f"finished-{FINISH_REVISION}"
    written = hashlib.sha256(b"".join(compat_modules().values())).hexdigest()[:8]
    return f"finished-{FINISH_REVISION}-compat-{written}"


def finish_wheel(
    wheel: Path, folder: Path, record: Mapping[str, Any], with_compat: bool = False
) -> Path:
    """Write the finished copy of a compiled wheel into a folder, atomically.

    Parameters
    ----------
    wheel : Path
        A wheel of Horovod, as pip built it.
    folder : Path
        The folder of the copy, which is named after its version.
    record : mapping
        What the wheel was built for, if the wheel has no record itself.
    with_compat : bool
        Whether the copy's ``horovod.spark`` is `hvd_estimators.compat`. Otherwise it
        raises.

    Returns
    -------
    Path
        The copy.

    Raises
    ------
    BuildError
        If the wheel has no ``horovod.spark``, or does not list its files.
    """
    partial = folder / f".{uuid.uuid4().hex}.whl"
    try:
        with (
            zipfile.ZipFile(wheel) as original,
            zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as copy,
        ):
            info = _info_folder(original, wheel)
            record = _record_of(original, record)
            version = local_version(record, with_compat)
            written = _written_files(original, info, record, version, with_compat)
            unchanged = [
                name
                for name in original.namelist()
                if name not in written
                and name != f"{info}/RECORD"
                and not (with_compat and name.startswith(SPARK_FOLDER))
            ]
            new_info = f"horovod-{version}.dist-info"
            renamed = {
                name: name.replace(f"{info}/", f"{new_info}/") for name in [*unchanged, *written]
            }
            for name in unchanged:
                _write(copy, renamed[name], original.read(name), original.getinfo(name))
            for name, content in written.items():
                _write(copy, renamed[name], content, original.getinfo(SPARK_MODULE), dated=False)
            files = _file_list(
                original.read(f"{info}/RECORD"),
                {name: renamed[name] for name in unchanged},
                {renamed[name]: content for name, content in written.items()},
                f"{new_info}/RECORD",
            )
            _write(copy, f"{new_info}/RECORD", files, original.getinfo(f"{info}/RECORD"))
        tags = wheel.name.split("-", 2)[2]
        target = folder / f"horovod-{version}-{tags}"
        os.replace(partial, target)
        return target
    finally:
        partial.unlink(missing_ok=True)


def _info_folder(original: zipfile.ZipFile, wheel: Path) -> str:
    """Return the folder of a wheel's metadata."""
    names = original.namelist()
    lists = [name for name in names if name.endswith(".dist-info/RECORD")]
    if SPARK_MODULE not in names or len(lists) != 1:
        raise BuildError(
            f"{wheel} is not a wheel of Horovod: {SPARK_MODULE!r} or its RECORD is missing."
        )
    return lists[0].rpartition("/")[0]


def _record_of(original: zipfile.ZipFile, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a compiled wheel's record; `record` if the wheel is older than records."""
    if BUILD_FILE in original.namelist():
        return read_record(original.read(BUILD_FILE).decode())
    if MARKER in original.namelist():
        return {**record, "patches": patches_of(original.read(MARKER).decode())}
    return {**record, "patches": 0}


def _written_files(
    original: zipfile.ZipFile,
    info: str,
    record: Mapping[str, Any],
    version: str,
    with_compat: bool,
) -> dict[str, bytes]:
    """Return the changed and added files: names in the compiled wheel to contents."""
    written = compat_modules()
    if not with_compat:
        # Only this file raises; the other files of the package stay.
        written = {SPARK_MODULE: _GUARD.encode() + original.read(SPARK_MODULE)}
    for framework in DISTRIBUTIONS:
        module = f"horovod/{framework}/__init__.py"
        if module in original.namelist():
            check = _CHECK.format(framework=framework).encode()
            written[module] = check + original.read(module)
    written[BUILD_FILE] = record_module(record).encode()
    metadata = f"{info}/METADATA"
    written[metadata] = _described(original.read(metadata), version, record["requires"])
    return written


def _write(
    copy: zipfile.ZipFile, name: str, content: bytes, like: zipfile.ZipInfo, dated: bool = True
) -> None:
    """Write a file with the permissions, and the date, of another one."""
    # ZipInfo's default date makes equal wheels equal byte for byte.
    entry = zipfile.ZipInfo(name, like.date_time) if dated else zipfile.ZipInfo(name)
    entry.external_attr = like.external_attr
    copy.writestr(entry, content, zipfile.ZIP_DEFLATED)


def _described(metadata: bytes, version: str, requires: list[str]) -> bytes:
    """Return a wheel's METADATA with another version and further requirements.

    https://packaging.python.org/en/latest/specifications/core-metadata/
    """
    headers, separator, body = metadata.decode().partition("\n\n")
    lines = []
    for line in headers.splitlines():
        if line.startswith("Version:"):
            lines.append(f"Version: {version}")
            lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        else:
            lines.append(line)
    end = "" if separator else "\n"
    return ("\n".join(lines) + end + separator + body).encode()


def _file_list(
    record: bytes, unchanged: Mapping[str, str], written: Mapping[str, bytes], own: str
) -> bytes:
    """Return a RECORD of the unchanged files, by their new names, and of the written files.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    rows = [
        [unchanged[row[0]], *row[1:]]
        for row in csv.reader(io.StringIO(record.decode()))
        if row and row[0] in unchanged
    ]
    for name, content in written.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append([name, f"sha256={digest}", str(len(content))])
    rows.append([own, "", ""])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def installed_horovod_spark() -> str | None:
    """Return the kind of the installed ``horovod.spark``, without importing Horovod.

    Returns
    -------
    str or None
        ``"compat"``: the names of this package; ``"off"``: an ImportError; ``"frozen"``: the
        package of 2023; None: Horovod or its ``spark`` package is not installed.
    """
    for folder in horovod_folders():
        module = folder / "spark" / "__init__.py"
        if module.is_file():
            text = module.read_text()
            if text.startswith(_COMPAT_SIGN):
                return "compat"
            return "off" if text.startswith(SIGN) else "frozen"
    return None


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
