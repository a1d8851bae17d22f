# Generated from the declarations of params by tests/helpers/signature_stubs.py.
# mypy: disable-error-code="override"
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, Unpack, overload

import keras
from pyspark.ml._typing import ParamMap
from pyspark.sql import Column, DataFrame

from hvd_estimators.fitting.stores import Paths
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.params import KerasParams
from hvd_estimators.loggers import Logger
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
    loggers: Iterable[Logger] | None
    collectives: Literal["auto", "horovod", "torch"] | None
    class_weight: Mapping[int, float] | None
    custom_objects: Mapping[str, Any] | None
    checkpoint_callback: keras.callbacks.ModelCheckpoint | None
    backend_env: Mapping[str, Any] | None
    tensorflow_dataset_prefetch_buffer_size: int | None

class KerasEstimatorSignatures(KerasParams, metaclass=ABCMeta):
    def __init__(self, **params: Unpack[KerasEstimatorKeywords]) -> None: ...
    def setParams(self, **params: Unpack[KerasEstimatorKeywords]) -> Self: ...
    @overload
    def fit(self, dataset: DataFrame, params: ParamMap | None = None) -> KerasModel: ...
    @overload
    def fit(
        self, dataset: DataFrame, params: list[ParamMap] | tuple[ParamMap, ...]
    ) -> list[KerasModel]: ...
    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Mapping[Any, Any]]
    ) -> Iterator[tuple[int, KerasModel]]: ...
    def fit_on_parquet(
        self,
        path: Paths | Mapping[Any, Any] | None = None,
        dataset_idx: str | None = None,
        *,
        validation_path: Paths | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> KerasModel: ...
    def fit_on_table(
        self,
        table: str,
        where: str | Column | None = None,
        *,
        validation_where: str | Column | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> KerasModel: ...

    getLoggers = getCollectives = getClassWeight = getter
    getCustomObjects = getCheckpointCallback = getBackendEnv = getter
    getTensorflowDatasetPrefetchBufferSize = getter
    setLoggers = setCollectives = setClassWeight = setter
    setCustomObjects = setCheckpointCallback = setBackendEnv = setter
    setTensorflowDatasetPrefetchBufferSize = setter

class KerasModelKeywords(HorovodModelKeywords, total=False):
    history: dict[str, list[Any]] | None
    model: keras.Model | None
    custom_objects: dict[str, Any] | None
    label_shapes: Iterable[Iterable[int]] | None

class KerasModelSignatures(HorovodModel, metaclass=ABCMeta):
    def __init__(self, **params: Unpack[KerasModelKeywords]) -> None: ...
    def setParams(self, **params: Unpack[KerasModelKeywords]) -> Self: ...
    def getHistory(self) -> dict[str, list[Any]]: ...
    def getModel(self) -> keras.Model: ...
    def getCustomObjects(self) -> dict[str, Any]: ...
    def getLabelShapes(self) -> list[list[int]] | None: ...
    setCustomObjects = setLabelShapes = setter
