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


def test_train_steps_per_epoch_cuts_or_cycles_the_data(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 96)
    batches = global_batches(96, 2, 16)
    assert len(batches) == 3
    for steps in (2, 4):
        model, _ = fit(store, 2, "sgd", batch_size=16, train_steps_per_epoch=steps, epochs=3)
        taken = [batches[step % 3] for step in range(3 * steps)]
        assert_same_weights(model.getModel(), train_alone(columns, taken, OPTIMIZERS["sgd"], 1))


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
