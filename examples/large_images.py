"""Train on large JPEG images in Parquet that are decoded during reading.

The images are parts of scikit-learn's two photographs, a temple in China and a flower. Each has
224 x 224 pixels and is compressed in the bytes column of Parquet files that PyArrow writes. The
ranks decode the images batch by batch (``transformation_batch_fn``) and mirror half of them. They
hold at most one shuffle buffer of images, however many there are. The right-hand part of both
photographs is the test set, which ``transform`` decodes with the same function.

Run it with ``python examples/large_images.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import io
import itertools
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import make_parser, start_spark
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from torch import nn

from hvd_estimators import Store
from hvd_estimators.torch import TorchEstimator

SIZE = 224
SPLIT = 640 - SIZE
"""Columns of pixels to the left of it are for training, and those to the right for testing."""

NAMES = ("flower", "china")


def write_parts(folder: Path, count: int, left: bool, seed: int) -> None:
    """Write the given number of parts of the photographs, from their left or right side."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    random = np.random.default_rng([seed, left])
    photographs = [load_sample_image(f"{name}.jpg") for name in NAMES]
    images, labels = [], []
    for number in range(count):
        label = number % len(NAMES)
        pixels = photographs[label]
        top = random.integers(0, pixels.shape[0] - SIZE + 1)
        start = random.integers(0, SPLIT - SIZE + 1) if left else SPLIT
        part = pixels[top : top + SIZE, start : start + SIZE].astype(float)
        part = (part * random.uniform(0.6, 1.2)).clip(0, 255).astype("uint8")
        file = io.BytesIO()
        Image.fromarray(part).save(file, "JPEG", quality=90)
        images.append(file.getvalue())
        labels.append(label)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table = pa.table(
        {"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int32())}
    )
    # Ranks read whole row groups: with small ones, a batch mixes images from many.
    pq.write_table(table, folder / "part-0.parquet", row_group_size=32)


def decode(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Decode JPEG files to pixels, shape (rows, 3, 112, 112); runs in ranks and Spark's tasks."""
    from PIL import Image

    def pixels(file: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(file))
        image.draft("RGB", (112, 112))  # half of the size, for faster decoding
        return np.asarray(image).transpose(2, 0, 1)

    columns["image"] = np.stack([pixels(file) for file in columns["image"]])
    return columns


class PhotoNet(nn.Module):
    """Convolutions over images of bytes, shape (rows, 3, 112, 112), to scores of the classes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 32)
        self.layers = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(before, after, kernel_size=5, stride=2, padding=2),
                    nn.BatchNorm2d(after),
                    nn.ReLU(),
                )
                for before, after in itertools.pairwise(widths)
            ],
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths[-1], len(NAMES)),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.float() / 127.5 - 1
        if self.training and torch.rand(()) < 0.5:
            x = x.flip(-1)
        return self.layers(x)


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Write, train and predict; return the accuracy on the test parts."""
    folders = {name: args.output / name for name in ("train", "held_out")}
    write_parts(folders["train"], args.images, True, args.seed)
    write_parts(folders["held_out"], args.images // 4, False, args.seed)
    size = sum(path.stat().st_size for path in folders["train"].iterdir())
    print(f"{args.images} images of {SIZE} x {SIZE} in {size / 2**20:.1f} MiB of Parquet")

    torch.manual_seed(args.seed)
    network = PhotoNet()
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(
            str(args.output / "store"),
            train_path=str(folders["train"]),
            val_path=str(folders["held_out"]),
        ),
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=args.learning_rate),
        loss=nn.functional.cross_entropy,
        feature_cols=["image"],
        label_cols=["label"],
        transformation_batch_fn=decode,
        transformation_edit_fields=[("image", "uint8", (3, 112, 112))],
        apply_transformation=True,
        column_dtypes={"image": "uint8", "label": "int64"},
        outputs_are="logits",
        predictionCol="prediction",
        validation=True,  # on the data at val_path
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    model = estimator.fit_on_parquet()

    predictions = model.transform(spark.read.parquet(str(folders["held_out"])))
    evaluator = MulticlassClassificationEvaluator(labelCol="label", metricName="accuracy")
    accuracy = evaluator.evaluate(predictions)
    print(f"\nAccuracy on the right-hand parts: {accuracy:.3f}; by chance it would be 0.5")
    return accuracy


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "large_images", batch_size=16, epochs=3)
    parser.add_argument("--images", type=int, default=400, help="images to train on")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "large_images") as session:
        run(session, arguments)
