# Generated from the declarations of params by tests/helpers/signature_stubs.py.
# mypy: disable-error-code="override"
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, Unpack, overload

from pyspark.ml._typing import ParamMap
from pyspark.sql import Column, DataFrame

from hvd_estimators.fitting.stores import Paths
from hvd_estimators.lightning.model import LightningModel
from hvd_estimators.params.signatures import getter, setter
from hvd_estimators.torch.estimator import TorchEstimator
from hvd_estimators.torch.model import TorchModel
from hvd_estimators.torch.signatures import TorchEstimatorKeywords, TorchModelKeywords

class LightningEstimatorKeywords(TorchEstimatorKeywords, total=False):
    num_gpus: int | None
    logger: Any
    log_every_n_steps: int | None
    profiler: Any
    trainer_args: Mapping[str, Any] | None
    loader_num_epochs: int | None
    debug_data_loader: bool | None
    train_async_data_loader_queue_size: Any
    val_async_data_loader_queue_size: Any

class LightningEstimatorSignatures(TorchEstimator, metaclass=ABCMeta):
    def __init__(self, **params: Unpack[LightningEstimatorKeywords]) -> None: ...
    def setParams(self, **params: Unpack[LightningEstimatorKeywords]) -> Self: ...
    @overload
    def fit(self, dataset: DataFrame, params: ParamMap | None = None) -> LightningModel: ...
    @overload
    def fit(
        self, dataset: DataFrame, params: list[ParamMap] | tuple[ParamMap, ...]
    ) -> list[LightningModel]: ...
    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Mapping[Any, Any]]
    ) -> Iterator[tuple[int, LightningModel]]: ...
    def fit_on_parquet(
        self,
        path: Paths | Mapping[Any, Any] | None = None,
        dataset_idx: str | None = None,
        *,
        validation_path: Paths | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> LightningModel: ...
    def fit_on_table(
        self,
        table: str,
        where: str | Column | None = None,
        *,
        validation_where: str | Column | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> LightningModel: ...

    getNumGPUs = getLogger = getLogEveryNSteps = getter
    getProfiler = getTrainerArgs = getLoaderNumEpochs = getter
    getDebugDataLoader = getTrainAsyncDataLoaderQueueSize = getValAsyncDataLoaderQueueSize = getter
    setNumGPUs = setLogger = setLogEveryNSteps = setter
    setProfiler = setTrainerArgs = setLoaderNumEpochs = setter
    setDebugDataLoader = setTrainAsyncDataLoaderQueueSize = setValAsyncDataLoaderQueueSize = setter

class LightningModelKeywords(TorchModelKeywords, total=False):
    use_predict_step: bool | None

class LightningModelSignatures(TorchModel, metaclass=ABCMeta):
    def __init__(self, **params: Unpack[LightningModelKeywords]) -> None: ...
    def setParams(self, **params: Unpack[LightningModelKeywords]) -> Self: ...
    def getUsePredictStep(self) -> bool: ...
    setUsePredictStep = setter
