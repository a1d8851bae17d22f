"""Overwriting saved models, and paths that Spark resolves."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import Pipeline

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.saving.folder import open_folder
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.spark


def model_of(value: float, **params: Any) -> TorchModel:
    net = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(net.weight, value)
    return TorchModel(model=net, feature_columns=["x"], label_columns=["y"], **params)


def value_at(path: Any) -> float:
    return float(TorchModel.load(str(path)).getModel().weight)


@pytest.fixture
def viewed(spark: Any, tmp_path: Path) -> str:
    """Return a folder on a Hadoop filesystem to which the folder ``files`` is mounted."""
    (tmp_path / "files").mkdir()
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    name = tmp_path.name.replace("_", "-")
    configuration.set(f"fs.viewfs.mounttable.{name}.link./data", f"file://{tmp_path}/files")
    return f"viewfs://{name}/data"


@pytest.mark.parametrize("place", ["local", "viewfs"])
def test_overwriting_a_saved_model_is_atomic(
    spark: Any, tmp_path: Path, viewed: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "files" / "model"
    path = str(folder) if place == "local" else f"{viewed}/model"
    model_of(1.0).save(path)
    with pytest.raises(StoreError, match=r"exists\. To replace it"):
        model_of(2.0).save(path)
    # A value that cannot be pickled.
    with pytest.raises(ParamError, match=r"^loss: found a lock, which cannot be saved"):
        model_of(2.0, loss=threading.Lock()).write().overwrite().save(path)
    assert value_at(path) == 1.0

    # End saving at each of its steps, as by a signal, so that no later step happens.
    steps = ("write", "delete")
    kind = type(open_folder(spark, path))
    done = 0
    taken: list[tuple[str, str]] = []

    def ending(name: str, step: Any) -> Any:
        def call(folder: Any, place: str = "", *args: Any) -> None:
            taken.append((name, place))
            if len(taken) > done:
                raise KeyboardInterrupt
            step(folder, place, *args)

        return call

    for value in range(2, 30):
        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(kind, name, ending(name, getattr(kind, name)))
            done, taken = value - 2, []
            ended = False
            try:
                model_of(float(value)).write().overwrite().save(path)
            except KeyboardInterrupt:
                ended = True
        is_replaced = ("write", "metadata/part-00000.txt") in taken[:done]
        assert value_at(path) == (value if is_replaced else 1.0), taken
        if not ended:
            break
        model_of(1.0).write().overwrite().save(path)
    assert not ended
    assert set(steps) == {name for name, _ in taken}
    # The interrupted saves leave no files.
    (params,) = (name for name in os.listdir(folder) if name.startswith("params"))
    left = {name for name in os.listdir(folder) if not name.endswith(".crc")}
    assert left == {params, "metadata", "weights.pt"}
    assert float(torch.load(folder / "weights.pt")["weight"]) == value


def test_paths_are_resolved_by_spark(
    spark: Any, tmp_path: Path, viewed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"relative-{tmp_path.name}"
    working = Path(spark._jvm.java.lang.System.getProperty("user.dir"))
    # Python's working directory may differ from that of the JVM, which started earlier.
    monkeypatch.chdir(tmp_path)
    model = model_of(3.0)
    assert open_folder(spark, name).url == f"file:{working / name}"
    stages = spark._jvm.org.apache.hadoop.fs.Path(name)
    try:
        model.save(name)
        assert (working / name / "weights.pt").exists()
        assert not (tmp_path / name).exists()
        assert value_at(name) == 3.0
    finally:
        configuration = spark.sparkContext._jsc.hadoopConfiguration()
        stages.getFileSystem(configuration).delete(stages, True)
    configuration.set("fs.defaultFS", viewed.removesuffix("/data"))
    try:
        model.save("/data/by default")
        assert value_at("/data/by default") == 3.0
    finally:
        configuration.unset("fs.defaultFS")
    assert (tmp_path / "files" / "by default" / "weights.pt").exists()
    with pytest.raises(StoreError, match=r"unheard-of:/model.*No FileSystem for scheme"):
        model.save("unheard-of:/model")
    wrong: Any
    for wrong in (tmp_path / "model", "", None):
        for call in (model.save, model.write().overwrite().save, TorchModel.load):
            with pytest.raises(ParamError, match=r"^path: expected a path or a URL"):
                call(wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files"]


def test_a_saved_estimator_omits_its_stores_options(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"auto_mkdir": True, "secret": "hunter2"}
    store = Store.create(str(tmp_path / "store"), storage_options=options)
    estimator = TorchEstimator(store=store, epochs=2, optimizer=torch.optim.Adam)
    estimator.save(str(tmp_path / "estimator"))
    files = [file for file in (tmp_path / "estimator").rglob("*") if file.is_file()]
    assert len(files) > 2
    assert not any(b"hunter2" in file.read_bytes() for file in files)
    loaded = TorchEstimator.load(str(tmp_path / "estimator"))
    assert "storage_options of store of TorchEstimator" in caplog.text
    assert loaded.getStore().prefix_path == store.prefix_path
    assert loaded.getStore().storage_options == {}
    assert loaded.getOptimizer() is torch.optim.Adam  # a function needs no model
    assert estimator.getStore().storage_options == options

    # The options are saved on request, also within a pipeline.
    kept = Store.create(store.prefix_path, storage_options=options, save_storage_options=True)
    caplog.clear()
    Pipeline(stages=[TorchEstimator(store=kept)]).save(str(tmp_path / "pipeline"))
    (loaded,) = Pipeline.load(str(tmp_path / "pipeline")).getStages()
    assert loaded.getStore().storage_options == options
    assert "storage_options" not in caplog.text
