"""Models exported by their frameworks' own exporters, loaded back by other programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.exceptions import DependencyError, ParamError, StoreError
from hvd_estimators.keras import KerasModel
from hvd_estimators.saving.export import exported
from hvd_estimators.store import DBFSLocalStore


def run(document: Path | bytes, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of an ONNX model, by name."""
    import onnxruntime

    given = document if isinstance(document, bytes) else str(document)
    session = onnxruntime.InferenceSession(given)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def test_an_export_goes_to_the_root_of_a_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    mount = tmp_path / "mount"
    monkeypatch.setattr("hvd_estimators.store.local.MOUNT", str(mount))
    monkeypatch.setattr(DBFSLocalStore.__init__, "__kwdefaults__", {"mount": str(mount)})
    memory = fsspec.filesystem("memory")
    paths = {
        "memory://model": lambda: memory.cat("/model"),
        "dbfs:/model": (mount / "model").read_bytes,
        f"file://{tmp_path}/a%20b": (tmp_path / "a b").read_bytes,
        "relative": (tmp_path / "relative").read_bytes,
        "file:beside": (tmp_path / "beside").read_bytes,
    }
    for path, read in paths.items():
        with exported(path, False, None) as made:
            Path(made).write_bytes(path.encode())
        assert read() == path.encode()
    memory.rm("/model")
    assert sorted(os.listdir()) == ["a b", "beside", "mount", "relative"]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        ".",
        "a/..",
        "~",
        "~root",
        "file:///",
        "dbfs:/",
        "memory://",
        "s3://bucket",
        "s3://a/",
    ],
)
def test_an_export_needs_the_name_of_a_file_or_folder(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    with pytest.raises(ParamError, match="expected where to write"), exported(path, True, None):
        pass


def test_keras_models_are_exported_as_saved_model_or_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(2, "softmax")])
    model = KerasModel(model=net, feature_columns=["x"], label_columns=["y"])
    folder, file = tmp_path / "saved", tmp_path / "model.onnx"
    x = np.random.default_rng(1).normal(size=(5, 3)).astype("f")
    expected = net.predict_on_batch(x)

    model.export(str(folder))
    loaded = tf.saved_model.load(str(folder))
    np.testing.assert_allclose(loaded.serve(x), expected, atol=1e-6)
    np.testing.assert_allclose(loaded.serve(x[:1]), expected[:1], atol=1e-6)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tf2onnx", None)
        with pytest.raises(DependencyError, match=r"needs tf2onnx, .*wheel.*\[onnx\]"):
            model.export(str(file), format="onnx")
    model.export(str(file), format="onnx")
    (found,) = run(file, {"x": x}).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "saved"]

    with pytest.raises(StoreError, match="exists"):
        model.export(str(folder))
    net.set_weights([2 * weight for weight in net.get_weights()])
    model.export(str(folder), overwrite=True)
    loaded = tf.saved_model.load(str(folder))
    np.testing.assert_allclose(loaded.serve(x), net.predict_on_batch(x), atol=1e-6)
    with pytest.raises(ParamError, match="does not export it as 'tape'"):
        model.export(str(tmp_path / "other"), format="tape")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "saved"]

    # On other filesystems, the file that makes the folder a model is written last.
    memory = fsspec.filesystem("memory")
    model.export("memory://exports/saved")
    created = {
        name: memory.created(name) for name in memory.find("/exports/saved") if memory.isfile(name)
    }
    assert max(created, key=lambda name: created[name]) == "/exports/saved/saved_model.pb"
    memory.get("/exports/saved", str(tmp_path / "copy"), recursive=True)
    copied = tf.saved_model.load(str(tmp_path / "copy"))
    np.testing.assert_allclose(copied.serve(x), loaded.serve(x))
    memory.rm("/exports", recursive=True)
