# Generated from the declarations of params by tests/helpers/signature_stubs.py.
# Frameworks narrow params of the base classes.
# mypy: disable-error-code="override"
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, overload

import keras
from pyspark.ml._typing import ParamMap
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType
from typing_extensions import Self

from hvd_estimators.fitting.stores import Paths
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.params import KerasParams
from hvd_estimators.loggers import Logger
from hvd_estimators.model import HorovodModel
from hvd_estimators.store import Store

class KerasEstimatorSignatures(KerasParams, metaclass=ABCMeta):
    def __init__(
        self,
        *,
        predictionCol: str | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
        outputs_are: Literal[
            "logits",
            "probabilities",
            "log_probabilities",
            "multilabel_logits",
            "multilabel_probabilities",
            "values",
        ]
        | None = None,
        outputs: int | str | Iterable[int | str] | None = None,
        inference_batch_size: int | None = None,
        inference_precision: Literal["float32", "bfloat16", "float16"] | None = "float32",
        handleInvalid: Literal["keep", "skip", "error"] | None = "keep",
        validation: float | str | DataFrame | None = None,
        shuffle_on_write: bool | None = True,
        partitions_per_process: int | None = 10,
        compress_sparse_cols: bool | None = False,
        check_finite: bool | None = False,
        transformation_fn: Callable[..., Any] | None = None,
        transformation_batch_fn: Callable[..., Any] | None = None,
        transformation_edit_fields: Sequence[Any] | None = None,
        transformation_removed_fields: str | Iterable[str] | None = None,
        apply_transformation: bool | None = False,
        shuffle_buffer_size: int | None = None,
        shuffle: bool | None = True,
        train_reader_num_workers: int | None = 2,
        val_reader_num_workers: int | None = 2,
        reader_pool_type: Literal["thread", "dummy"] | None = "thread",
        inmemory_cache_all: bool | None = False,
        cache_type: Literal["null", "local-disk"] | None = "null",
        cache_location: str | None = None,
        cache_size_limit: int | None = 10737418240,
        data_module: str | type[Any] | None = None,
        num_proc: int | None = None,
        max_restarts: int | None = 0,
        min_num_proc: int | None = None,
        backend: Any = None,
        resource_profile: ResourceProfile | None = None,
        gpus_per_task: int | None = None,
        cpus_per_task: int | None = None,
        use_gpu: bool | None = True,
        mp_start_method: Literal["fork", "forkserver", "spawn"] | None = None,
        verbose: int | None = 1,
        model: keras.Model | Callable[..., keras.Model] | None = None,
        model_args: Mapping[str, Any] | None = ...,
        optimizer: Any = None,
        learning_rate: float | None = None,
        scale_learning_rate: bool | None = True,
        loss: Any = None,
        loss_weights: float | Sequence[float] | Mapping[str, float] | None = None,
        metrics: Any = ...,
        callbacks: Iterable[Any] | None = ...,
        buffer_reduction: Mapping[str, str] | None = ...,
        gradient_compression: Any = None,
        batch_size: int | None = 32,
        val_batch_size: int | None = None,
        epochs: int | None = 1,
        resume_stopped: bool | None = False,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        backward_passes_per_step: int | None = 1,
        terminate_on_nan: bool | None = False,
        random_seed: int | None = None,
        dry_run: bool | None = True,
        feature_cols: str
        | Iterable[str | Iterable[str] | Mapping[str, Iterable[str]]]
        | None = ...,
        label_cols: str | Iterable[str] | None = ...,
        sample_weight_col: str | None = None,
        featuresCol: str | None = "features",
        labelCol: str | None = "label",
        weightCol: str | None = None,
        label_shapes: Iterable[Iterable[int]] | None = None,
        continuous_cols: str | Iterable[str] | None = None,
        categorical_cols: str | Iterable[str] | None = None,
        checkpoint_every_n_steps: int | None = None,
        keep_checkpoints: int | None = 2,
        checkpoint_monitor: str | None = None,
        checkpoint_mode: Literal["auto", "min", "max"] | None = "auto",
        store: Store | str | PathLike[str] | None = None,
        run_id: str | None = None,
        log_to_mlflow: bool | None = True,
        loggers: Iterable[Logger] | None = ...,
        class_weight: Mapping[int, float] | None = None,
        custom_objects: Mapping[str, Any] | None = ...,
        checkpoint_callback: keras.callbacks.ModelCheckpoint | None = None,
        backend_env: Mapping[str, Any] | None = ...,
        tensorflow_dataset_prefetch_buffer_size: int | None = 0,
    ) -> None: ...
    def setParams(
        self,
        *,
        predictionCol: str | None = ...,
        probabilityCol: str | None = ...,
        rawPredictionCol: str | None = ...,
        outputs_are: Literal[
            "logits",
            "probabilities",
            "log_probabilities",
            "multilabel_logits",
            "multilabel_probabilities",
            "values",
        ]
        | None = ...,
        outputs: int | str | Iterable[int | str] | None = ...,
        inference_batch_size: int | None = ...,
        inference_precision: Literal["float32", "bfloat16", "float16"] | None = ...,
        handleInvalid: Literal["keep", "skip", "error"] | None = ...,
        validation: float | str | DataFrame | None = ...,
        shuffle_on_write: bool | None = ...,
        partitions_per_process: int | None = ...,
        compress_sparse_cols: bool | None = ...,
        check_finite: bool | None = ...,
        transformation_fn: Callable[..., Any] | None = ...,
        transformation_batch_fn: Callable[..., Any] | None = ...,
        transformation_edit_fields: Sequence[Any] | None = ...,
        transformation_removed_fields: str | Iterable[str] | None = ...,
        apply_transformation: bool | None = ...,
        shuffle_buffer_size: int | None = ...,
        shuffle: bool | None = ...,
        train_reader_num_workers: int | None = ...,
        val_reader_num_workers: int | None = ...,
        reader_pool_type: Literal["thread", "dummy"] | None = ...,
        inmemory_cache_all: bool | None = ...,
        cache_type: Literal["null", "local-disk"] | None = ...,
        cache_location: str | None = ...,
        cache_size_limit: int | None = ...,
        data_module: str | type[Any] | None = ...,
        num_proc: int | None = ...,
        max_restarts: int | None = ...,
        min_num_proc: int | None = ...,
        backend: Any = ...,
        resource_profile: ResourceProfile | None = ...,
        gpus_per_task: int | None = ...,
        cpus_per_task: int | None = ...,
        use_gpu: bool | None = ...,
        mp_start_method: Literal["fork", "forkserver", "spawn"] | None = ...,
        verbose: int | None = ...,
        model: keras.Model | Callable[..., keras.Model] | None = ...,
        model_args: Mapping[str, Any] | None = ...,
        optimizer: Any = ...,
        learning_rate: float | None = ...,
        scale_learning_rate: bool | None = ...,
        loss: Any = ...,
        loss_weights: float | Sequence[float] | Mapping[str, float] | None = ...,
        metrics: Any = ...,
        callbacks: Iterable[Any] | None = ...,
        buffer_reduction: Mapping[str, str] | None = ...,
        gradient_compression: Any = ...,
        batch_size: int | None = ...,
        val_batch_size: int | None = ...,
        epochs: int | None = ...,
        resume_stopped: bool | None = ...,
        train_steps_per_epoch: int | None = ...,
        validation_steps_per_epoch: int | None = ...,
        backward_passes_per_step: int | None = ...,
        terminate_on_nan: bool | None = ...,
        random_seed: int | None = ...,
        dry_run: bool | None = ...,
        feature_cols: str
        | Iterable[str | Iterable[str] | Mapping[str, Iterable[str]]]
        | None = ...,
        label_cols: str | Iterable[str] | None = ...,
        sample_weight_col: str | None = ...,
        featuresCol: str | None = ...,
        labelCol: str | None = ...,
        weightCol: str | None = ...,
        label_shapes: Iterable[Iterable[int]] | None = ...,
        continuous_cols: str | Iterable[str] | None = ...,
        categorical_cols: str | Iterable[str] | None = ...,
        checkpoint_every_n_steps: int | None = ...,
        keep_checkpoints: int | None = ...,
        checkpoint_monitor: str | None = ...,
        checkpoint_mode: Literal["auto", "min", "max"] | None = ...,
        store: Store | str | PathLike[str] | None = ...,
        run_id: str | None = ...,
        log_to_mlflow: bool | None = ...,
        loggers: Iterable[Logger] | None = ...,
        class_weight: Mapping[int, float] | None = ...,
        custom_objects: Mapping[str, Any] | None = ...,
        checkpoint_callback: keras.callbacks.ModelCheckpoint | None = ...,
        backend_env: Mapping[str, Any] | None = ...,
        tensorflow_dataset_prefetch_buffer_size: int | None = ...,
    ) -> Self: ...
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
    def getModel(self) -> keras.Model | Callable[..., keras.Model] | None: ...
    def setModel(self, value: keras.Model | Callable[..., keras.Model] | None) -> Self: ...
    def getLossWeights(self) -> list[float] | dict[str, float] | None: ...
    def setLossWeights(
        self, value: float | Sequence[float] | Mapping[str, float] | None
    ) -> Self: ...
    def getLoggers(self) -> list[Logger]: ...
    def setLoggers(self, value: Iterable[Logger] | None) -> Self: ...
    def getClassWeight(self) -> dict[int, float] | None: ...
    def setClassWeight(self, value: Mapping[int, float] | None) -> Self: ...
    def getCustomObjects(self) -> dict[str, Any]: ...
    def setCustomObjects(self, value: Mapping[str, Any] | None) -> Self: ...
    def getCheckpointCallback(self) -> keras.callbacks.ModelCheckpoint | None: ...
    def setCheckpointCallback(self, value: keras.callbacks.ModelCheckpoint | None) -> Self: ...
    def getBackendEnv(self) -> dict[str, str | None]: ...
    def setBackendEnv(self, value: Mapping[str, Any] | None) -> Self: ...
    def getTensorflowDatasetPrefetchBufferSize(self) -> int: ...
    def setTensorflowDatasetPrefetchBufferSize(self, value: int | None) -> Self: ...

class KerasModelSignatures(HorovodModel, metaclass=ABCMeta):
    def __init__(
        self,
        *,
        history: dict[str, list[Any]] | None = None,
        predictionCol: str | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
        outputs_are: Literal[
            "logits",
            "probabilities",
            "log_probabilities",
            "multilabel_logits",
            "multilabel_probabilities",
            "values",
        ]
        | None = None,
        outputs: int | str | Iterable[int | str] | None = None,
        inference_batch_size: int | None = None,
        inference_precision: Literal["float32", "bfloat16", "float16"] | None = "float32",
        handleInvalid: Literal["keep", "skip", "error"] | None = "keep",
        transformation_fn: Callable[..., Any] | None = None,
        transformation_batch_fn: Callable[..., Any] | None = None,
        transformation_edit_fields: Sequence[Any] | None = None,
        transformation_removed_fields: str | Iterable[str] | None = None,
        apply_transformation: bool | None = False,
        model: keras.Model | None = None,
        run_id: str | None = None,
        feature_columns: str
        | Iterable[str | Iterable[str] | Mapping[str, Iterable[str]]]
        | None = None,
        label_columns: str | Iterable[str] | None = None,
        outputCols: str | Iterable[str] | None = None,
        output_shapes: Sequence[Sequence[int | None]] | None = None,
        sample_weight_col: str | None = None,
        output_types: str
        | DataType
        | type[DataType]
        | Sequence[str | DataType | type[DataType] | None]
        | None = None,
        custom_objects: dict[str, Any] | None = ...,
        label_shapes: Iterable[Iterable[int]] | None = None,
    ) -> None: ...
    def setParams(
        self,
        *,
        history: dict[str, list[Any]] | None = ...,
        predictionCol: str | None = ...,
        probabilityCol: str | None = ...,
        rawPredictionCol: str | None = ...,
        outputs_are: Literal[
            "logits",
            "probabilities",
            "log_probabilities",
            "multilabel_logits",
            "multilabel_probabilities",
            "values",
        ]
        | None = ...,
        outputs: int | str | Iterable[int | str] | None = ...,
        inference_batch_size: int | None = ...,
        inference_precision: Literal["float32", "bfloat16", "float16"] | None = ...,
        handleInvalid: Literal["keep", "skip", "error"] | None = ...,
        transformation_fn: Callable[..., Any] | None = ...,
        transformation_batch_fn: Callable[..., Any] | None = ...,
        transformation_edit_fields: Sequence[Any] | None = ...,
        transformation_removed_fields: str | Iterable[str] | None = ...,
        apply_transformation: bool | None = ...,
        model: keras.Model | None = ...,
        run_id: str | None = ...,
        feature_columns: str
        | Iterable[str | Iterable[str] | Mapping[str, Iterable[str]]]
        | None = ...,
        label_columns: str | Iterable[str] | None = ...,
        outputCols: str | Iterable[str] | None = ...,
        output_shapes: Sequence[Sequence[int | None]] | None = ...,
        sample_weight_col: str | None = ...,
        output_types: str
        | DataType
        | type[DataType]
        | Sequence[str | DataType | type[DataType] | None]
        | None = ...,
        custom_objects: dict[str, Any] | None = ...,
        label_shapes: Iterable[Iterable[int]] | None = ...,
    ) -> Self: ...
    def getHistory(self) -> dict[str, list[Any]]: ...
    def setHistory(self, value: dict[str, list[Any]] | None) -> Self: ...
    def getModel(self) -> keras.Model: ...
    def setModel(self, value: keras.Model | None) -> Self: ...
    def getCustomObjects(self) -> dict[str, Any]: ...
    def setCustomObjects(self, value: dict[str, Any] | None) -> Self: ...
    def getLabelShapes(self) -> list[list[int]] | None: ...
    def setLabelShapes(self, value: Iterable[Iterable[int]] | None) -> Self: ...
