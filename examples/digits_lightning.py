"""Classify images of digits with LightningEstimator and Lightning's own callbacks.

The data are scikit-learn's images of digits, of which a fifth is the test set. The module's steps
get a dict of column name to tensor. Its logged values are averaged over the ranks, and early
stopping and the learning rate scheduler use them.

Run it with ``python examples/digits_lightning.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from common import make_parser, read_digits, start_spark
from lightning.pytorch.callbacks import EarlyStopping
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer
from pyspark.sql import SparkSession
from torch import nn

from hvd_estimators import Store
from hvd_estimators.lightning import LightningEstimator


class DigitNet(lightning.LightningModule):
    """A network of images, shape (batch, 64), to scores of ten classes."""

    def __init__(self, learning_rate: float, epochs: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch["image"]), batch["digit_index"].long())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        scores, digit = self(batch["image"]), batch["digit_index"].long()
        self.log("val_loss", nn.functional.cross_entropy(scores, digit))
        self.log("val_accuracy", (scores.argmax(1) == digit).float().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["epochs"])
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train and score; return the accuracy on the test images."""
    indexer = StringIndexer(inputCol="digit", outputCol="digit_index")
    digits = read_digits(spark)
    train, held_out = indexer.fit(digits).transform(digits).randomSplit([0.8, 0.2], seed=args.seed)
    torch.manual_seed(args.seed)
    estimator = LightningEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=DigitNet(args.learning_rate, args.epochs),
        feature_cols=["image"],
        label_cols=["digit_index"],
        outputs_are="logits",
        predictionCol="prediction",
        callbacks=[EarlyStopping("val_loss", patience=3)],
        trainer_args={"gradient_clip_val": 1.0},
        validation=0.1,
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    model = estimator.fit(train)

    print("\nEpoch by epoch:")
    print(model.history_frame().pivot(index="epoch", columns=["stage", "name"], values="value"))
    evaluator = MulticlassClassificationEvaluator(labelCol="digit_index", metricName="accuracy")
    accuracy = evaluator.evaluate(model.transform(held_out))
    print(f"Accuracy on images held out: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    arguments = make_parser(__doc__, "digits_lightning", epochs=8).parse_args()
    with start_spark(arguments, "digits_lightning") as session:
        run(session, arguments)
