"""Text classification library on ``horovod.spark.lightning``, for the tests of compat.

Its imports cannot be changed. Like libraries for texts and images, it derives estimator and model
from Horovod's, adds params, transforms rows, predicts row by row, and has a backend. It is
imported once ``horovod.spark`` is an alias of this package.
"""

from __future__ import annotations

import functools
import os
import sys
import zlib
from typing import Any

import cloudpickle
import numpy as np
import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.lightning import TorchEstimator, TorchModel
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.sql.functions import col, udf
from pyspark.sql.types import DoubleType
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import _module_available  # type: ignore[attr-defined]

LENGTH, WORDS = 6, 50

if not _module_available("torch"):
    raise ModuleNotFoundError("torch")


def by_keyword(init: Any) -> Any:
    """Keep a constructor's keywords in ``_kwargs``."""

    @functools.wraps(init)
    def wrapper(self: Any, **kwargs: Any) -> None:
        self._kwargs = kwargs
        init(self, **kwargs)

    return wrapper


class Tokenizer:
    """Map words to numbers by a checksum; pickled by reference to this module."""

    def __call__(self, text: str) -> dict[str, np.ndarray]:
        ids = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.split()][:LENGTH]
        padded = np.array(ids + [0] * (LENGTH - len(ids)), dtype=np.int64)
        return {"input_ids": padded, "attention_mask": (padded > 0).astype(np.int64)}


class TextModule(LightningModule):
    """Mean of embeddings, and a linear layer."""

    def __init__(self, num_classes: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(WORDS, 8)
        self.linear = torch.nn.Linear(8, num_classes)
        self.save_hyperparameters()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weights = attention_mask[..., None].float()
        return self.linear((self.table(input_ids) * weights).sum(-2) / weights.sum(-2))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.learning_rate)

    def _step(self, batch: Any) -> torch.Tensor:
        logits = self(batch["input_ids"], batch["attention_mask"])
        return torch.nn.functional.cross_entropy(logits, batch["labels"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._step(batch))

    def validation_epoch_end(self, outputs: Any) -> None:
        losses = [output["val_loss"] for output in outputs]
        self.log("avg_val_loss", torch.stack(losses).mean() if losses else float("inf"))


class OwnBackend(SparkBackend):
    """Wrap the ranks' function, and mark their environment, by attributes of SparkBackend."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        whole = self._env or os.environ.copy()
        assert "PATH" in whole
        assert self._num_proc == 2
        assert self._kwargs.get("verbose") == 0
        pickled = cloudpickle.dumps(fn)

        def wrapped(pickled: bytes, args: Any, kwargs: Any) -> Any:
            assert os.environ["OF_THE_LIBRARY"] == "1"
            return cloudpickle.loads(pickled)(*args, **kwargs)

        given = {**(env or {}), "OF_THE_LIBRARY": "1"}
        return super().run(wrapped, args=(pickled, args, kwargs or {}), env=given)


class TextColumns(Params):
    """Column names, as params of the estimator and of the model."""

    text_col = Param(Params._dummy(), "text_col", "text", TypeConverters.toString)
    label_col = Param(Params._dummy(), "label_col", "label", TypeConverters.toString)
    prediction_col = Param(Params._dummy(), "prediction_col", "class", TypeConverters.toString)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(text_col="text", label_col="label", prediction_col="prediction")

    def getTextCol(self) -> str:
        return self.getOrDefault(self.text_col)

    def getLabelCol(self) -> str:
        return self.getOrDefault(self.label_col)

    def getPredictionCol(self) -> str:
        return self.getOrDefault(self.prediction_col)

    def setPredictionCol(self, value: str) -> Any:
        return self._set(prediction_col=value)


class TextClassifier(TorchEstimator, TextColumns):
    """Train a `TextModule` on texts."""

    num_classes = Param(Params._dummy(), "num_classes", "number of classes")
    # horovod.spark lacks this param; hvd_estimators has it.
    learning_rate = Param(Params._dummy(), "learning_rate", "learning rate of the optimizer")
    tokenizer = Param(Params._dummy(), "tokenizer", "numbers of words")

    @by_keyword
    def __init__(
        self,
        num_classes: Any = None,
        learning_rate: Any = None,
        text_col: str = "text",
        label_col: str = "label",
        prediction_col: str = "prediction",
        num_proc: Any = None,
        backend: Any = None,
        store: Any = None,
        validation: Any = None,
        batch_size: Any = None,
        epochs: Any = None,
        verbose: int = 1,
        random_seed: Any = None,
        use_gpu: bool = True,
    ) -> None:
        super().__init__()
        self._setDefault(
            num_classes=None,
            learning_rate=None,
            tokenizer=Tokenizer(),
            feature_cols=["text"],
            label_cols=["label"],
            text_col="text",
            label_col="label",
            prediction_col="prediction",
        )
        self._set(**self._kwargs)
        self.setFeatureCols([self.getTextCol()])
        self.setLabelCols([self.getLabelCol()])
        self._set_transformation()
        rate = self.getOrDefault(self.learning_rate)
        self._set(model=TextModule(self.getOrDefault(self.num_classes), rate))

    def _set_transformation(self) -> None:
        text, label = self.getTextCol(), self.getLabelCol()
        tokenizer = self.getOrDefault(self.tokenizer)

        def encode(row: Any) -> dict[str, Any]:
            return {**tokenizer(row[text]), "labels": torch.tensor(row[label], dtype=int)}

        fields = [("input_ids", True), ("attention_mask", True), ("labels", False)]
        self.setTransformationEditFields([(name, int, None, many) for name, many in fields])
        self.setTransformationRemovedFields([text, label])
        self.setTransformationFn(encode)

    def _fit(self, dataset: Any) -> Any:
        return super()._fit(dataset)

    def _get_or_create_backend(self) -> Any:
        if self.getBackend() is not None:
            return self.getBackend()
        return OwnBackend(
            self.getNumProc(),
            stdout=sys.stdout,
            stderr=sys.stderr,
            prefix_output_with_timestamp=True,
            verbose=self.getVerbose(),
        )

    def get_model_class(self) -> Any:
        return TextModel

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any
    ) -> dict[str, Any]:
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "input_shapes": self.getInputShapes(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
            "tokenizer": self.getOrDefault(self.tokenizer),
            "label_col": self.getLabelCol(),
            "text_col": self.getTextCol(),
            "prediction_col": self.getPredictionCol(),
        }


class TextModel(TorchModel, TextColumns):
    """Predict probabilities of texts, and the class."""

    tokenizer = Param(Params._dummy(), "tokenizer", "numbers of words")

    @by_keyword
    def __init__(
        self,
        history: Any = None,
        model: Any = None,
        input_shapes: Any = None,
        optimizer: Any = None,
        run_id: Any = None,
        _metadata: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        tokenizer: Any = None,
        label_col: str = "label",
        text_col: str = "text",
        prediction_col: str = "prediction",
    ) -> None:
        super().__init__()
        self._setDefault(
            optimizer=None,
            loss=None,
            loss_constructors=None,
            input_shapes=None,
            tokenizer=None,
            text_col="text",
            label_col="label",
            prediction_col="prediction",
            feature_columns=["text"],
            label_columns=["label"],
            outputCols=["output"],
        )
        self._set(**self._kwargs)

    def getOptimizer(self) -> None:
        return None

    def get_prediction_fn(self) -> Any:
        text, tokenizer = self.getTextCol(), self.getOrDefault(self.tokenizer)

        def predict(model: Any, row: Any) -> torch.Tensor:
            tokens = {
                name: torch.tensor(value)[None] for name, value in tokenizer(row[text]).items()
            }
            with torch.no_grad():
                return torch.nn.functional.softmax(model(**tokens), dim=-1)

        return predict

    def _transform(self, dataset: Any) -> Any:
        self.setFeatureColumns([self.getTextCol()])
        self.setLabelColoumns([self.getLabelCol()])
        argmax = udf(lambda vector: float(np.argmax(vector)), returnType=DoubleType())
        frame = super()._transform(dataset)
        return frame.withColumn(self.getPredictionCol(), argmax(col(self.getOutputCols()[0])))
