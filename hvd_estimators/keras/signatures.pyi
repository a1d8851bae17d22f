# Generated from the declarations of params by tests/helpers/signature_stubs.py.
# mypy: disable-error-code="override"
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import keras

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.model import HorovodModel
from hvd_estimators.params.signatures import (
    HorovodEstimatorKeywords,
    HorovodModelKeywords,
    getter,
    setter,
)

class KerasEstimatorKeywords(HorovodEstimatorKeywords, total=False):
    model: keras.Model | Callable[..., keras.Model] | None
    optimizer: Any
    loss: Any
    loss_weights: float | Sequence[float] | Mapping[str, float] | None
    custom_objects: Mapping[str, Any] | None
    checkpoint_callback: keras.callbacks.ModelCheckpoint | None
    backend_env: Mapping[str, Any] | None
    tensorflow_dataset_prefetch_buffer_size: int | None

class KerasEstimatorSignatures(HorovodEstimator[KerasModel], metaclass=ABCMeta):
    def __init__(self, **params: Unpack[KerasEstimatorKeywords]) -> None: ...
    def setParams(self, **params: Unpack[KerasEstimatorKeywords]) -> Self: ...

    getCustomObjects = getCheckpointCallback = getBackendEnv = getter
    getTensorflowDatasetPrefetchBufferSize = getter
    setCustomObjects = setCheckpointCallback = setBackendEnv = setter
    setTensorflowDatasetPrefetchBufferSize = setter

class KerasModelKeywords(HorovodModelKeywords, total=False):
    model: keras.Model | None
    history: dict[str, list[Any]] | None
    custom_objects: dict[str, Any] | None

class KerasModelSignatures(HorovodModel, metaclass=ABCMeta):
    def __init__(self, **params: Unpack[KerasModelKeywords]) -> None: ...
    def setParams(self, **params: Unpack[KerasModelKeywords]) -> Self: ...
    def getModel(self) -> keras.Model: ...
    def getHistory(self) -> dict[str, list[Any]]: ...
    def getCustomObjects(self) -> dict[str, Any]: ...
    setCustomObjects = setter
