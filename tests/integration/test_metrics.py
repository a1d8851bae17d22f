"""Metrics over ranks with unequal rows, in each way to define them; stops by single ranks.

The reference is scikit-learn. The network does not learn, so its outputs are known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_reference import fit as fit_lightning
from parquet_files import write_columns
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from sklearn.metrics import f1_score, precision_score, roc_auc_score
from torchmetrics import AUROC, F1Score, MetricCollection, Precision

from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

CLASSES = 3


def write_classes(path: Path, rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, 4)).astype(np.float32)
    noisy = features @ make_net()[0].weight.detach().numpy().T + rng.normal(size=(rows, CLASSES))
    columns = {"features": features, "label": noisy.argmax(1).astype(np.float32)}
    write_columns(path, columns, row_group_size=7)
    return columns


def make_net() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, CLASSES))


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).float().mean()


def auroc() -> AUROC:
    return AUROC("multiclass", num_classes=CLASSES)


def macro() -> MetricCollection:
    options = {"num_classes": CLASSES, "average": "macro"}
    return MetricCollection(
        {"f1": F1Score("multiclass", **options), "precision": Precision("multiclass", **options)}
    )


def expected_of(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    with torch.no_grad():
        outputs = make_net()(torch.from_numpy(columns["features"])).softmax(1).numpy()
    label, guess = columns["label"], outputs.argmax(1)
    return {
        "accuracy": pytest.approx(np.mean(label == guess), rel=1e-6),
        "MulticlassAUROC": pytest.approx(
            roc_auc_score(label, outputs, multi_class="ovr", average="macro"), rel=1e-5
        ),
        "f1": pytest.approx(f1_score(label, guess, average="macro"), rel=1e-6),
        "precision": pytest.approx(precision_score(label, guess, average="macro"), rel=1e-6),
    }


def named(record: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in wanted}


def with_prefix(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def squared_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + 0 * label.mean()


PLAIN: dict[str, Any] = {
    "loss": squared_loss,
    "metrics": [accuracy, [auroc()], macro()],
    "feature_cols": ["features"],
    "label_cols": ["label"],
    "validation": 0.3,
    "batch_size": 8,
    "val_batch_size": 8,
    "epochs": 2,
}


def test_metrics_of_plain_modules_are_exact(backend: Any, store: Any) -> None:
    train = expected_of(write_classes(Path(store.get_train_data_path()), 41, 0))
    held_out = expected_of(write_classes(Path(store.get_val_data_path()), 17, 1))

    net = make_net()
    given = {**PLAIN, "model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.0)}
    estimator = TorchEstimator(
        **given, backend=backend, store=store, verbose=0, checkpoint_monitor="val_MulticlassAUROC"
    )
    for record in estimator.fit_on_parquet().getHistory():
        for stage, expected in (("train", train), ("validation", held_out)):
            found = {n: v for group in record[stage]["all_metrics"] for n, v in group.items()}
            assert found == expected, stage


class Classifier(LightningModule):
    """Module that logs metrics in each way that Lightning supports."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.train_auroc, self.auroc, self.computed = auroc(), auroc(), auroc()
        self.train_macro, self.macro, self.computed_macro = macro(), macro(), macro()
        self.outputs: list[torch.Tensor] = []
        self.hits: dict[str, list[torch.Tensor]] = {"train": [], "validation": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output, label = self.net(batch["features"]), batch["label"].long()
        self.train_auroc(output, label)
        self.log("train_MulticlassAUROC", self.train_auroc, on_step=False, on_epoch=True)
        self.train_macro.update(output, label)
        self.hits["train"].append((output.argmax(1) == label).float())
        return output.square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("train_accuracy", torch.cat(self.hits["train"]).mean())
        self.log_dict({f"train_{n}": v for n, v in self.train_macro.compute().items()})
        self.train_macro.reset()
        self.hits["train"].clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output, label = self.net(batch["features"]), batch["label"].long()
        self.auroc.update(output, label)
        self.log("val_MulticlassAUROC", self.auroc, on_epoch=True)
        self.macro.update(output, label)
        self.log_dict({f"val_{n}": metric for n, metric in self.macro.items()})
        self.computed.update(output, label)
        self.computed_macro.update(output, label)
        self.outputs.append((output.argmax(1) == label).float())

    def on_validation_batch_end(self, *_: Any) -> None:
        self.hits["validation"].append(self.outputs[-1].sum())

    def on_validation_epoch_end(self) -> None:
        self.log("val_accuracy", torch.cat(self.outputs).mean())
        self.log("hits", torch.stack(self.hits["validation"]).sum(), reduce_fx="sum")
        self.log("computed_MulticlassAUROC", self.computed.compute())
        self.log_dict({f"computed_{n}": v for n, v in self.computed_macro.compute().items()})
        self.computed.reset()
        self.computed_macro.reset()
        self.outputs.clear()
        self.hits["validation"].clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Monitors(Callback):
    """Callback that records metrics and collects batch sizes itself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sizes: list[int] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any):
        self.sizes.append(len(batch["label"]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
        path = Path(self.folder, f"{trainer.global_rank}-{trainer.current_epoch}")
        torch.save((seen, self.sizes), path)
        self.sizes.clear()


def test_metrics_of_a_lightning_module_are_exact_in_all_hooks(
    backend: Any, store: Any, tmp_path: Path
) -> None:
    train = write_classes(Path(store.get_train_data_path()), 41, 0)
    held_out = write_classes(Path(store.get_val_data_path()), 17, 1)
    best = ModelCheckpoint(monitor="val_accuracy", mode="max")
    model = fit_lightning(
        backend,
        store,
        model=Classifier(),
        validation=0.3,
        batch_size=8,
        val_batch_size=8,
        epochs=5,
        callbacks=[
            Monitors(str(tmp_path)),
            EarlyStopping("val_accuracy", mode="max", patience=1, min_delta=1e-6),
            best,
            # The Trainer accepts it only if progress bars are enabled.
            RichProgressBar(),
        ],
    )
    assert len(model.getHistory()) == 2  # The second epoch is not an improvement.
    record = model.getHistory()[-1]
    wanted = with_prefix("train_", expected_of(train))
    assert named(record["train"], wanted) == wanted
    with torch.no_grad():
        guess = make_net()(torch.from_numpy(held_out["features"])).argmax(1).numpy()
    hits = (guess == held_out["label"]).sum()
    wanted = {"val_accuracy": pytest.approx(hits / 17), "hits": hits}
    expected = expected_of(held_out)
    wanted |= with_prefix("val_", expected)
    del expected["accuracy"]
    wanted |= with_prefix("computed_", expected)
    assert named(record["validation"], wanted) == wanted
    sizes = []
    for rank in range(2):
        seen, own = torch.load(tmp_path / f"{rank}-1", weights_only=False)
        assert named(seen, wanted) == wanted, rank
        sizes.append(sum(own))
    assert sum(sizes) == 17


class StopsOnRankOne(LightningModule):
    """Module that stops training on only one rank."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = make_net()
        self.how = how
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        if self.how == "step" and self.global_rank == 1 and self.steps == 2:
            self.trainer.should_stop = True
        return self.net(batch["features"]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.how == "validation" and self.global_rank == 1:
            self.trainer.should_stop = True

    def on_train_epoch_end(self) -> None:
        if self.how == "epoch" and self.global_rank == 0:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("how", "steps", "epochs"), [("step", 2, 1), ("validation", 2, 1), ("epoch", 4, 1)]
)
def test_all_ranks_stop_if_one_stops(
    backend: Any, store: Any, how: str, steps: int, epochs: int
) -> None:
    write_classes(Path(store.get_train_data_path()), 64, 0)
    write_classes(Path(store.get_val_data_path()), 8, 1)
    model = fit_lightning(
        backend,
        store,
        model=StopsOnRankOne(how),
        validation=0.3,
        batch_size=8,
        epochs=2,
        log_every_n_steps=1,
        # Also in the middle of an epoch.
        trainer_args={"val_check_interval": 2} if how == "validation" else {},
    )
    assert len(model.getHistory()) == epochs
    assert model.getModel().steps == steps
    assert len({result.weights_digest for result in backend.results}) == 1
