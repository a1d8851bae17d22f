# Generated from the declarations of params by tests/helpers/signature_stubs.py.
# mypy: disable-error-code="override"
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, TypeVar

from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType

from hvd_estimators.loggers import Logger
from hvd_estimators.params.estimator import EstimatorParams
from hvd_estimators.params.model import SharedParams
from hvd_estimators.store import Store

T = TypeVar("T")

def getter(self: object) -> Any: ...
def setter(self: T, value: Any) -> T: ...

class HorovodEstimatorKeywords(TypedDict, total=False):
    transformation_fn: Callable[..., Any] | None
    transformation_batch_fn: Callable[..., Any] | None
    transformation_edit_fields: Sequence[Any] | None
    transformation_removed_fields: str | Iterable[str] | None
    apply_transformation: bool | None
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None
    padding: dict[str, float] | None
    masks: bool | None
    outputs: int | str | Iterable[int | str] | None
    inference_batch_size: int | None
    inference_precision: Literal["float32", "bfloat16", "float16"] | None
    handleInvalid: Literal["keep", "skip", "error"] | None
    predictionCol: str | None
    probabilityCol: str | None
    rawPredictionCol: str | None
    outputs_are: (
        Literal[
            "logits",
            "probabilities",
            "log_probabilities",
            "multilabel_logits",
            "multilabel_probabilities",
            "values",
        ]
        | None
    )
    model_args: Mapping[str, Any] | None
    learning_rate: float | None
    scale_learning_rate: bool | None
    metrics: Any
    callbacks: Iterable[Any] | None
    buffer_reduction: Mapping[str, str] | None
    gradient_compression: Any
    batch_size: int | None
    val_batch_size: int | None
    epochs: int | None
    resume_stopped: bool | None
    train_steps_per_epoch: int | None
    validation_steps_per_epoch: int | None
    backward_passes_per_step: int | None
    terminate_on_nan: bool | None
    random_seed: int | None
    dry_run: bool | None
    class_weight: Mapping[int, float] | None
    feature_cols: str | Iterable[str | Iterable[str] | Mapping[str, Iterable[str]]] | None
    label_cols: str | Iterable[str] | None
    sample_weight_col: str | None
    featuresCol: str | None
    labelCol: str | None
    weightCol: str | None
    label_shapes: Iterable[Iterable[int]] | None
    continuous_cols: str | Iterable[str] | None
    categorical_cols: str | Iterable[str] | None
    num_proc: int | None
    max_restarts: int | None
    preemption_check: Callable[[], Any] | None
    min_num_proc: int | None
    backend: Any
    resource_profile: ResourceProfile | None
    gpus_per_task: int | None
    cpus_per_task: int | None
    use_gpu: bool | None
    mp_start_method: Literal["fork", "forkserver", "spawn"] | None
    verbose: int | None
    collectives: Literal["auto", "horovod", "torch"] | None
    store: Store | str | PathLike[str] | None
    run_id: str | None
    log_to_mlflow: bool | None
    loggers: Iterable[Logger] | None
    checkpoint_every_n_steps: int | None
    keep_checkpoints: int | None
    checkpoint_monitor: str | None
    checkpoint_mode: Literal["auto", "min", "max"] | None
    validation: float | str | DataFrame | None
    shuffle_on_write: bool | None
    partitions_per_process: int | None
    compress_sparse_cols: bool | None
    check_finite: bool | None
    shuffle_buffer_size: int | None
    shuffle: bool | None
    train_reader_num_workers: int | None
    val_reader_num_workers: int | None
    reader_pool_type: Literal["thread", "process", "dummy"] | None
    inmemory_cache_all: bool | None
    local_cache_dir: str | None
    local_cache_size: int | None
    data_module: str | type[Any] | None

class EstimatorSignatures(EstimatorParams, metaclass=ABCMeta):
    getTransformationFn = getTransformationBatchFn = getTransformationEditFields = getter
    getTransformationRemovedFields = getApplyTransformation = getCollateFn = getter
    getPadding = getMasks = getOutputs = getter
    getInferenceBatchSize = getInferencePrecision = getHandleInvalid = getter
    getPredictionCol = getProbabilityCol = getRawPredictionCol = getter
    getOutputsAre = getModel = getModelArgs = getter
    getOptimizer = getLearningRate = getScaleLearningRate = getter
    getLoss = getLossWeights = getMetrics = getter
    getCallbacks = getBufferReduction = getGradientCompression = getter
    getBatchSize = getValBatchSize = getEpochs = getter
    getResumeStopped = getTrainStepsPerEpoch = getValidationStepsPerEpoch = getter
    getBackwardPassesPerStep = getTerminateOnNan = getRandomSeed = getter
    getDryRun = getClassWeight = getFeatureCols = getter
    getLabelCols = getSampleWeightCol = getFeaturesCol = getter
    getLabelCol = getWeightCol = getLabelShapes = getter
    getContinuousCols = getCategoricalCols = getNumProc = getter
    getMaxRestarts = getPreemptionCheck = getMinNumProc = getter
    getBackend = getResourceProfile = getGpusPerTask = getter
    getCpusPerTask = getUseGpu = getMpStartMethod = getter
    getVerbose = getCollectives = getStore = getter
    getRunId = getLogToMlflow = getLoggers = getter
    getCheckpointEveryNSteps = getKeepCheckpoints = getCheckpointMonitor = getter
    getCheckpointMode = getValidation = getShuffleOnWrite = getter
    getPartitionsPerProcess = getCompressSparseCols = getCheckFinite = getter
    getShufflingBufferSize = getShuffleBufferSize = getShuffle = getter
    getTrainReaderNumWorker = getTrainReaderNumWorkers = getValReaderNumWorker = getter
    getValReaderNumWorkers = getReaderPoolType = getInMemoryCacheAll = getter
    getLocalCacheDir = getLocalCacheSize = getDataModule = getter
    setTransformationFn = setTransformationBatchFn = setTransformationEditFields = setter
    setTransformationRemovedFields = setApplyTransformation = setCollateFn = setter
    setPadding = setMasks = setOutputs = setter
    setInferenceBatchSize = setInferencePrecision = setHandleInvalid = setter
    setPredictionCol = setProbabilityCol = setRawPredictionCol = setter
    setOutputsAre = setModel = setModelArgs = setter
    setOptimizer = setLearningRate = setScaleLearningRate = setter
    setLoss = setLossWeights = setMetrics = setter
    setCallbacks = setBufferReduction = setGradientCompression = setter
    setBatchSize = setValBatchSize = setEpochs = setter
    setResumeStopped = setTrainStepsPerEpoch = setValidationStepsPerEpoch = setter
    setBackwardPassesPerStep = setTerminateOnNan = setRandomSeed = setter
    setDryRun = setClassWeight = setFeatureCols = setter
    setLabelCols = setSampleWeightCol = setFeaturesCol = setter
    setLabelCol = setWeightCol = setLabelShapes = setter
    setContinuousCols = setCategoricalCols = setNumProc = setter
    setMaxRestarts = setPreemptionCheck = setMinNumProc = setter
    setBackend = setResourceProfile = setGpusPerTask = setter
    setCpusPerTask = setUseGpu = setMpStartMethod = setter
    setVerbose = setCollectives = setStore = setter
    setRunId = setLogToMlflow = setLoggers = setter
    setCheckpointEveryNSteps = setKeepCheckpoints = setCheckpointMonitor = setter
    setCheckpointMode = setValidation = setShuffleOnWrite = setter
    setPartitionsPerProcess = setCompressSparseCols = setCheckFinite = setter
    setShufflingBufferSize = setShuffleBufferSize = setShuffle = setter
    setTrainReaderNumWorker = setTrainReaderNumWorkers = setValReaderNumWorker = setter
    setValReaderNumWorkers = setReaderPoolType = setInMemoryCacheAll = setter
    setLocalCacheDir = setLocalCacheSize = setDataModule = setter

class HorovodModelKeywords(TypedDict, total=False):
    transformation_fn: Callable[..., Any] | None
    transformation_batch_fn: Callable[..., Any] | None
    transformation_edit_fields: Sequence[Any] | None
    transformation_removed_fields: str | Iterable[str] | None
    apply_transformation: bool | None
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None
    padding: dict[str, float] | None
    masks: bool | None
    outputs: int | str | Iterable[int | str] | None
    inference_batch_size: int | None
    inference_precision: Literal["float32", "bfloat16", "float16"] | None
    handleInvalid: Literal["keep", "skip", "error"] | None
    predictionCol: str | None
    probabilityCol: str | None
    rawPredictionCol: str | None
    outputs_are: (
        Literal[
            "logits",
            "probabilities",
            "log_probabilities",
            "multilabel_logits",
            "multilabel_probabilities",
            "values",
        ]
        | None
    )
    run_id: str | None
    feature_columns: str | Iterable[str | Iterable[str] | Mapping[str, Iterable[str]]] | None
    label_columns: str | Iterable[str] | None
    outputCols: str | Iterable[str] | None
    output_shapes: Sequence[Sequence[int | None]] | None
    sample_weight_col: str | None
    output_types: (
        str | DataType | type[DataType] | Sequence[str | DataType | type[DataType] | None] | None
    )

class ModelSignatures(SharedParams, metaclass=ABCMeta):
    def getTransformationFn(self) -> Callable[..., Any] | None: ...
    def getTransformationBatchFn(self) -> Callable[..., Any] | None: ...
    def getTransformationEditFields(self) -> Sequence[Any] | None: ...
    def getTransformationRemovedFields(self) -> list[str] | None: ...
    def getApplyTransformation(self) -> bool: ...
    def getCollateFn(self) -> Callable[[list[dict[str, Any]]], Any] | None: ...
    def getPadding(self) -> dict[str, float] | None: ...
    def getMasks(self) -> bool: ...
    def getOutputs(self) -> list[int | str] | None: ...
    def getInferenceBatchSize(self) -> int | None: ...
    def getInferencePrecision(self) -> Literal["float32", "bfloat16", "float16"]: ...
    def getHandleInvalid(self) -> Literal["keep", "skip", "error"]: ...
    def getPredictionCol(self) -> str | None: ...
    def getProbabilityCol(self) -> str | None: ...
    def getRawPredictionCol(self) -> str | None: ...
    def getOutputsAre(
        self,
    ) -> (
        Literal[
            "logits",
            "probabilities",
            "log_probabilities",
            "multilabel_logits",
            "multilabel_probabilities",
            "values",
        ]
        | None
    ): ...
    def getModel(self) -> Any: ...
    def getHistory(self) -> list[dict[str, Any]]: ...
    def getRunId(self) -> str: ...
    def getFeatureColumns(self) -> list[str | list[str] | dict[str, list[str]]]: ...
    def getLabelColumns(self) -> list[str]: ...
    def getLabelColoumns(self) -> list[str]: ...
    def getOutputShapes(self) -> Sequence[Sequence[int | None]] | None: ...
    def getSampleWeightCol(self) -> str | None: ...
    def getOutputTypes(self) -> list[str | None] | None: ...
    setTransformationFn = setTransformationBatchFn = setTransformationEditFields = setter
    setTransformationRemovedFields = setApplyTransformation = setCollateFn = setter
    setPadding = setMasks = setInferenceBatchSize = setter
    setInferencePrecision = setHandleInvalid = setPredictionCol = setter
    setProbabilityCol = setRawPredictionCol = setOutputsAre = setter
    setModel = setHistory = setRunId = setter
    setFeatureColumns = setLabelColumns = setLabelColoumns = setter
    setOutputCols = setOutputShapes = setSampleWeightCol = setter
    setOutputTypes = setter
