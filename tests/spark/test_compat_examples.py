"""A program like Horovod's own Spark example of digits."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyspark.sql.types as T
import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder
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
