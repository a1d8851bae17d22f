"""Saving and loading of estimators and models as directories of real files.

``metadata/`` is Spark ML's own format, so that ``Pipeline`` and ``PipelineModel`` save and load
such stages; it holds the params that JSON can. Every other param is a file of its own, pickled
(``params/<name>.pkl``), or what the class makes of it, except those that are declared not to be
saved. Loading runs code from the files: load what you trust. Runs on the driver.

What is saved over something else takes its place when the file of its metadata does, which is at
once: a process that is killed leaves the old or the new one.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators._util.unpickling import loads
from hvd_estimators.exceptions import HvdEstimatorsError, StoreError
from hvd_estimators.params import DeclaredParams
from hvd_estimators.saving.folder import Folder, open_folder
from hvd_estimators.saving.saved import FORMAT_VERSION, check_format, class_of
from hvd_estimators.store import Store

__all__ = ["FileReadable", "FileWritable", "dump_param", "is_json"]

logger = logging.getLogger(__name__)

_METADATA, _PARAMS = "metadata", "params"

Instance = TypeVar("Instance", bound=DeclaredParams)


class FileWritable(MLWritable):
    """Gives ``write()`` and ``save(path)`` to a class with declared params."""

    def write(self) -> MLWriter:
        """Return a writer; ``write().overwrite().save(path)`` replaces what is there."""
        return _Writer(self)

    def _dump_param(self, name: str, value: Any) -> bytes:
        """Return a param's value as bytes; overridden where pickling it will not do."""
        return cloudpickle.dumps(value)

    def _kept_elsewhere(self) -> str:
        """Return what to tell somebody who cannot save this of where else it is; empty if nowhere.

        What then goes wrong in saving becomes a `StoreError` that says so.
        """
        return ""

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
        return {name: loads(document) for name, document in documents.items()}

    def _adapt(self, saved: Collection[str]) -> None:
        """Adapt a loaded instance to an earlier version, which saved fewer params.

        Parameters
        ----------
        saved : collection of str
            Names of the params that were saved, with their defaults.
        """


class _Writer(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def save(self, path: str) -> None:
        """Save the instance. What is to be replaced stays whole until the new one is.

        Raises
        ------
        ParamError
            If the path is no string, or empty.
        StoreError
            If there is something that is not to be replaced.
        """
        # Not as the base does it, which deletes first.
        self.saveImpl(path)

    def saveImpl(self, path: str) -> None:
        kept = self._instance._kept_elsewhere()
        try:
            self._save(path)
        except HvdEstimatorsError:
            raise
        except Exception as error:
            if not kept:
                raise
            raise StoreError(
                f"{path!r} could not be saved ({type(error).__name__}: {error}). {kept}"
            ) from error

    def _save(self, path: str) -> None:
        # Before anything is touched: a value may not be picklable.
        document = _Document.of(self._instance)
        folder = open_folder(self.sparkSession, path)
        if folder.exists() and not self.shouldOverwrite:
            raise StoreError(f"{path!r} exists. To replace it call write().overwrite().save(path).")
        if folder.is_file():
            folder.delete()
        number = uuid.uuid4().hex
        is_new = not folder.exists()
        params = _PARAMS if is_new else f"{_PARAMS}-{number}"
        # Spark writes metadata as a directory, which nothing replaces at once; its file can be.
        staging = "" if is_new else f".{number}.partial"
        try:
            for name, content in document.params.items():
                folder.write(f"{params}/{name}.pkl", content)
            # Last: a directory without metadata does not load, so a save that broke off never does.
            further = {
                "pickledParams": sorted(document.params),
                "leftOutParams": document.left_out,
                "paramsFolder": params,
                "formatVersion": FORMAT_VERSION,
            }
            self._write_metadata(folder, staging, document.bare, further)
        except BaseException:
            # What was there before is as it was.
            for name in (params, staging):
                if name:
                    folder.delete(name)
            raise
        if staging:
            _move_metadata(folder, f"{staging}/{_METADATA}")
        for name, content in document.extra.items():
            folder.write(name, content)
        # The old one's files, and what saves have left that were killed.
        for name in set(folder.names()) - {params, _METADATA, *document.extra}:
            folder.delete(name)

    def _write_metadata(self, folder: Folder, staging: str, bare: Any, further: Any) -> None:
        place = f"{staging}/" if staging else ""
        session: Any = self.sparkSession
        if not is_connect(session):
            url = f"{folder.url}/{staging}" if staging else folder.url
            DefaultParamsWriter.saveMetadata(bare, url, session.sparkContext, extraMetadata=further)
            return
        # Not by the server, as Spark's writer would: a path here may be none there.
        metadata = {
            "class": f"{type(bare).__module__}.{type(bare).__name__}",
            "timestamp": round(time.time() * 1000),
            "sparkVersion": session.version,
            "uid": bare.uid,
            "paramMap": {param.name: value for param, value in bare._paramMap.items()},
            "defaultParamMap": {p.name: value for p, value in bare._defaultParamMap.items()},
            **further,
        }
        folder.write(f"{place}{_METADATA}/part-00000.txt", f"{json.dumps(metadata)}\n".encode())
        folder.write(f"{place}{_METADATA}/_SUCCESS", b"")


def _move_metadata(folder: Folder, source: str) -> None:
    (new,) = _data_files(folder, source)
    old = _data_files(folder, _METADATA)
    if len(old) == 1:
        folder.move_file(f"{source}/{new}", f"{_METADATA}/{old[0]}")
        return
    # No writer of Spark ML's has left this, and nothing can be loaded from it.
    folder.delete(_METADATA)
    folder.move_directory(source, _METADATA)


def _data_files(folder: Folder, name: str) -> list[str]:
    return [file for file in folder.names(name) if not file.startswith(("_", "."))]


@dataclass(frozen=True)
class _Document:
    """What is written of an instance.

    Attributes
    ----------
    bare : DeclaredParams
        A copy with the params that JSON can hold.
    params : mapping
        Name of each other param to its bytes.
    extra : mapping
        Name to content of further files.
    left_out : list of str
        What is not saved.
    """

    bare: Any
    params: dict[str, bytes]
    extra: dict[str, bytes]
    left_out: list[str]

    @staticmethod
    def of(instance: Any) -> _Document:
        declared = instance._declarations
        values = {p.name: value for p, value in instance._paramMap.items()}
        left_out = [name for name in values if name in declared and not declared[name].saved]
        for name in left_out:
            del values[name]
        json_values = {name: value for name, value in values.items() if is_json(value)}
        documents = {
            name: dump_param(instance, name, values[name])
            for name in values.keys() - json_values.keys()
        }
        left_out += [
            f"storage_options of {name}"
            for name, value in values.items()
            if isinstance(value, Store) and value.storage_options and not value.save_storage_options
        ]
        bare = instance.copy()
        bare._paramMap = {p: v for p, v in instance._paramMap.items() if p.name in json_values}
        bare._defaultParamMap = {p: v for p, v in instance._defaultParamMap.items() if is_json(v)}
        return _Document(bare, documents, instance._extra_files(), sorted(left_out))


def dump_param(instance: Any, name: str, value: Any) -> bytes:
    """Return a param's value as it is saved.

    A store without its options, which may be secrets, unless it is to keep them.
    """
    if isinstance(value, Store) and not value.save_storage_options:
        value = value.without_options()
    document: bytes = instance._dump_param(name, value)
    return document


class _Reader(MLReader[Any]):
    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Load an instance.

        Raises
        ------
        ParamError
            If the path is none, or something of another class was saved there.
        StoreError
            If nothing was saved there, or a file of it is missing.
        """
        folder = open_folder(self.sparkSession, path)
        if not folder.names(_METADATA):
            raise StoreError(
                f"path: there is no saved {self._cls.__name__} at {path!r}. Set the path that "
                "save() was given."
            )
        metadata = self._metadata(folder)
        cls = class_of(self._cls, metadata["class"], path)
        check_format(metadata, path)
        instance = cls()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        params = metadata.get("paramsFolder", _PARAMS)
        documents = {
            name: folder.read(f"{params}/{name}.pkl") for name in metadata["pickledParams"]
        }
        for name, value in instance._load_params(documents).items():
            instance._paramMap[instance.getParam(name)] = value
        saved = {*metadata["paramMap"], *metadata.get("defaultParamMap", {}), *documents}
        instance._adapt(saved)
        for name in metadata.get("leftOutParams", ()):
            logger.warning("%s of %s is not saved with it. Set it again.", name, instance.uid)
        return instance

    def _metadata(self, folder: Folder) -> dict[str, Any]:
        if not is_connect(self.sparkSession):
            context = self.sparkSession.sparkContext
            return DefaultParamsReader.loadMetadata(folder.url, context)
        # Spark leaves empty files, too, where there were empty partitions.
        documents = [folder.read(f"{_METADATA}/{name}") for name in _data_files(folder, _METADATA)]
        (document,) = filter(None, documents)
        metadata: dict[str, Any] = json.loads(document)
        return metadata


def is_json(value: Any) -> bool:
    """Return whether JSON gives a value back as it is."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
