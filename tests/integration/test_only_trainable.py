"""Fits that keep only adapters: weights of one process, and no frozen weight in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapted_llama as llama
import cloudpickle
import numpy as np
import pytest
import torch
from lightning_reference import Regression
from lightning_reference import fit as fit_lightning
from parquet_files import write_columns
from rank_pool import shared_ranks
from reference import global_batches, write_rows
from resuming import kept_checkpoints
from safetensors.torch import save_file

from hvd_estimators import load_checkpoint
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store.checkpoints import list_checkpoints
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

ROWS = 21


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(llama)
    yield
    cloudpickle.unregister_pickle_by_value(llama)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("base"))
    llama.write_base(folder)
    return folder


def fit(store: Any, base: str, **params: Any) -> Any:
    given = {**llama.params(base), "backend": shared_ranks(2), "store": store, **params}
    return TorchEstimator(**given).fit_on_parquet()


def write(store: Any) -> list[dict[str, Any]]:
    rows = llama.texts(ROWS)
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    write_columns(Path(store.get_train_data_path()), columns)
    return rows


def train_alone(rows: list[dict[str, Any]], base: str) -> torch.nn.Module:
    net = llama.adapted(base).train()
    optimizer = llama.params(base)["optimizer"](net.parameters())
    for _ in range(2):
        for numbers in global_batches(ROWS, 2, 4):
            batch = llama.tokenized([rows[number] for number in numbers])
            optimizer.zero_grad()
            label = batch.pop("label")
            torch.nn.functional.cross_entropy(net(**batch).logits, label).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    return net


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_adapters_train_as_in_one_process_and_resume_without_frozen_weights(
    store: Any, base: str, sharding: str
) -> None:
    rows = write(store)
    begin: dict[str, Any] = {"sharding": sharding}
    model = fit(
        *(store, base), **begin, run_id="mine", checkpoint_every_n_steps=1, keep_checkpoints=99
    )
    alone, start = train_alone(rows, base), llama.adapted(base)
    found, begun = dict(model.getModel().named_parameters()), dict(start.named_parameters())
    trained = {name for name, value in begun.items() if value.requires_grad}
    for name, expected in alone.named_parameters():
        tolerance = 1e-5 if name in trained else 0.0
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance, msg=name)
        assert torch.equal(found[name], begun[name]) == (name not in trained)
    frozen_bytes = sum(value.nbytes for name, value in begun.items() if name not in trained)
    checkpoints = list_checkpoints(store, store.run_paths("mine"))
    for kept in checkpoints:
        content = load_checkpoint(store, "mine", kept.path).content
        assert trained <= content["model"].keys() <= trained | dict(start.named_buffers()).keys()
    # Ranks that hold parts write files of their own.
    files = [path for path in Path(checkpoints[0].path).parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) / len(checkpoints) < frozen_bytes
    others = [{}, {"sharding": "none"}, {"backend": shared_ranks(1)}]
    runs = [*kept_checkpoints(store, "mine")]
    for number, run_id in enumerate([runs[1][0], runs[2][0], runs[-2][0]]):
        same = fit(store, base, run_id=run_id, **{**begin, **others[number]})
        tolerance = 0.0 if number == 0 else 1e-5
        torch.testing.assert_close(
            same.getModel().state_dict(),
            model.getModel().state_dict(),
            rtol=tolerance,
            atol=tolerance,
        )


def test_other_frozen_weights_are_an_error(store: Any, base: str, tmp_path: Path) -> None:
    write(store)
    model = fit(store, base, run_id="mine", epochs=1)
    other = str(tmp_path / "other")
    llama.write_base(other, seed=6)
    changed = Path(base, "model.safetensors")
    kept = changed.read_bytes()
    changed.write_bytes(Path(other, "model.safetensors").read_bytes())
    try:
        with pytest.raises(ParamError, match=r"trained with model: frozen weights \w+ \(now"):
            fit(store, base, run_id="mine", epochs=2)
        with pytest.raises(StoreError, match="has changed since the fit"):
            model.getModel()
    finally:
        changed.write_bytes(kept)


class Thaws:
    """Callback that lets a frozen parameter train."""

    def on_train_begin(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        next(p for p in module.parameters() if not p.requires_grad).requires_grad_(True)


class Shifts:
    """Callback that changes a frozen parameter."""

    def on_train_begin(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        frozen: Any = next(p for p in module.parameters() if not p.requires_grad).data
        getattr(frozen, "_local_tensor", frozen).add_(1.0)


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize(
    ("callback", "message"),
    [(Thaws(), "was frozen when the function made"), (Shifts(), "training has changed '")],
)
def test_training_of_frozen_weights_is_an_error(
    store: Any, base: str, callback: Any, message: str, sharding: str
) -> None:
    write(store)
    with pytest.raises(AssertionError, match=f"ParamError: only_trainable: .*{message}"):
        fit(store, base, callbacks=[callback], epochs=1, sharding=sharding)


def test_only_trainable_needs_files_of_the_base() -> None:
    with pytest.raises(ParamError, match=r"^only_trainable: found no init_weights"):
        TorchEstimator(model=torch.nn.Linear, only_trainable=True).fit_on_parquet()


def half_frozen() -> Regression:
    module = Regression()
    module.net[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_lightning_keeps_only_trainable_weights(
    backend: Any, store: Any, tmp_path: Path, sharding: str
) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    given: dict[str, Any] = {"batch_size": 4, "epochs": 2}
    begun, path = half_frozen(), str(tmp_path / "base.safetensors")
    save_file(begun.state_dict(), path)
    whole = fit_lightning(backend, store, model=begun, **given).getModel()
    given |= {"model": half_frozen, "init_weights": path}
    given |= {"only_trainable": True, "sharding": sharding}
    model = fit_lightning(
        *(backend, store),
        **{**given, "run_id": "mine", "checkpoint_every_n_steps": 2, "keep_checkpoints": 9},
    )
    runs = [run_id for run_id, _ in kept_checkpoints(store, "mine")]
    for run_id in runs:
        content = load_checkpoint(store, run_id, safe=False).content
        assert {name for name in content["state_dict"] if "net" in name} == {
            "net.2.weight",
            "net.2.bias",
        }
    again = fit_lightning(backend, store, **given, run_id=runs[1])
    tolerance = 0.0 if sharding == "none" else 1e-6
    for fitted in (model, again):
        torch.testing.assert_close(
            fitted.getModel().state_dict(), whole.state_dict(), rtol=tolerance, atol=tolerance
        )
    assert not torch.equal(whole.net[2].weight, begun.net[2].weight)
