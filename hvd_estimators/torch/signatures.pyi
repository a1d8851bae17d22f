# Generated from the declarations of params by tests/helpers/signature_stubs.py.
# mypy: disable-error-code="override"
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, Unpack

import torch
from numpy.typing import NDArray

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.model import HorovodModel
from hvd_estimators.params.signatures import (
    HorovodEstimatorKeywords,
    HorovodModelKeywords,
    getter,
    setter,
)
from hvd_estimators.torch.model import TorchModel

class TorchEstimatorKeywords(HorovodEstimatorKeywords, total=False):
    model: torch.nn.Module | Callable[..., torch.nn.Module] | None
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None
    loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    loss_weights: float | Sequence[float] | NDArray[Any] | None
    column_dtypes: Mapping[str, str | torch.dtype] | None
    input_shapes: Iterable[Iterable[int]] | None
    input_form: Literal["positional", "keyword", "dict"] | None
    loss_form: Literal["per_label", "joint"] | None
    loss_constructors: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    train_minibatch_fn: Callable[..., Any] | None
    stateful: Iterable[Any] | None
    batch_size_fn: Callable[[dict[str, Any]], float] | None
    max_batch_size: float | None
    gradient_clip_norm: float | None
    gradient_clip_value: float | None
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None
    lr_scheduler_interval: Literal["epoch", "step"] | None
    sharding: Literal["none", "optimizer", "full"] | None
    shard_modules: str | Iterable[str] | None
    activation_checkpointing: bool | None
    cpu_offload: bool | None
    init_weights: str | None
    only_trainable: bool | None
    precision: Literal["32", "bf16", "fp16"] | None

class TorchEstimatorSignatures(HorovodEstimator[TorchModel], metaclass=ABCMeta):
    def __init__(self, **params: Unpack[TorchEstimatorKeywords]) -> None: ...
    def setParams(self, **params: Unpack[TorchEstimatorKeywords]) -> Self: ...

    getColumnDtypes = getInputShapes = getInputForm = getter
    getLossForm = getLossConstructors = getTrainMinibatchFn = getter
    getStateful = getBatchSizeFn = getMaxBatchSize = getter
    getGradientClipNorm = getGradientClipValue = getLrScheduler = getter
    getLrSchedulerInterval = getSharding = getShardModules = getter
    getActivationCheckpointing = getCpuOffload = getInitWeights = getter
    getOnlyTrainable = getPrecision = getter
    setColumnDtypes = setInputShapes = setInputForm = setter
    setLossForm = setLossConstructors = setTrainMinibatchFn = setter
    setStateful = setBatchSizeFn = setMaxBatchSize = setter
    setGradientClipNorm = setGradientClipValue = setLrScheduler = setter
    setLrSchedulerInterval = setSharding = setShardModules = setter
    setActivationCheckpointing = setCpuOffload = setInitWeights = setter
    setOnlyTrainable = setPrecision = setter

class TorchModelKeywords(HorovodModelKeywords, total=False):
    model: torch.nn.Module | None
    history: list[dict[str, Any]] | None
    column_dtypes: Mapping[str, str | torch.dtype] | None
    optimizer: torch.optim.Optimizer | None
    loss: Any
    loss_constructors: Any
    loss_form: Literal["per_label", "joint"] | None
    loss_weights: float | Sequence[float] | NDArray[Any] | None
    metrics: Any
    label_shapes: Iterable[Iterable[int]] | None
    precision: Literal["32", "bf16", "fp16"] | None
    input_shapes: Iterable[Iterable[int]] | None
    input_form: Literal["positional", "keyword", "dict"] | None

class TorchModelSignatures(HorovodModel, metaclass=ABCMeta):
    def __init__(self, **params: Unpack[TorchModelKeywords]) -> None: ...
    def setParams(self, **params: Unpack[TorchModelKeywords]) -> Self: ...
    def getColumnDtypes(self) -> dict[str, str]: ...
    def getOptimizer(self) -> torch.optim.Optimizer | None: ...
    def getLoss(self) -> Any: ...
    def getLossConstructors(self) -> Any: ...
    def getLossForm(self) -> Literal["per_label", "joint"]: ...
    def getLossWeights(self) -> list[float] | None: ...
    def getMetrics(self) -> Any: ...
    def getLabelShapes(self) -> list[list[int]] | None: ...
    def getPrecision(self) -> Literal["32", "bf16", "fp16"]: ...
    def getInputShapes(self) -> list[list[int]] | None: ...
    def getInputForm(self) -> Literal["positional", "keyword", "dict"]: ...
    setColumnDtypes = setOptimizer = setLoss = setter
    setLossConstructors = setLossForm = setLossWeights = setter
    setMetrics = setLabelShapes = setPrecision = setter
    setInputShapes = setInputForm = setter
