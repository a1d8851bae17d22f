"""Models exported by their frameworks' own exporters, loaded back by other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import keras
import numpy as np
import pytest
import pytorch_lightning as lightning
import tensorflow as tf
import torch

from hvd_estimators.exceptions import DependencyError, ParamError, StoreError
from hvd_estimators.keras import KerasModel
from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchModel


def run(document: Path | bytes, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of an ONNX model, by name."""
    import onnxruntime

    given = document if isinstance(document, bytes) else str(document)
    session = onnxruntime.InferenceSession(given)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


class Two(torch.nn.Module):
    """Module with a dict as input, and outputs named like the labels in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.linear(self.dropout(self.norm(columns["a b"]))) * columns["k"][:, None]
        return {"n": hidden.sum(1), "m": hidden.reshape(-1, 2, 2)}


def test_torch_models_are_exported_to_onnx_with_column_names(
    tmp_path: Path,
) -> None:
    net = Two().train()
    net.linear.eval()
    model = TorchModel(
        model=net,
        feature_columns=["a b", "k"],
        label_columns=["m", "n"],
        input_shapes=[[-1, 3], [-1]],
        column_dtypes={"k": "int64"},
        input_form="dict",
    )
    path = tmp_path / "new folder" / "model.onnx"
    model.export_onnx(str(path))

    # The training modes are unchanged.
    assert net.training
    assert net.dropout.training
    assert not net.linear.training
    assert [entry.name for entry in path.parent.iterdir()] == ["model.onnx"]
    net.eval()
    for rows in (1, 5):
        a, k = np.random.default_rng(0).normal(size=(rows, 3)).astype("f"), np.arange(rows)
        found = run(path, {"a b": a, "k": k})
        expected = net({"a b": torch.tensor(a), "k": torch.tensor(k)})
        assert list(found) == ["m__output", "n__output"]
        for name in "mn":
            wanted = expected[name].detach().numpy()
            np.testing.assert_allclose(found[f"{name}__output"], wanted, atol=1e-6)

    chosen = model.copy({"label_columns": [], "outputs": ["n"]})
    chosen.export_onnx(str(tmp_path / "chosen.onnx"))
    (name,) = run(tmp_path / "chosen.onnx", {"a b": a, "k": k})
    assert name == "n__output"

    with pytest.raises(StoreError, match=r"model\.onnx' exists\. Set overwrite=True"):
        model.export_onnx(str(path))
    before = path.read_bytes()
    with pytest.raises(ParamError, match="torch's exporter does not take it"):
        model.export_onnx(str(path), overwrite=True, input_shapes=[[-1, 2], [-1]])
    assert [entry.name for entry in path.parent.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == before
    with pytest.raises(ParamError, match="input_shapes: expected a shape for each of a b, k"):
        model.export_onnx(str(path), overwrite=True, input_shapes=[[-1, 2]])


class Step(lightning.LightningModule):
    """Module with a predict_step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def predict_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self(batch["x"]).softmax(1)


def test_predict_steps_are_exported_to_another_filesystem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"x": {"shape": [2], "dtype": "float32"}}
    model = LightningModel(
        model=Step(),
        feature_columns=["x"],
        label_columns=["y"],
        use_predict_step=True,
        _metadata=known,
    )
    memory = fsspec.filesystem("memory")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(DependencyError, match=r"needs onnxscript, .*wheel.*\[onnx\]"):
            model.export_onnx("memory://exports/model.onnx")
    model.export_onnx("memory://exports/model.onnx")

    x = np.random.default_rng(1).normal(size=(4, 2))
    found = run(memory.cat("/exports/model.onnx"), {"x": x})["y__output"]
    expected = model.getModel()(torch.tensor(x)).softmax(1).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-12)
    memory.rm("/exports", recursive=True)


def test_keras_models_are_exported_as_saved_model_or_onnx(tmp_path: Path) -> None:
    net = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(2, "softmax")])
    model = KerasModel(model=net, feature_columns=["x"], label_columns=["y"])
    folder, file = tmp_path / "saved", tmp_path / "model.onnx"
    x = np.random.default_rng(1).normal(size=(5, 3)).astype("f")
    expected = net.predict_on_batch(x)

    model.export(str(folder))
    loaded = tf.saved_model.load(str(folder))
    np.testing.assert_allclose(loaded.serve(x), expected, atol=1e-6)
    np.testing.assert_allclose(loaded.serve(x[:1]), expected[:1], atol=1e-6)
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
