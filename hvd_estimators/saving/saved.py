"""Access to saved models without Spark. Imports no PySpark."""

from __future__ import annotations

import gzip
import importlib
import io
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators._util.documents import check_types, parse_object
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import Unpickler
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import Store
from hvd_estimators.store.registry import require_path

PACKAGES = {
    "hvd_estimators.keras.model.KerasModel": "hvd_estimators.keras",
    "hvd_estimators.lightning.model.LightningModel": "hvd_estimators.lightning",
    "hvd_estimators.torch.model.TorchModel": "hvd_estimators.torch",
}
"""Class of saved models to its package."""

FORMAT_VERSION = 1
"""Version of the format of ``save``; incremented if this version could not read the new format."""

_JVM = "org.apache.spark."
_OWN = "hvd_estimators."
_PIPELINES = ("pyspark.ml.pipeline.PipelineModel", "org.apache.spark.ml.PipelineModel")
"""Names under which PySpark saves pipelines with and without stages in Python."""

_METADATA: dict[str, type] = {
    **dict.fromkeys(("class", "paramsFolder"), str),
    **dict.fromkeys(("paramMap", "defaultParamMap"), dict),
    "pickledParams": list,
    "formatVersion": int,
}
"""Types of the values of a saved instance's metadata that this package reads."""


class Saved:
    """The folder of a saved model, pipeline or stage.

    Attributes
    ----------
    path : str
        The folder.
    given : str
        The folder as the user spells it, from which a store can be created.
    class_name : str
        The class that was saved, with its module.
    store : Store
        The store of the folder.
    params_folder : str
        The folder of the params that JSON cannot represent.
    """

    def __init__(self, store: Store, path: str, given: str) -> None:
        names = [n for n in store.names(f"{path}/metadata") if not n.startswith(("_", "."))]
        contents = {name: store.read(f"{path}/metadata/{name}") for name in names}
        metadata = read_metadata(contents, given)
        self.path = path
        self.given = given
        self.class_name = str(metadata["class"])
        self.store = store
        self.params_folder = f"{path}/{metadata.get('paramsFolder', 'params')}"
        self._pickled = frozenset(metadata.get("pickledParams", ()))
        self._set = metadata.get("paramMap", {}).keys() | self._pickled
        self._defaults = metadata.get("defaultParamMap", {})
        self._values = {**self._defaults, **metadata.get("paramMap", {})}
        self._unpickled: dict[str, Any] = {}

    @property
    def is_pipeline(self) -> bool:
        """True if the folder holds a ``PipelineModel``."""
        return self.class_name in _PIPELINES

    @property
    def package(self) -> str | None:
        """The package of this project whose model the folder holds; None for another class."""
        return PACKAGES.get(self.class_name)

    def stages(self) -> list[Saved]:
        """Return the stages of a pipeline, in order.

        Raises
        ------
        StoreError
            If a stage is missing.
        """
        uids = self.get("stageUids") or []
        digits = len(str(len(uids)))
        names = [f"stages/{position:0{digits}}_{uid}" for position, uid in enumerate(uids)]
        given = self.given.rstrip("/")
        return [Saved(self.store, f"{self.path}/{name}", f"{given}/{name}") for name in names]

    def data(self) -> dict[str, Any]:
        """Return the row of data that Spark ML saves beside a stage's params.

        Raises
        ------
        StoreError
            If the row is missing.
        """
        folder = f"{self.path}/data"
        for name in self.store.names(folder):
            if not name.startswith(("_", ".")) and name.endswith(".parquet"):
                content = pa.BufferReader(self.store.read(f"{folder}/{name}"))
                for row in parquet.read_table(content).slice(0, 1).to_pylist():
                    return dict(row)
        raise StoreError(f"path: {self.path!r} is not complete: it lacks its data.")

    def is_set(self, name: str) -> bool:
        """Return whether a param was set, so that its value is not a default."""
        return name in self._set

    def default(self, name: str) -> Any:
        """Return a param's default; None if the model was saved without it."""
        return self._defaults.get(name)

    def get(self, name: str) -> Any:
        """Return a param's value or default; None if the model was saved without the param.

        A value that JSON cannot represent is unpickled, which runs code.
        """
        if name not in self._pickled:
            return self._values.get(name)
        if name not in self._unpickled:
            self._unpickled[name] = _Unpickler(io.BytesIO(self.read(name))).load()
        return self._unpickled[name]

    def read(self, name: str) -> bytes:
        """Return the bytes of a saved param.

        Raises
        ------
        StoreError
            If the bytes are missing.
        """
        return self.store.read(self._file(name))

    def file(self, name: str) -> Path | LocalFile:
        """Return a local file with the bytes of a saved param.

        Raises
        ------
        StoreError
            If the bytes are missing.
        """
        path = self._file(name)
        local = self.store.local_path(path)
        if local is not None:
            return Path(local)
        copy = LocalFile()
        with self.store.open(path) as source, open(copy, "wb") as target:
            shutil.copyfileobj(source, target, 2**22)
        return copy

    def _file(self, name: str) -> str:
        path = f"{self.params_folder}/{name}.pkl"
        if name not in self._pickled or not self.store.exists(path):
            raise StoreError(f"path: {self.path!r} is not complete: it lacks the param {name!r}.")
        return path


class _Unpickler(Unpickler):
    """Unpickler with placeholders for missing PySpark classes, such as column types in params."""

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return super().find_class(module, name)
        except ModuleNotFoundError:
            if module.partition(".")[0] != "pyspark":
                raise
            return type(name, (), {"__module__": module})


def class_of(requested: type, class_name: str, path: str) -> type:
    """Return the class of the loaded instance: the saved class, as in Spark, or the requested one.

    Parameters
    ----------
    requested : type
        The class to load.
    class_name : str
        The class that was saved, with its module. It must be ``requested``, a subclass, or, for a
        user's class, a base class. If it cannot be imported, the instance is loaded as
        ``requested``, because programs also save their own classes.
    path : str
        The folder, for the message.

    Raises
    ------
    ParamError
        If the saved class does not match.
    """
    module, _, name = class_name.rpartition(".")
    if (module, name) == (requested.__module__, requested.__name__):
        return requested
    if not class_name.startswith(_JVM):
        try:
            saved: type = getattr(importlib.import_module(module), name)
            if issubclass(saved, requested):
                return saved
            # In this package Lightning's classes derive from torch's, but must not load models
            # that torch's classes saved.
            if issubclass(requested, saved) and not requested.__module__.startswith(_OWN):
                return requested
        except (ImportError, AttributeError, TypeError, ValueError):
            return requested
    raise ParamError(
        f"path: {path!r} holds a {class_name}, not a {requested.__name__}. Load it with "
        f"{name}.load."
    )


def read_saved(path: str, storage_options: Mapping[str, Any] | None = None) -> Saved:
    """Return a saved model, or a saved pipeline.

    Parameters
    ----------
    path : str
        The folder.
    storage_options : mapping, optional
        Passed to fsspec's filesystem.

    Raises
    ------
    ParamError
        If no filesystem serves the path.
    StoreError
        If the path holds no model, or the model cannot be read.
    """
    require_path("path", path)
    if not path:
        raise ParamError("path: expected the folder of a saved model, found none.")
    store = Store.create(path, storage_options=dict(storage_options or {}))
    folder = store.get_full_path(path).rstrip("/")
    return Saved(store, folder, path)


def read_metadata(contents: Mapping[str, bytes], path: str) -> dict[str, Any]:
    """Return the metadata from Spark ML's writer, which is one line of JSON.

    Parameters
    ----------
    contents : mapping
        Name to content of the metadata's files. Spark writes an empty file for an empty partition.
    path : str
        The folder of the instance, for messages.

    Raises
    ------
    StoreError
        If there is no metadata, if it cannot be read, or if it has another format.
    """
    if not any(content.strip() for content in contents.values()):
        raise StoreError(f"path: found no saved model at {path!r}. Set the path given to save().")
    try:
        text = b"".join(
            gzip.decompress(content) if name.endswith(".gz") else content
            for name, content in contents.items()
        )
        metadata = parse_object(text)
        _check_types(metadata)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise StoreError(
            f"path: {path!r} is not a saved model: its metadata cannot be read "
            f"({type(error).__name__}: {error}). Save the model again, or restore the file."
        ) from error
    version = metadata.get("formatVersion", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path!r} is of format {version}, and this version of hvd_estimators reads "
            f"{FORMAT_VERSION}. Install the version that saved it, or save it again."
        )
    return metadata


def _check_types(metadata: Mapping[str, Any]) -> None:
    check_types(metadata, _METADATA, required=["class"])
    uids = metadata.get("paramMap", {}).get("stageUids", [])
    for names in (metadata.get("pickledParams", []), uids):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected names, found {names!r:.100}")
