"""File transfer between driver and ranks loses nothing, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_estimators import Store
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError, ResultsError, StoreError, WorkerFailedError
from hvd_estimators.store.base import RunPaths
from hvd_estimators.torch import TorchModel
from hvd_estimators.training.call_transfer import CallTransfer, train_stored
from hvd_estimators.training.spec import EpochMetrics, TrainResult

STATE = bytes(range(256)) * 100
CHECKPOINT = "checkpoint-000001"
KEPT = {f"store/runs/mine/checkpoints/{CHECKPOINT}.{suffix}" for suffix in ("ckpt", "json")}


@dataclasses.dataclass
class Spec:
    """The parts of a TrainSpec that these tests need."""

    store: Store
    run: RunPaths
    options: dict[str, Any]
    scale: int = 3
    files: tuple[LocalFile, ...] = ()


def trainer(spec: Spec) -> TrainResult:
    history = (EpochMetrics(0, {"loss": float(spec.scale)}),)
    return TrainResult("digest", STATE * spec.scale, history)


def other_rank(spec: Spec) -> TrainResult:
    return TrainResult("digest", None, ())


def tells_options(spec: Spec) -> TrainResult:
    assert spec.options["storage_options"] == spec.store.storage_options
    return TrainResult(spec.options["storage_options"]["key"] + " twice", None, ())


def make_spec(folder: Path, **store: Any) -> Spec:
    made = Store.create(str(folder / "store"), **store)
    return Spec(made, made.run_paths("mine"), {"storage_options": made.storage_options})


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def write_checkpoint(spec: Spec) -> None:
    spec.store.write_text(f"{spec.run.checkpoints_path}/{CHECKPOINT}.ckpt", "checkpoint")
    spec.store.write_text(f"{spec.run.checkpoints_path}/{CHECKPOINT}.json", "{}")


@pytest.mark.parametrize("save_runs", [True, False])
def test_ranks_return_little_and_the_state_arrives_in_a_file(
    tmp_path: Path, save_runs: bool
) -> None:
    spec = make_spec(tmp_path, save_runs=save_runs)
    with CallTransfer(spec) as handover:  # type: ignore[arg-type]
        call = handover.put(trainer)
        answer = train_stored(call)
        assert answer.state is None
        assert len(files(tmp_path)) == 2
        results = handover.read([answer, train_stored(handover.put(other_rank))])
    assert results[0].state == STATE * 3
    assert results[0].history[0].train == {"loss": 3.0}
    assert results[1].state is None
    assert files(tmp_path) == set()


def file_trainer(spec: Spec) -> TrainResult:
    state = LocalFile()
    Path(state.path).write_bytes(STATE * spec.scale)
    return TrainResult(state.path, state, ())


def test_a_state_in_a_file_stays_a_file(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    with CallTransfer(spec) as handover:  # type: ignore[arg-type]
        answer = train_stored(handover.put(file_trainer))
        assert answer.state is None
        assert not Path(answer.weights_digest).parent.exists()
        state = handover.read([answer])[0].state
    assert isinstance(state, LocalFile)
    path = Path(state.path)
    assert path.read_bytes() == STATE * 3
    del state
    assert not path.parent.exists()
    assert files(tmp_path) == set()


def reads_files(spec: Spec) -> TrainResult:
    first, second, again = spec.files
    assert again is first
    content = [Path(local.path).read_bytes() for local in (first, second)]
    return TrainResult(" and ".join(c.decode() for c in content), None, ())


def test_files_of_a_spec_reach_the_ranks_and_are_checked(tmp_path: Path) -> None:
    locals_ = [LocalFile(), LocalFile()]
    for local, text in zip(locals_, ("a model", "another"), strict=True):
        Path(local.path).write_text(text)
    spec = make_spec(tmp_path)
    spec.files = (*locals_, locals_[0])
    with CallTransfer(spec) as handover:  # type: ignore[arg-type]
        call = handover.put(reads_files)
        assert train_stored(call).weights_digest == "a model and another"
        stored = {Path(name).name: tmp_path / name for name in files(tmp_path)}
        assert {*stored} == {"call", "file-0", "file-1"}
        stored["file-1"].write_text("somebody")
        with pytest.raises(StoreError, match="something else than what was written"):
            train_stored(call)
    assert files(tmp_path) == set()


def test_storage_options_are_not_in_the_file(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, storage_options={"key": "a secret of somebody"})
    with CallTransfer(spec) as handover:  # type: ignore[arg-type]
        call = handover.put(tells_options)
        assert b"a secret" not in Path(call.path).read_bytes()
        assert train_stored(call).weights_digest == "a secret of somebody twice"


def test_modified_files_are_not_unpickled(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    with CallTransfer(spec) as handover:  # type: ignore[arg-type]
        call = handover.put(trainer)
        answer = train_stored(call)
        for path in (call.path, call.state_path):
            content = Path(path).read_bytes()
            Path(path).write_bytes(content[:-1] + b"x")
        with pytest.raises(StoreError, match="something else than what was written"):
            train_stored(call)
        with pytest.raises(StoreError, match="something else than what was written"):
            handover.read([answer])


@pytest.mark.parametrize("error", [MemoryError("no room"), ParamError("no such thing")])
def test_late_errors_name_the_saved_work(tmp_path: Path, error: Exception) -> None:
    spec = make_spec(tmp_path)
    kind = ParamError if isinstance(error, ParamError) else ResultsError

    def fit() -> None:
        with CallTransfer(spec) as handover:  # type: ignore[arg-type]
            handover.read([train_stored(handover.put(trainer))])
            write_checkpoint(spec)
            with handover.describing_saved_state(trained=True):
                raise error

    with pytest.raises(kind) as caught:
        fit()
    message = str(caught.value)
    assert str(error) in message
    assert "run_id='mine'" in message
    assert "fit() with that run_id" in message
    assert f"{CHECKPOINT}.ckpt" in message
    assert files(tmp_path) == KEPT


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_finished_checkpoints_survive_a_failed_rank(tmp_path: Path, has_checkpoint: bool) -> None:
    spec = make_spec(tmp_path)

    def fit() -> None:
        with (
            CallTransfer(spec) as handover,  # type: ignore[arg-type]
            handover.describing_saved_state(trained=False),
        ):
            handover.put(trainer)
            if has_checkpoint:
                write_checkpoint(spec)
            raise WorkerFailedError("it broke", rank=1)

    with pytest.raises(WorkerFailedError, match="it broke") as caught:
        fit()
    assert caught.value.rank == 1
    assert ("run_id='mine'" in str(caught.value)) == has_checkpoint
    assert files(tmp_path) == (KEPT if has_checkpoint else set())


def test_errors_in_saving_a_model_name_its_run(tmp_path: Path) -> None:
    cannot = {"model": torch.nn.Linear(1, 1), "loss": threading.Lock()}
    told = r"^loss: found a lock, which cannot be saved \(TypeError: .*set it after loading\."
    with pytest.raises(ParamError, match=rf"{told} .*run_id='mine'"):
        TorchModel(**cannot, run_id="mine").save(str(tmp_path / "model"))
    with pytest.raises(ParamError, match=f"{told}$"):
        TorchModel(**cannot).save(str(tmp_path / "model"))


def test_errors_of_the_backend_are_not_converted(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    with (
        pytest.raises(KeyError),
        CallTransfer(spec) as handover,  # type: ignore[arg-type]
        handover.describing_saved_state(trained=False),
    ):
        raise KeyError("of the backend")


def test_the_next_fit_deletes_files_of_a_killed_fit(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    write_checkpoint(spec)
    kept = files(tmp_path)
    CallTransfer(spec).put(trainer)  # type: ignore[arg-type]
    with CallTransfer(spec) as handover:  # type: ignore[arg-type]
        call = handover.put(trainer)
        handover.delete_others()
        assert len(files(tmp_path) - kept) == 1
        assert train_stored(call).state_digest
    assert files(tmp_path) == kept


def test_fits_without_a_lease_leave_the_files_of_others(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, save_runs=False)
    with CallTransfer(spec) as first, CallTransfer(spec) as second:  # type: ignore[arg-type]
        call = first.put(trainer)
        second.delete_others()
        assert train_stored(call).state_digest
