"""Saving and loading of estimators and models as directories of files.

``metadata/`` has Spark ML's own format, so that ``Pipeline`` and ``PipelineModel`` save and load
such stages. It holds the params that JSON can represent. Each other param is a separate file,
``params/<name>.pkl``, pickled or in a format of the class. Params that are declared as not saved
are omitted. Loading runs code from the files, so load only files that you trust.

A save over an existing directory takes effect when its metadata file is replaced, which is atomic.
A process that is killed leaves either the old or the new version. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterable
from typing import Any, Self, TypeVar

import cloudpickle
from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWritable, MLWriter

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, StoreError
from hvd_estimators.params import DeclaredParams
from hvd_estimators.saving.folder import Folder, open_folder
from hvd_estimators.saving.saved import FORMAT_VERSION, class_of, read_metadata
from hvd_estimators.store import Store

logger = logging.getLogger(__name__)

_METADATA, _PARAMS = "metadata", "params"

Instance = TypeVar("Instance", bound=DeclaredParams)


class Saved(MLWritable, MLReadable[Any]):
    """Add saving and loading to a class with declared params."""

    def write(self) -> MLWriter:
        """Return a writer; ``write().overwrite().save(path)`` replaces existing files."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Self]:
        """Return a reader."""
        return _Reader(cls)

    @classmethod
    def load(cls, path: str) -> Self:
        """Return the instance that was saved at a path or URL."""
        return cls.read().load(path)

    def _dump_param(self, name: str, value: Any) -> bytes:
        """Return a param's value as bytes; classes override this if pickle is not suitable."""
        return cloudpickle.dumps(value)

    def _load_params(self, documents: dict[str, bytes]) -> dict[str, Any]:
        """Return the values of the documents that `_dump_param` wrote, by name."""
        return {name: loads(document) for name, document in documents.items()}

    def _extra_files(self) -> dict[str, LocalFile]:
        """Return further files, by name, for other programs to read."""
        return {}

    def _further_files(self) -> Iterable[tuple[str, LocalFile]]:
        """Return large files of params, with their names beside the params."""
        return ()

    def _loaded_from(self, path: str) -> None:
        """Note the folder of the params after loading, for classes with further files."""

    def _saved_to(self, path: str, params: str) -> None:
        """Note the folder of the params after saving, in which older folders were deleted."""

    def _kept_elsewhere(self) -> str:
        """Return a hint about another copy of the instance, for errors; empty without a copy.

        With a hint, other errors in saving become a `StoreError` that includes it.
        """
        return ""


class _Writer(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def save(self, path: str) -> None:
        """Save the instance. An existing version stays complete until it is replaced.

        Raises
        ------
        ParamError
            If the path is not a string, or is empty.
        StoreError
            If the path exists and must not be replaced.
        """
        # The base implementation would delete first.
        self.saveImpl(path)

    def saveImpl(self, path: str) -> None:
        hint = self._instance._kept_elsewhere()
        try:
            self._save(path)
        except HvdEstimatorsError:
            raise
        except Exception as error:
            if not hint:
                raise
            raise StoreError(
                f"{path!r} could not be saved ({type(error).__name__}: {error}). {hint}"
            ) from error

    def _save(self, path: str) -> None:
        # Before any change on disk, because a value may not be picklable.
        content, documents = _contents(self._instance)
        extra = self._instance._extra_files()
        folder = open_folder(self.sparkSession, path)
        if folder.exists() and not self.shouldOverwrite:
            raise StoreError(f"{path!r} exists. To replace it call write().overwrite().save(path).")
        if folder.is_file():
            folder.delete()
        old = _data_files(folder, _METADATA)
        params = f"{_PARAMS}-{uuid.uuid4().hex}" if folder.exists() else _PARAMS
        metadata = {
            **content,
            "timestamp": round(time.time() * 1000),
            "sparkVersion": self.sparkSession.version,
            "pickledParams": sorted(documents),
            "paramsFolder": params,
            "formatVersion": FORMAT_VERSION,
        }
        try:
            for name, document in documents.items():
                folder.write(f"{params}/{name}.pkl", document)
            for name, file in self._instance._further_files():
                folder.write(f"{params}/{name}", file)
                file.close()
        except BaseException:
            # If the storage is not available, the next save deletes them.
            with contextlib.suppress(StoreError):
                folder.delete(params)
            raise
        if len(old) != 1:
            # Spark ML's writers leave no such metadata, and it cannot be loaded.
            folder.delete(_METADATA)
        folder.write(f"{_METADATA}/_SUCCESS", b"")
        # Last, because a directory without this file does not load: an incomplete save never loads.
        file_name = old[0] if len(old) == 1 else "part-00000.txt"
        folder.write(f"{_METADATA}/{file_name}", f"{json.dumps(metadata)}\n".encode())
        for name, file in extra.items():
            folder.write(name, file)
            file.close()
        # Delete the old version's files, and files of saves that were killed.
        for name in set(folder.names()) - {params, _METADATA, *extra}:
            folder.delete(name)
        self._instance._saved_to(folder.path, params)


def _data_files(folder: Folder, name: str) -> list[str]:
    return [file for file in folder.names(name) if not file.startswith(("_", "."))]


def _contents(instance: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the metadata and the documents of an instance.

    Returns
    -------
    metadata : dict
        Class, uid, the params that JSON can hold, and the names of values that are not saved.
    documents : dict
        Name of each other param to its bytes.
    """
    declared = instance._declarations
    values = instance._values()
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
    metadata = {
        "class": f"{type(instance).__module__}.{type(instance).__name__}",
        "uid": instance.uid,
        "paramMap": json_values,
        "defaultParamMap": {n: v for n, v in instance._defaults().items() if is_json(v)},
        "leftOutParams": sorted(left_out),
    }
    return metadata, documents


def dump_param(instance: Any, name: str, value: Any) -> bytes:
    """Return the bytes of a param's value.

    A store is saved without its options, which may be secrets, unless ``save_storage_options`` is
    set.

    Raises
    ------
    ParamError
        If the value cannot be pickled.
    """
    if isinstance(value, Store) and not value.save_storage_options:
        value = value.without_options()
    try:
        document: bytes = instance._dump_param(name, value)
    except (HvdEstimatorsError, OSError):
        raise
    except Exception as error:
        raise ParamError(
            f"{name}: found a {type(value).__name__}, which cannot be saved "
            f"({type(error).__name__}: {error}). Clear it before saving, and set it after loading. "
            f"{instance._kept_elsewhere()}".rstrip()
        ) from error
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
            If the path is not valid, or holds an instance of another class.
        StoreError
            If the path holds no saved instance, or one of its files is missing.
        """
        folder = open_folder(self.sparkSession, path)
        names = _data_files(folder, _METADATA)
        if not names:
            raise StoreError(
                f"path: found no saved {self._cls.__name__} at {path!r}. Set the path given to "
                "save()."
            )
        metadata = read_metadata({n: folder.read(f"{_METADATA}/{n}") for n in names}, path)
        instance = class_of(self._cls, metadata["class"], path)()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        params = metadata.get("paramsFolder", _PARAMS)
        documents = {
            name: folder.read(f"{params}/{name}.pkl") for name in metadata["pickledParams"]
        }
        for name, value in instance._load_params(documents).items():
            instance._store_value(name, value)
        instance._loaded_from(f"{folder.path}/{params}")
        for name in metadata.get("leftOutParams", ()):
            logger.warning("%s of %s is not saved with it. Set it again.", name, instance.uid)
        return instance


def is_json(value: Any) -> bool:
    """Return whether a round trip through JSON preserves a value."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
