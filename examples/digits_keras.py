"""Classify images of digits with KerasEstimator and callbacks.

The data are scikit-learn's images of digits, of which a fifth is the test set. ``EarlyStopping``
stops training on all ranks together. ``BestModelCheckpoint`` saves the model of the best epoch,
and Spark's evaluator scores it. Finally, plain Keras loads the saved model.

Run it with ``python examples/digits_keras.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse

import keras
from common import DIGITS, make_parser, read_digits, start_spark
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from hvd_estimators import Store
from hvd_estimators.keras import BestModelCheckpoint, KerasEstimator


def make_network() -> keras.Model:
    """Return a network of images, shape (batch, 8, 8, 1), to probabilities of ten classes."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def with_number(digits: DataFrame) -> DataFrame:
    """Add the column ``number``: the value of a word such as "seven"."""
    pairs = [(F.lit(word), F.lit(number)) for number, word in enumerate(DIGITS)]
    numbers = F.create_map(*[part for pair in pairs for part in pair])
    return digits.withColumn("number", numbers[F.col("digit")])


def run(spark: SparkSession, args: argparse.Namespace) -> float:
    """Train and score; return the accuracy on the test images."""
    train, held_out = with_number(read_digits(spark)).randomSplit([0.8, 0.2], seed=args.seed)
    keras.utils.set_random_seed(args.seed)
    estimator = KerasEstimator(
        num_proc=args.num_proc,
        store=Store.create(str(args.output / "store")),
        model=make_network(),
        optimizer=keras.optimizers.Adam(args.learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        feature_cols=["image"],
        label_cols=["number"],
        outputs_are="probabilities",
        predictionCol="prediction",
        callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=2)],
        checkpoint_callback=BestModelCheckpoint(monitor="val_loss", mode="min"),
        validation=0.1,
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    model = estimator.fit(train)

    history = model.getHistory()
    best = min(range(len(history["val_loss"])), key=history["val_loss"].__getitem__)
    print(f"\nBest of {len(history['val_loss'])} epochs: {best + 1}")
    predictions = model.transform(held_out)
    evaluator = MulticlassClassificationEvaluator(labelCol="number", metricName="accuracy")
    accuracy = evaluator.evaluate(predictions)
    print(f"Accuracy on images held out: {accuracy:.3f}")

    path = args.output / "digits.keras"
    model.getModel().save(path)
    loaded = keras.models.load_model(path)
    print(f"Plain Keras loads {path}: {loaded.count_params():,} parameters")
    return accuracy


if __name__ == "__main__":
    arguments = make_parser(__doc__, "digits_keras", epochs=8).parse_args()
    with start_spark(arguments, "digits_keras") as session:
        run(session, arguments)
