"""Loading checkpoints with the framework that wrote them, without Spark and Horovod."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np
import pytest
import torch

from hvd_estimators import Store, load_checkpoint
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.keras.model_file import save_values
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.spec import CheckpointOptions, EpochMetrics

LOSSES = [0.5, 0.1, 0.3, 0.2]


def save(store: Any, write: Any, framework: str = "torch", losses: Any = LOSSES) -> None:
    history: tuple[EpochMetrics, ...] = ()
    options = CheckpointOptions(framework, keep=9)
    with CheckpointWriter(store, store.run_paths("mine"), options) as writer:
        for epoch, loss in enumerate(losses):
            history = (*history, EpochMetrics(epoch, {"loss": 9.0}, {"loss": loss}))
            writer.save(
                RunState(epoch + 1, 0, 2, history), lambda file, epoch=epoch: write(file, epoch)
            )


def torch_file(file: IO[bytes], epoch: int) -> None:
    torch.save({"model": {"weight": torch.full((2,), float(epoch + 1))}}, file)


def epoch_of(checkpoint: Any) -> int:
    (epoch,) = set(checkpoint.content["model"]["weight"].tolist())
    assert checkpoint.epoch == epoch
    return int(epoch)


def test_checkpoints_load_by_newest_best_or_path(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, torch_file)
    paths = store.get_checkpoints("mine")
    newest = load_checkpoint(store, run_id="mine")
    assert (newest.path, newest.framework, newest.rows) == (paths[-1], "torch", 0)
    assert newest.history[1] == {"epoch": 1, "train": {"loss": 9.0}, "validation": {"loss": 0.1}}
    assert newest.metrics == {"loss": 9.0, "val_loss": 0.2}
    assert epoch_of(newest) == 4
    assert epoch_of(load_checkpoint(store, "mine", which="best")) == 2
    assert epoch_of(load_checkpoint(store, "mine", which=paths[2])) == 3
    # By the store's prefix, and by the path alone.
    assert epoch_of(load_checkpoint(store.prefix_path, run_id="mine")) == 4
    assert epoch_of(load_checkpoint(paths[0])) == 1
    assert epoch_of(load_checkpoint(store, which=paths[0])) == 1
    monkeypatch.chdir(Path(paths[0]).parent)
    assert epoch_of(load_checkpoint(Path(paths[0]).name)) == 1


def test_damaged_checkpoints_are_skipped_and_named(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, torch_file)
    paths = store.get_checkpoints("mine")
    for path in (paths[1], paths[3]):
        Path(path).write_bytes(b"cut")
    assert epoch_of(load_checkpoint(store, "mine")) == 3
    assert repr(paths[3]) in caplog.text
    # The best of the valid ones.
    assert epoch_of(load_checkpoint(store, "mine", which="best")) == 3
    assert repr(paths[1]) in caplog.text
    with pytest.raises(StoreError, match=r"000002.ckpt' is damaged: it has 3 bytes"):
        load_checkpoint(paths[1])


def test_missing_checkpoints_are_reported(store: Any) -> None:
    for which in ("newest", "best"):
        with pytest.raises(StoreError, match="no checkpoint of the run 'mine'"):
            load_checkpoint(store, "mine", which=which)
    with pytest.raises(ParamError, match="run_id is not set"):
        load_checkpoint(store)
    with pytest.raises(StoreError, match=r"nothing\.ckpt"):
        load_checkpoint(f"{store.prefix_path}/nothing.ckpt")
    Path(store.prefix_path).mkdir()
    Path(store.prefix_path, "text").write_bytes(b"text")
    with pytest.raises(StoreError, match="not a file of torch, Keras or Lightning"):
        load_checkpoint(f"{store.prefix_path}/text")


def test_files_of_other_programs_have_only_content(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "state")
    found = load_checkpoint(str(tmp_path / "state"))
    assert (found.framework, found.epoch, found.history, found.metrics) == ("torch", None, [], {})
    assert torch.equal(found.content["a"], torch.ones(1))


class Custom:
    """Class that is not a plain value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_code_in_a_file_runs_only_on_request(store: Any) -> None:
    save(store, lambda file, epoch: torch.save({"of users": Custom()}, file), "lightning")
    with pytest.raises(StoreError, match="safe=False"):
        load_checkpoint(store, "mine")
    assert load_checkpoint(store, "mine", safe=False).content == {"of users": Custom()}


def test_a_keras_checkpoint_has_the_values_of_the_variables(store: Any) -> None:
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    net = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(3)])
    net.compile(keras.optimizers.Adam(0.25), "mse")
    net.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
    save(store, lambda file, epoch: save_values(net, file), "keras")
    found = load_checkpoint(store, "mine")
    assert (found.framework, found.epoch) == ("keras", 4)
    assert [name.split(": ")[1] for name in found.content][:3] == ["kernel", "bias", "gamma"]
    for value, variable in zip(found.content.values(), net.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy(), err_msg=variable.path)


def test_loading_needs_neither_spark_nor_horovod(store: Any) -> None:
    save(store, torch_file)
    program = f"""
        import sys
        sys.modules["pyspark"] = sys.modules["horovod"] = sys.modules["keras"] = None
        from hvd_estimators import load_checkpoint
        found = load_checkpoint({store.prefix_path!r}, run_id="mine", which="best")
        print(found.epoch, found.content["model"]["weight"].tolist())
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stdout == "2 [2.0, 2.0]\n", told.stderr


def test_checkpoints_load_from_any_store(tmp_path: Path) -> None:
    store = Store.create("memory://load-checkpoint")
    save(store, torch_file)
    assert epoch_of(load_checkpoint(store, "mine", which="best")) == 2
    content = io.BytesIO(store.read(store.get_checkpoints("mine")[0]))
    assert torch.load(content, weights_only=True)["model"]["weight"].tolist() == [1.0, 1.0]
