"""Saving and loading of estimators and models as directories of real files.

``metadata/`` is Spark ML's own format, so that ``Pipeline`` and ``PipelineModel`` save and load
such stages; it holds the params that JSON can. Every other param is a file of its own, pickled
(``params/<name>.pkl``), or what the class makes of it, except those that are declared not to be
saved. Loading runs code from the files: load
what you trust. Runs on the driver.
"""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any, TypeVar

import cloudpickle
import fsspec
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import SparkSession

from hvd_estimators.exceptions import StoreError
from hvd_estimators.params import DeclaredParams

__all__ = ["FileReadable", "FileWritable", "is_json"]

logger = logging.getLogger(__name__)

Instance = TypeVar("Instance", bound=DeclaredParams)


class FileWritable(MLWritable):
    """Gives ``write()`` and ``save(path)`` to a class with declared params."""

    def write(self) -> MLWriter:
        """Return a writer; ``write().overwrite().save(path)`` replaces what is there."""
        return _Writer(self)

    def _dump_param(self, name: str, value: Any) -> bytes:
        """Return a param's value as bytes; overridden where pickling it will not do."""
        return cloudpickle.dumps(value)

    def _extra_files(self) -> dict[str, bytes]:
        """Return further files, by name, for other programs to read."""
        return {}


class FileReadable(MLReadable[Any]):
    """Gives ``read()`` and ``load(path)`` to a class with declared params."""

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return a reader."""
        return _Reader(cls)

    def _load_params(self, documents: dict[str, bytes]) -> dict[str, Any]:
        """Return the values of what `_dump_param` wrote, by name."""
        return {name: pickle.loads(document) for name, document in documents.items()}


class _Writer(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        instance = self._instance
        declared = instance._declarations
        left_out = sorted(
            p.name for p in instance._paramMap if p.name in declared and not declared[p.name].saved
        )
        set_params = {p.name: v for p, v in instance._paramMap.items() if p.name not in left_out}
        plain = {name: value for name, value in set_params.items() if is_json(value)}
        pickled = sorted(set_params.keys() - plain.keys())
        documents = {
            f"params/{name}.pkl": instance._dump_param(name, set_params[name]) for name in pickled
        }
        documents.update(instance._extra_files())
        filesystem, root = _filesystem(self.sparkSession, path)
        if filesystem.exists(root):
            raise StoreError(f"{path!r} exists. To replace it call write().overwrite().save(path).")
        bare = instance.copy()
        bare._paramMap = {p: v for p, v in instance._paramMap.items() if p.name in plain}
        bare._defaultParamMap = {p: v for p, v in instance._defaultParamMap.items() if is_json(v)}
        for name, document in documents.items():
            target = f"{root}/{name}"
            filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            with filesystem.open(target, "wb") as file:
                file.write(document)
        # Last: a directory without metadata does not load, so a save that broke off never does.
        DefaultParamsWriter.saveMetadata(
            bare,
            path,
            self.sparkSession.sparkContext,
            extraMetadata={"pickledParams": pickled, "leftOutParams": left_out},
        )


class _Reader(MLReader[Any]):
    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Load an instance.

        Raises
        ------
        StoreError
            If a file of it is missing.
        """
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession.sparkContext)
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        filesystem, root = _filesystem(self.sparkSession, path)
        documents = {}
        for name in metadata["pickledParams"]:
            file = f"{root}/params/{name}.pkl"
            try:
                documents[name] = filesystem.cat_file(file)
            except OSError as error:
                raise StoreError(f"{path!r} is not complete: it lacks {file!r}.") from error
        for name, value in instance._load_params(documents).items():
            instance._paramMap[instance.getParam(name)] = value
        for name in metadata.get("leftOutParams", ()):
            logger.warning("%s of %s is not saved with it. Set it again.", name, instance.uid)
        return instance


def is_json(value: Any) -> bool:
    """Return whether JSON gives a value back as it is."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _filesystem(session: SparkSession, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the filesystem on which Spark writes to a path, and the path on it."""
    if "://" not in path and not path.startswith("file:"):
        default = session.sparkContext._jsc.hadoopConfiguration().get("fs.defaultFS", "file:///")
        if not default.startswith("file:"):
            path = f"{default.rstrip('/')}/{path.lstrip('/')}"
    elif path.startswith("file:"):
        path = "file://" + path.removeprefix("file:").removeprefix("//")
    filesystem, root = fsspec.core.url_to_fs(path)
    return filesystem, root.rstrip("/")
