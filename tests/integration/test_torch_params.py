"""Parameters of TorchEstimator take effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import reference
import torch
from rank_pool import shared_ranks
from reference import (
    OPTIMIZERS,
    assert_same_weights,
    global_batches,
    make_net,
    train_alone,
    write_rows,
)

pytestmark = pytest.mark.integration


def fit(store: Any, ranks: int, name: str, **params: Any) -> tuple[Any, Any]:
    return reference.fit(store, ranks, name, **{"backend": shared_ranks(ranks), **params})


def test_transformation_fn_changes_rows_before_they_reach_the_model(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 100)

    def double(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "features": row["features"] * 2}

    model, _ = fit(store, 2, "sgd", batch_size=16, transformation_fn=double)
    columns["features"] = columns["features"] * 2
    expected = train_alone(columns, global_batches(100, 2, 16), OPTIMIZERS["sgd"], 1)
    assert_same_weights(model.getModel(), expected)


def test_cached_rows_train_as_rows_read_again(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 150)
    cached, read = (
        fit(store, 2, "adam", epochs=3, inmemory_cache_all=cache)[0].getModel()
        for cache in (True, False)
    )
    for a, b in zip(cached.parameters(), read.parameters(), strict=True):
        assert torch.equal(a, b)
    # Shuffling changes the order, which does not matter in steps over all rows.
    whole = {"batch_size": 75, "epochs": 3, "shuffle": True, "inmemory_cache_all": True}
    model, _ = fit(store, 2, "adam", **whole)
    expected = train_alone(columns, [np.arange(150)], OPTIMIZERS["adam"], 3)
    assert_same_weights(model.getModel(), expected)


def test_train_steps_per_epoch_cuts_or_cycles_the_data(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 96)
    batches = global_batches(96, 2, 16)
    assert len(batches) == 3
    for steps in (2, 4):
        model, _ = fit(store, 2, "sgd", batch_size=16, train_steps_per_epoch=steps, epochs=3)
        taken = [batches[step % 3] for step in range(3 * steps)]
        assert_same_weights(model.getModel(), train_alone(columns, taken, OPTIMIZERS["sgd"], 1))


def test_loss_constructors_make_losses_on_the_ranks(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    for constructor in (torch.nn.MSELoss, lambda model, size: torch.nn.MSELoss()):
        model, _ = fit(store, 2, "sgd", loss=None, loss_constructors=constructor, batch_size=16)
        expected = train_alone(columns, global_batches(64, 2, 16), OPTIMIZERS["sgd"], 1)
        assert_same_weights(model.getModel(), expected)


def test_compressed_gradients_are_close_to_exact_ones(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 128)
    model, _ = fit(store, 2, "sgd", batch_size=16, gradient_compression=hvd.Compression.fp16)
    exact = train_alone(columns, global_batches(128, 2, 16), OPTIMIZERS["sgd"], 1)
    found, expected = (
        np.concatenate([p.detach().numpy().reshape(-1) for p in net.parameters()])
        for net in (model.getModel(), exact)
    )
    np.testing.assert_allclose(found, expected, atol=5e-3)
    assert np.abs(found - expected).max() > 1e-6


def test_callbacks_receive_the_same_logs_on_each_rank(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 64)
    folder = str(tmp_path)

    class Notes:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def on_train_begin(self, module: Any, optimizer: Any) -> None:
            self.lines.append(f"begin lr={optimizer.param_groups[0]['lr']}")

        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            self.lines.append(f"{epoch} {logs['train']['loss']!r}")

        def on_train_end(self) -> None:
            import os

            rank = os.environ["HOROVOD_RANK"]
            Path(folder, f"rank{rank}").write_text("\n".join(self.lines))

    model, _ = fit(store, 2, "sgd", epochs=2, callbacks=[Notes()], scale_learning_rate=True)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    expected = "\n".join(["begin lr=0.05", *(f"{e} {loss!r}" for e, loss in enumerate(losses))])
    assert (tmp_path / "rank0").read_text() == expected
    assert (tmp_path / "rank1").read_text() == expected


def test_runs_are_deleted_if_the_store_does_not_keep_them(tmp_path: Path) -> None:
    from hvd_estimators import Store

    store = Store.create(str(tmp_path / "store"), save_runs=False)
    write_rows(Path(store.get_train_data_path()), 32)
    fit(store, 1, "sgd")
    # The model and its state were exchanged through a folder that is deleted.
    assert list(Path(store.get_runs_path()).iterdir()) == []


def test_event_files_hold_the_losses_of_the_history(store: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_rows(Path(store.get_train_data_path()), 64)
    model, _ = fit(store, 1, "sgd", epochs=2, metrics=[[torch.nn.functional.l1_loss]])
    logs = EventAccumulator(store.get_logs_path(model.getRunId()))
    logs.Reload()
    for tag, values in (
        ("train/loss", [r["train"]["loss"] for r in model.getHistory()]),
        (
            "train/l1_loss",
            [r["train"]["all_metrics"][0]["l1_loss"] for r in model.getHistory()],
        ),
    ):
        assert [event.value for event in logs.Scalars(tag)] == pytest.approx(values, rel=1e-6)


def test_batch_norm_statistics_are_the_mean_over_the_ranks(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4, momentum=1.0), torch.nn.Linear(4, 1))
    model, _ = fit(
        store,
        2,
        "sgd",
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        batch_size=32,
    )
    # With momentum 1 the statistics are those of the last batch: one of 32 rows on each rank.
    means = [columns["features"][rows].mean(axis=0) for rows in (slice(0, 32), slice(32, 64))]
    np.testing.assert_allclose(
        model.getModel()[0].running_mean, np.mean(means, axis=0), rtol=1e-4, atol=1e-6
    )


def test_a_custom_function_may_accumulate_gradients_of_several_passes(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)

    def twice(
        model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any
    ) -> Any:
        for _ in range(2):
            outputs, aligned = transform_outputs(model(*inputs), labels)
            loss = loss_fn(outputs, aligned)
            loss.backward()
        optimizer.step()
        return outputs, loss

    net = make_net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    for rows in global_batches(64, 2, 8):
        for _ in range(2):
            output = net(torch.from_numpy(columns["features"][rows])).reshape(-1)
            torch.nn.functional.mse_loss(
                output, torch.from_numpy(columns["label"][rows])
            ).backward()
        optimizer.step()

    # The gradients of a step's first pass are already means when those of the second are added.
    model, _ = fit(store, 2, "sgd", train_minibatch_fn=twice, batch_size=8)
    assert_same_weights(model.getModel(), net)
    with_param, _ = fit(
        store, 2, "sgd", train_minibatch_fn=twice, batch_size=8, backward_passes_per_step=2
    )
    assert np.isfinite(with_param.getHistory()[0]["train"]["loss"])
