"""A finishing touch to a Horovod wheel: its frozen ``horovod.spark`` says where to go.

Horovod's wheel brings ``horovod.spark`` of 2023, and an import that was forgotten when a program
moved here would use that without a word. So its ``__init__.py`` is made to raise an ImportError,
unless an environment variable asks for the old package, as the benchmarks do that compare with it.
Nothing else in the wheel changes, and nothing is compiled.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import uuid
import zipfile
from pathlib import Path

from hvd_estimators.exceptions import BuildError

__all__ = ["REDIRECT_REVISION", "redirect_horovod_spark"]

REDIRECT_REVISION = 1
"""Part of a finished wheel's place in the cache: raise it when what is written below changes."""

_MODULE = "horovod/spark/__init__.py"

_GUARD = """\
# Written by hvd-estimators build-horovod; what follows it is Horovod's own.
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
        "    hvd_estimators.launch.spark instead of horovod.spark.common.backend (SparkBackend),\\n"
        "    hvd_estimators instead of horovod.spark.common.util (prepare_data, ...).\\n"
        "The README of hvd_estimators has the whole table. The frozen package itself can be "
        "imported with HVD_ESTIMATORS_HOROVOD_SPARK=1 in the environment."
    )

"""


def redirect_horovod_spark(wheel: Path, target: Path) -> None:
    """Write a copy of a wheel whose ``horovod.spark`` cannot be imported by mistake.

    Parameters
    ----------
    wheel : Path
        A wheel of Horovod, as pip built it.
    target : Path
        The copy, which appears whole or not at all.

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
                    f"{wheel} is not a wheel of Horovod as it is known: {_MODULE!r} "
                    "or its RECORD is missing."
                )
            module = _GUARD.encode() + original.read(_MODULE)
            changed = {
                _MODULE: module,
                records[0]: _with_hash(original.read(records[0]), module),
            }
            for entry in original.infolist():
                content = changed.get(entry.filename)
                copy.writestr(
                    entry,
                    original.read(entry) if content is None else content,
                    zipfile.ZIP_DEFLATED,
                )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _with_hash(record: bytes, module: bytes) -> bytes:
    """Return a RECORD with the hash and the size of the changed file.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    digest = base64.urlsafe_b64encode(hashlib.sha256(module).digest()).rstrip(b"=").decode()
    rows = [
        [name, f"sha256={digest}", str(len(module))] if name == _MODULE else [name, *rest]
        for name, *rest in csv.reader(io.StringIO(record.decode()))
    ]
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue().encode()
