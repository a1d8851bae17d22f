"""Fingerprints: the identity of a run's data, model and settings. Runs on the driver.

A fingerprint is stored beside the checkpoints, and only a fit with an equal fingerprint can resume
the run. It is a dict of plain values, so that an error message can name the differences.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_estimators._util.documents import to_python
from hvd_estimators.data.manifest import DatasetManifest, Split
from hvd_estimators.loading.spec import DataSpec


def digest(fingerprint: Mapping[str, Any]) -> str:
    """Return a short hash of a fingerprint: 12 hexadecimal digits."""
    document = json.dumps(as_json(fingerprint), sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:12]


def data_identity(manifest: DatasetManifest, columns: Sequence[str]) -> dict[str, Any]:
    """Return the identity of a dataset: its columns, its numbers of rows, and its content.

    Prepared data have a checksum of their rows, which stays the same when they are prepared again.
    Other data are identified by their row groups and the file names relative to their folder.
    """
    specs = [spec for spec in manifest.columns if spec.name in columns]
    specs.sort(key=lambda spec: columns.index(spec.name))
    identity: dict[str, Any] = {
        "columns": [[spec.name, spec.kind, spec.dtype, list(spec.shape)] for spec in specs],
        "training rows": manifest.train.rows,
        "validation rows": manifest.validation_rows,
    }
    if manifest.content is not None:
        return {**identity, "content of the rows": manifest.content}
    splits = [manifest.train, *([manifest.validation] if manifest.validation else [])]
    return {**identity, "files": digest({"splits": [_files(split) for split in splits]})}


def named(value: Any) -> Any:
    """Return a value that JSON can hold, with names in place of functions, classes and objects."""
    value = to_python(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): named(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [named(entry) for entry in value]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def with_options(value: Any) -> Any:
    """Return a loss as `named` does, and the options of the objects in it.

    Options are plain values and small arrays, also in objects of torch and Keras within an object.
    Trained parameters, and what a function computes, are not compared.
    """
    try:
        return _with_options(value)
    except Exception:  # an object in a circle, or one that cannot be read
        return named(value)


def _with_options(value: Any) -> Any:
    value = to_python(value)
    if isinstance(value, Mapping):
        return {str(key): _with_options(entry) for key, entry in value.items() if _is_option(entry)}
    if isinstance(value, (list, tuple)):
        return [_with_options(entry) for entry in value]
    if isinstance(value, functools.partial):
        return {named(value.func): _with_options({"args": value.args, **value.keywords})}
    if hasattr(value, "__array__") and not isinstance(value, type):
        is_trained = getattr(value, "requires_grad", False) or getattr(value, "trainable", False)
        if is_trained or math.prod(value.shape) > 1000:
            return None
        return value.tolist() if hasattr(value, "tolist") else np.asarray(value).tolist()
    options = _with_options(_options(value))
    return {named(value): options} if options else named(value)


def _options(value: Any) -> dict[str, Any]:
    """Return the public attributes, the config, and the buffers and submodules of an object."""
    if hasattr(value, "__qualname__"):
        return {}
    held = getattr(value, "__dict__", {})
    options = {
        name: entry
        for name, entry in held.items()
        if name[0] != "_" and (_is_plain(entry) or _has_options(entry))
    }
    if hasattr(value, "named_buffers"):
        options |= dict(value.named_buffers(recurse=False)) | dict(value.named_children())
    if hasattr(value, "get_config"):
        options |= getattr(value, "_fn_kwargs", {})  # not all are in the config
        with contextlib.suppress(NotImplementedError):
            options |= value.get_config()
    # Keras numbers names, and the mode of torch's modules is set by each fit.
    return {name: option for name, option in options.items() if name not in ("name", "training")}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, Mapping, list, tuple))


def _has_options(value: Any) -> bool:
    return any(hasattr(value, name) for name in ("__array__", "get_config", "named_buffers"))


def _is_option(value: Any) -> bool:
    # A long text may be the code of a function, which depends on its lines in a file.
    return not isinstance(value, str) or len(value) <= 100


def reading_identity(data: DataSpec) -> dict[str, Any]:
    """Return the identity of the row order, without its seed.

    Files are identified by their position, because their names change when data are prepared again.
    """
    files: dict[str, int] = {}
    ranges = [
        [
            [files.setdefault(rows.file, len(files)), rows.row_group, rows.start, rows.stop]
            for rows in shard
        ]
        for shard in data.train_plan.shards
    ]
    options, module = data.options, data.data_module
    return {
        "order of the rows in the files": data.row_order,
        "row groups of the files": digest({"shards": ranges, "open": data.train_plan.open_groups}),
        "rows in the smallest batch": data.train_plan.min_batch_rows,
        "shuffle_buffer_size": options.shuffle_buffer_size if options.shuffle else None,
        "inmemory_cache_all": options.shuffle and options.inmemory_cache_all,
        # All data modules of this package read in the same order.
        "data_module": named(module) if isinstance(module, type) else None,
    }


def _files(split: Split) -> list[Any]:
    return [
        [group.file.removeprefix(split.path), group.index, group.rows, group.footer]
        for group in split.row_groups
    ]


def as_json(fingerprint: Mapping[str, Any]) -> Any:
    """Return a fingerprint as it is after a JSON round trip."""
    return json.loads(json.dumps(to_python(dict(fingerprint)), default=named))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences between the entries that both have, old value before new value."""
    texts = []
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            texts += [f"{name}: {difference}" for difference in differences(old, new)]
            texts += [f"{name}: {key} (now without)" for key in old.keys() - new.keys()]
            texts += [f"{name}: no {key} (now with)" for key in new.keys() - old.keys()]
        elif json.dumps(old) != json.dumps(new):
            texts.append(f"{name} {_short(old)} (now {_short(new)})")
    return sorted(texts)


def _short(value: Any) -> str:
    text = re.sub(r"\s+", " ", value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 120 else f"{text[:80]}… ({digest({'value': value})})"
