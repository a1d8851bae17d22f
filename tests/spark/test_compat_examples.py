"""Programs like Horovod's own Spark examples: digits with three frameworks, and Rossmann stores.

Only the changes that Keras 3 and Lightning 2 demand have been made. The digits are a LIBSVM
file, and the stores a small generated table.
"""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyspark.sql.types as T
import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder
from pyspark.sql import functions as F
from pyspark.sql.functions import udf

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("compat"), pytest.mark.once]


@pytest.fixture(scope="module")
def digits(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return two classes of real images of 8 x 8, with sparse features and one-hot labels."""
    from sklearn.datasets import dump_svmlight_file, load_digits

    data = load_digits(n_class=2)
    path = tmp_path_factory.mktemp("digits") / "digits.libsvm"
    dump_svmlight_file(data.data / 16, data.target, str(path), zero_based=False)
    df = spark.read.format("libsvm").option("numFeatures", "64").load(str(path))
    encoder = OneHotEncoder(inputCols=["label"], outputCols=["label_vec"], dropLast=False)
    train_df, test_df = encoder.fit(df).transform(df).randomSplit([0.9, 0.1], seed=1)
    return train_df.cache(), test_df.cache()


def accuracy(model: Any, test_df: Any) -> float:
    pred_df = model.transform(test_df)
    argmax = udf(lambda v: float(np.argmax(v)), returnType=T.DoubleType())
    pred_df = pred_df.withColumn("label_pred", argmax(pred_df.label_prob))
    return MulticlassClassificationEvaluator(
        predictionCol="label_pred", labelCol="label", metricName="accuracy"
    ).evaluate(pred_df)


def test_torch(digits: Any, tmp_path: Path) -> None:
    import horovod.spark.torch as hvd
    import torch
    import torch.nn.functional as F
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import Store
    from torch import nn, optim

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, kernel_size=3)
            self.drop = nn.Dropout2d(0.1)
            self.fc = nn.Linear(36, 2)

        def forward(self, features: Any) -> Any:
            x = features.float()
            x = F.relu(F.max_pool2d(self.drop(self.conv(x)), 2))
            return F.log_softmax(self.fc(x.view(-1, 36)), -1)

    torch.manual_seed(1)
    model = Net()
    loss = nn.NLLLoss()
    stdout = io.StringIO()
    torch_estimator = hvd.TorchEstimator(
        backend=SparkBackend(
            num_proc=2, stdout=stdout, stderr=sys.stderr, prefix_output_with_timestamp=True
        ),
        store=Store.create(str(tmp_path)),
        model=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        loss=lambda input, target: loss(input, target.long()),
        input_shapes=[[-1, 1, 8, 8]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=16,
        epochs=3,
        validation=0.1,
        backward_passes_per_step=1,
        verbose=1,
    )
    train_df, test_df = digits
    torch_model = torch_estimator.fit(train_df).setOutputCols(["label_prob"])
    assert accuracy(torch_model, test_df) > 0.9


@pytest.mark.soak
def test_lightning(digits: Any, tmp_path: Path) -> None:
    import horovod.spark.lightning as hvd
    import pytorch_lightning as pl
    import torch.nn.functional as F
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import Store
    from horovod.spark.lightning.estimator import MIN_PL_VERSION
    from packaging.version import Version
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.callbacks.early_stopping import EarlyStopping
    from pytorch_lightning.callbacks.model_checkpoint import ModelCheckpoint
    from torch import nn, optim

    assert Version(pl.__version__) >= Version(MIN_PL_VERSION)

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 2)

        def forward(self, x: Any) -> Any:
            return F.log_softmax(self.fc(x.float().reshape((-1, 64))), -1)

        def configure_optimizers(self) -> Any:
            return optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.nll_loss(self(batch["features"]), batch["label"].long())
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", F.nll_loss(self(batch["features"]), batch["label"].long()))

        # Lightning 2 removed validation_epoch_end(outputs).
        def on_validation_epoch_end(self) -> None:
            self.log("avg_val_loss", self.trainer.callback_metrics["val_loss"])

    class Counting(Callback):
        # Lightning 2 removed on_init_start, on_init_end and on_epoch_end.
        def __init__(self) -> None:
            self.train_epochs = self.validation_epochs = 0

        def on_train_epoch_end(self, trainer: Any, model: Any, unused: Any = None) -> None:
            self.train_epochs += 1

        def on_validation_epoch_end(self, trainer: Any, model: Any, unused: Any = None) -> None:
            self.validation_epochs += 1

        def on_train_end(self, trainer: Any, model: Any) -> None:
            assert 0 < self.train_epochs == self.validation_epochs

    torch_estimator = hvd.TorchEstimator(
        backend=SparkBackend(
            num_proc=2, stdout=io.StringIO(), stderr=sys.stderr, prefix_output_with_timestamp=True
        ),
        store=Store.create(str(tmp_path)),
        model=Net(),
        input_shapes=[[-1, 1, 8, 8]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=16,
        epochs=3,
        validation=0.1,
        verbose=1,
        callbacks=[
            Counting(),
            ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=1, verbose=True),
            EarlyStopping(
                monitor="val_loss", min_delta=0.001, patience=3, verbose=True, mode="min"
            ),
        ],
        profiler="simple",
    )
    train_df, test_df = digits
    torch_model = torch_estimator.fit(train_df).setOutputCols(["label_prob"])
    assert accuracy(torch_model, test_df) > 0.9


@pytest.mark.soak
def test_keras(digits: Any, tmp_path: Path) -> None:
    import horovod.spark.keras as hvd
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import Store
    from tensorflow import keras
    from tensorflow.keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
    from tensorflow.keras.models import Sequential

    keras.utils.set_random_seed(1)
    model = Sequential()
    model.add(Conv2D(4, kernel_size=(3, 3), activation="relu", input_shape=(8, 8, 1)))
    model.add(MaxPooling2D(pool_size=(2, 2)))
    model.add(Dropout(0.25))
    model.add(Flatten())
    model.add(Dense(2, activation="softmax"))
    keras_estimator = hvd.KerasEstimator(
        backend=SparkBackend(
            num_proc=2, stdout=io.StringIO(), stderr=sys.stderr, prefix_output_with_timestamp=True
        ),
        store=Store.create(str(tmp_path)),
        model=model,
        optimizer=keras.optimizers.Adadelta(1.0),
        loss=keras.losses.categorical_crossentropy,
        metrics=["accuracy"],
        feature_cols=["features"],
        label_cols=["label_vec"],
        batch_size=16,
        epochs=6,
        random_seed=1,
        inmemory_cache_all=True,
        verbose=1,
        callbacks=[keras.callbacks.TensorBoard(profile_batch=0)],
    )
    train_df, test_df = digits
    keras_model = keras_estimator.fit(train_df).setOutputCols(["label_prob"])
    assert accuracy(keras_model, test_df) > 0.9


@pytest.mark.soak
def test_rossmann(spark: Any, tmp_path: Path) -> None:
    import horovod.spark.keras as hvd
    import tensorflow as tf
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import Store
    from horovod.tensorflow.keras.callbacks import BestModelCheckpoint
    from tensorflow.keras.layers import (
        BatchNormalization,
        Concatenate,
        Dense,
        Dropout,
        Embedding,
        Flatten,
        Input,
        Reshape,
    )

    categorical_cols, continuous_cols = ["Store", "DayOfWeek", "Promo"], ["trend", "BeforePromo"]
    all_cols = categorical_cols + continuous_cols
    vocab = {"Store": range(5), "DayOfWeek": range(7), "Promo": range(2)}
    train_df = spark.range(240).select(
        (F.col("id") % 5).cast("int").alias("Store"),
        (F.col("id") % 7).cast("int").alias("DayOfWeek"),
        (F.col("id") % 2).cast("int").alias("Promo"),
        (F.col("id") % 11 / 11).cast("float").alias("trend"),
        (-(F.col("id") % 3)).cast("float").alias("BeforePromo"),
        (F.col("id") >= 200).alias("Validation"),
    )
    sales = F.exp(4 + F.col("Store") / 5 + F.col("Promo") * 0.5)
    train_df = train_df.withColumn("Sales", F.log(sales.cast("float")))
    test_df = train_df.filter("Validation").drop("Sales", "Validation")
    max_sales = math.exp(5.5)

    def exp_rmspe(y_true: Any, y_pred: Any) -> Any:
        pct = tf.square((tf.exp(y_true) - tf.exp(y_pred)) / tf.exp(y_true))
        x = tf.reduce_sum(tf.where(y_true > 0.001, pct, tf.zeros_like(pct)))
        y = tf.reduce_sum(tf.where(y_true > 0.001, tf.ones_like(pct), tf.zeros_like(pct)))
        return tf.sqrt(x / y)

    def act_sigmoid_scaled(x: Any) -> Any:
        return tf.nn.sigmoid(x) * tf.math.log(max_sales) * 1.2

    # The seed matters: there are few steps, and some initial weights are worse than others.
    tf.keras.utils.set_random_seed(1)
    inputs = {col: Input(shape=(1,), name=col) for col in all_cols}
    embeddings = [
        Embedding(len(vocab[col]), 4, name="emb_" + col)(inputs[col]) for col in categorical_cols
    ]
    continuous_bn = Concatenate()(
        [Reshape((1, 1), name="reshape_" + col)(inputs[col]) for col in continuous_cols]
    )
    continuous_bn = BatchNormalization()(continuous_bn)
    x = Flatten()(Concatenate()([*embeddings, continuous_bn]))
    x = Dense(16, activation="relu", kernel_regularizer=tf.keras.regularizers.l2(0.00005))(x)
    output = Dense(1, activation=act_sigmoid_scaled)(Dropout(0.1)(x))
    keras_estimator = hvd.KerasEstimator(
        backend=SparkBackend(
            num_proc=2, stdout=io.StringIO(), stderr=sys.stderr, prefix_output_with_timestamp=True
        ),
        store=Store.create(str(tmp_path / "work")),
        model=tf.keras.Model([inputs[f] for f in all_cols], output),
        # Keras 3: lr is learning_rate.
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.01, epsilon=1e-3),
        loss="mae",
        metrics=[exp_rmspe],
        custom_objects={"exp_rmspe": exp_rmspe, "act_sigmoid_scaled": act_sigmoid_scaled},
        feature_cols=all_cols,
        label_cols=["Sales"],
        validation="Validation",
        batch_size=20,
        epochs=4,
        random_seed=1,
        verbose=2,
        checkpoint_callback=BestModelCheckpoint(monitor="val_loss", mode="auto", save_freq="epoch"),
    )
    keras_model = keras_estimator.fit(train_df).setOutputCols(["Sales_output"])
    history = keras_model.getHistory()
    assert min(history["val_exp_rmspe"]) == min(map(float, history["val_exp_rmspe"]))
    assert min(history["val_loss"][1:]) < history["val_loss"][0]

    keras_model.save(str(tmp_path / "checkpoint"))
    pred_df = keras_model.transform(test_df)
    pred_df = pred_df.withColumn("Sales_pred", F.exp(pred_df.Sales_output))
    found = pred_df.select("Store", "Promo", "Sales_pred").toPandas()
    assert len(found) == 40
    assert found["Sales_pred"].between(1, max_sales**1.2).all()
