"""`TorchEstimator`: trains a torch module on a DataFrame."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.params import declare, functions, one_of, shapes
from hvd_estimators.parquet.columns import Columns
from hvd_estimators.parquet.manifest import DatasetManifest
from hvd_estimators.prepare.properties import column_metadata
from hvd_estimators.runs import named
from hvd_estimators.spec import TrainResult
from hvd_estimators.torch.checks import check_fit, check_weightable
from hvd_estimators.torch.model import TorchModel, dump_torch_param, load_torch_params
from hvd_estimators.torch.serialization import (
    dump_module,
    dump_optimizer,
    load_module,
    load_optimizer,
    load_state,
    plain_module,
)
from hvd_estimators.torch.tensors import INPUT_FORMS, Loss, TensorSpec
from hvd_estimators.torch.trainer import TorchTrainSpec, train

__all__ = ["TorchEstimator"]

logger = logging.getLogger(__name__)


def _dtypes(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name}: expected a dict of column to torch dtype, found {value!r}.")
    converted = {}
    for column, dtype in value.items():
        text = str(dtype).removeprefix("torch.")
        if not isinstance(getattr(torch, text, None), torch.dtype):
            raise ParamError(f"{name}: expected torch dtypes such as 'int64', found {dtype!r}.")
        converted[column] = text
    return converted


class TorchEstimator(HorovodEstimator):
    """Trains a torch module on a DataFrame, with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns as Parquet to the store, trains on ``num_proc`` Spark
    tasks, and returns a `TorchModel`. The model is called with one tensor per feature column,
    rows first (a number per row gives shape ``(rows,)``; ``input_form`` gives them by name), and
    returns a tensor, or one per label: in a list or tuple by position, in a dict or dataclass by
    the labels' names. A label is compared in its output's shape where the elements are as many. The
    given module and optimizer are left as they are; a module of ``torch.compile`` is compiled anew
    on the ranks, and `TorchModel.transform` runs it as it is. Runs on the driver.

    An epoch trains on every row once. The learning rate is that of one rank: it is multiplied by
    the number of ranks for training and divided again in what is returned. The gradient of a step
    is that of the mean loss over the rows of all ranks; with ``sample_weight_col`` that is
    ``sum(weight * loss) / rows``, in training and in validation. Metrics are not weighted.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError
        Before training, if params, columns, shapes, rows, store or cluster will not do.
    WorkerFailedError
        If a rank fails.
    """

    _state_reader = "torch.load(path)"

    input_shapes = declare(
        "Shape of each input: of one row, or with -1 for the rows of a batch first. Default: the "
        "columns' shapes.",
        convert=shapes,
    )
    input_form = declare(
        "How the model takes its inputs: 'positional' (one tensor per feature column), 'keyword' "
        "(by the columns' names), or 'dict' (one dict of column name to tensor).",
        default="positional",
        convert=one_of(*INPUT_FORMS),
    )
    loss_constructors = declare(
        "Instead of loss: a callable, or one per label, that makes the loss on the rank. Called "
        "with those of model, optimizer, device, rank, size and spec that it takes.",
        convert=functions,
    )
    train_minibatch_fn = declare(
        "Takes the place of forward pass, backward pass and step: called with (model, optimizer, "
        "transform_outputs, loss_fn, inputs, labels, sample_weights, backward_passes_per_step, "
        "batch_idx), or the first of these; returns (outputs, loss)."
    )
    column_dtypes = declare(
        "Column to torch dtype, such as {'label': 'int64'}. Others become float32.",
        default={},
        convert=_dtypes,
    )

    _run_settings = (
        *HorovodEstimator._run_settings,
        *("input_shapes", "input_form", "column_dtypes"),
        *("loss", "loss_constructors", "train_minibatch_fn"),
    )

    def get_model_class(self) -> type[TorchModel]:
        """Return the class of the model that `fit` returns; for subclasses to override."""
        return TorchModel

    def _check_params(self) -> None:
        super()._check_params()
        self._check_training()

    def _check_training(self) -> None:
        """Check model, optimizer, loss and metrics together."""
        get = self.getOrDefault
        if not isinstance(get("model"), torch.nn.Module):
            raise ParamError(f"model: expected a torch.nn.Module, found {type(get('model'))}.")
        if not isinstance(get("optimizer"), torch.optim.Optimizer):
            raise ParamError(
                f"optimizer: expected a torch.optim.Optimizer, found {get('optimizer')!r}."
            )
        dump_optimizer(get("optimizer"), get("model"))
        if getattr(get("model"), "_compiled_call_impl", None) is not None:
            logger.warning(
                "model: what model.compile() did is lost when a module is sent to the ranks, and "
                "they train it without. Give torch.compile(model) instead."
            )
        if (get("loss") is None) == (get("loss_constructors") is None):
            raise ParamError("Set either loss or loss_constructors.")
        for name in ("loss", "loss_constructors"):
            if get(name) is not None:
                self._per_label(name)
        if get("loss") is not None and get("sample_weight_col"):
            check_weightable(self._per_label("loss"))
        for name, columns in (("input_shapes", "feature_cols"), ("label_shapes", "label_cols")):
            given = get(name)
            if given is not None and len(given) != len(get(columns)):
                raise ParamError(
                    f"{name}: expected one shape per column of {columns}, {len(get(columns))}, "
                    f"found {len(given)}."
                )
        self._metric_groups()

    def _train(self, manifest: DatasetManifest, backend: Backend, trial: Any = None) -> TorchModel:
        get = self.getOrDefault
        module = get("model")
        data = self._data_spec(manifest, backend.num_processes())
        output_shapes = self._tried(manifest, trial)
        if output_shapes:
            self._class_scores(output_shapes)
        self._check_steps(data)
        loss, constructors = get("loss"), get("loss_constructors")
        labels = len(get("label_cols"))
        spec = TorchTrainSpec(
            **self._common_spec(data, "torch", self._fingerprint(manifest, self._model_identity())),
            module=dump_module(module),
            optimizer=self._dump_optimizer(),
            tensors=self._tensor_spec(),
            losses=None if loss is None else tuple(self._per_label("loss")),
            loss_constructors=None
            if constructors is None
            else tuple(self._per_label("loss_constructors")),
            loss_weights=tuple(get("loss_weights") or [1.0 / labels] * labels),
            metrics=self._metric_groups(),
            train_minibatch_fn=get("train_minibatch_fn"),
        )
        return self._run(
            backend, train, spec, lambda results: self._create_model(results, spec, output_shapes)
        )

    def _create_model(
        self,
        results: Sequence[TrainResult],
        spec: TorchTrainSpec,
        output_shapes: list[tuple[int, ...]],
    ) -> TorchModel:
        """Make the model from what the ranks returned; for subclasses to override."""
        state = load_state(self._trained_state(results))
        shapes = output_shapes or state["output_shapes"]
        module = load_module(spec.module)
        plain_module(module).load_state_dict(state["model"])
        optimizer = load_optimizer(spec.optimizer, module)
        optimizer.load_state_dict(state["optimizer"])
        return self.get_model_class()(
            **self._get_model_kwargs(
                model=module.eval(),
                optimizer=optimizer,
                history=[record.as_dict() for record in results[0].history],
                run_id=spec.run.run_id,
                _metadata=column_metadata(spec.data.columns),
                output_shapes=None if shapes is None else list(map(list, shapes)),
            )
        )

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        """Return the model's params; for subclasses to override."""
        get = self.getOrDefault
        return {
            "feature_columns": get("feature_cols"),
            "label_columns": get("label_cols"),
            "input_shapes": get("input_shapes"),
            "column_dtypes": get("column_dtypes"),
            "input_form": get("input_form"),
            "loss": get("loss"),
            "loss_constructors": get("loss_constructors"),
            **self._classification(),
            **self._transformation_params(),
            **fitted,
        }

    def _tried(self, manifest: DatasetManifest, trial: Any) -> Any:
        """Return what the dry run found out: before the rows were written, or on them now."""
        if trial is not None or not self.getOrDefault("dry_run"):
            return trial or []
        return self._dry_run(self._first_rows(manifest))

    def _dry_run(self, columns: Columns) -> list[tuple[int, ...]]:
        """Return the shape of one row of each output; nothing where that is left to the ranks."""
        get = self.getOrDefault
        loss = None
        if get("loss") is not None:
            weights = get("loss_weights") or [1.0] * len(get("label_cols"))
            loss = Loss(self._per_label("loss"), weights)
        return check_fit(get("model"), loss, self._tensor_spec(), columns)

    def _check_steps(self, data: DataSpec) -> None:
        """Refuse batches that a model or a training function cannot take."""
        sizes = [
            size
            for rank in range(data.train_plan.num_shards)
            for size in data.train_plan.batch_sizes(rank, data.batch_size)
        ]
        if self.getOrDefault("train_minibatch_fn") is not None and 0 in sizes:
            raise DataError(
                "train_minibatch_fn needs a row on every rank in every step, and there are "
                f"{sum(sizes)} rows for {data.train_plan.num_shards} ranks. Set num_proc or "
                "batch_size so that the rows can be shared out."
            )
        has_batch_norm = any(
            isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
            for layer in self.getOrDefault("model").modules()
        )
        if has_batch_norm and 1 in sizes and self.getOrDefault("train_steps_per_epoch") is None:
            raise DataError(
                "Batch normalization cannot train on a batch of one row, and "
                f"batch_size={data.batch_size} leaves one on some rank ({sum(sizes)} rows, "
                f"{data.train_plan.num_shards} ranks). Set another batch_size."
            )

    def _tensor_spec(self) -> TensorSpec:
        get = self.getOrDefault
        input_shapes, label_shapes = get("input_shapes"), get("label_shapes")
        return TensorSpec(
            feature_cols=tuple(get("feature_cols")),
            label_cols=tuple(get("label_cols")),
            sample_weight_col=get("sample_weight_col"),
            input_shapes=tuple(map(tuple, input_shapes)) if input_shapes else None,
            label_shapes=tuple(map(tuple, label_shapes)) if label_shapes else None,
            dtypes=get("column_dtypes"),
            input_form=get("input_form"),
        )

    def _dump_optimizer(self) -> bytes:
        """Return the optimizer, with the learning rate that is set, as the ranks get it."""
        module, rate = self.getOrDefault("model"), self.getOrDefault("learning_rate")
        document = dump_optimizer(self.getOrDefault("optimizer"), module)
        if rate is None:
            return document
        copied = load_optimizer(document, module)
        for group in copied.param_groups:
            group["lr"] = rate
        return dump_optimizer(copied, module)

    def _model_identity(self) -> dict[str, Any]:
        """Return what tells model and optimizer from others, but for their weights and state."""
        module, optimizer = plain_module(self.getOrDefault("model")), self.getOrDefault("optimizer")
        identity: dict[str, Any] = {
            "class": named(type(module)),
            # Without addresses, as functions among a module's attributes may show them.
            "layers": re.sub(r" at 0x[0-9a-f]+", "", repr(module)),
            "weights": [
                [name, None if is_lazy(value) else list(value.shape), str(value.dtype)]
                for name, value in module.state_dict().items()
                if isinstance(value, torch.Tensor)
            ],
        }
        if optimizer is not None:
            # What takes the place of the optimizer's rate is one of the settings.
            left_out = {"params", "initial_lr"}
            left_out |= {"lr"} if self.getOrDefault("learning_rate") is not None else set()
            identity["optimizer"] = named(type(optimizer))
            identity["options"] = {
                f"group {number}": {
                    key: named(_number(value))
                    for key, value in group.items()
                    if key not in left_out
                }
                for number, group in enumerate(optimizer.param_groups)
            }
        return identity

    def _per_label(self, name: str) -> list[Any]:
        """Return a param that is one callable for all labels, or one per label, as the latter."""
        given = functions(name, self.getOrDefault(name))
        labels = len(self.getOrDefault("label_cols"))
        if len(given) not in (1, labels):
            raise ParamError(f"{name}: expected 1 or one per label, {labels}, found {len(given)}.")
        return given * labels if len(given) == 1 else given

    def _metric_groups(self) -> tuple[tuple[Any, ...], ...]:
        """Return metrics as groups; a function that stands alone is a group of one."""
        labels = len(self.getOrDefault("label_cols"))
        groups = []
        for group in self.getOrDefault("metrics"):
            members = functions("metrics", group)
            if len(members) not in (1, labels):
                raise ParamError(
                    f"metrics: expected groups of 1 or of one per label, {labels}, found a group "
                    f"of {len(members)}."
                )
            groups.append(tuple(members))
        return tuple(groups)

    def _dump_param(self, name: str, value: Any) -> bytes:
        return dump_torch_param(self.getOrDefault("model"), name, value)

    def _load_params(self, documents: dict[str, bytes]) -> dict[str, Any]:
        return load_torch_params(super()._load_params, documents, self.getOrDefault("model"))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
