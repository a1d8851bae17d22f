"""Params of the torch estimators, and objects built from them. Runs on the driver."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Self

import torch

from hvd_estimators._util.documents import to_python
from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.fitting.hooks import build, is_function
from hvd_estimators.fitting.trial import Trial, check_sendable
from hvd_estimators.params import functions, narrowed, number, objects, one_of, param, shapes
from hvd_estimators.params.estimator import ClassWeightParams, CollectivesParams, LoggerParams
from hvd_estimators.torch.callbacks import check_callback
from hvd_estimators.torch.dry_run import check_initialized, check_modes
from hvd_estimators.torch.loss import (
    Loss,
    check_reduced,
    check_weightable,
    ignored_class,
    kind_of_outputs,
    takes_class_indices,
)
from hvd_estimators.torch.metrics import Metrics
from hvd_estimators.torch.model import TorchFiles
from hvd_estimators.torch.objective import LOSS_FORMS, JointLoss, Objective, check_joint
from hvd_estimators.torch.objective_args import (
    loss_weights,
    losses,
    make_objective,
    metric_groups,
    per_label,
)
from hvd_estimators.torch.optimizer_step import (
    INTERVALS,
    PRECISIONS,
    StepOptions,
    check_first_order,
    make_scheduler,
)
from hvd_estimators.torch.serialization import (
    Pickler,
    check_parameters,
    dump_optimizer,
    load_optimizer,
    plain_module,
)
from hvd_estimators.torch.shard_state import reductions_of
from hvd_estimators.torch.stateful import StatefulObjects, has_state, is_loadable
from hvd_estimators.torch.tensors import INPUT_FORMS, TensorSpec

logger = logging.getLogger(__name__)


def _dtypes(name: str, value: Mapping[str, str | torch.dtype]) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name}: expected a dict of column to torch dtype, found {value!r}.")
    converted = {}
    for column, dtype in value.items():
        text = str(dtype).removeprefix("torch.")
        named = getattr(torch, text, None)
        if not isinstance(named, torch.dtype):
            raise ParamError(f"{name}: expected torch dtypes such as 'int64', found {dtype!r}.")
        converted[column] = str(named).removeprefix("torch.")  # "int64" for "long"
    return converted


def _function(
    name: str, value: Callable[[torch.optim.Optimizer], Any]
) -> Callable[[torch.optim.Optimizer], Any]:
    if not callable(value):
        raise ParamError(
            f"{name}: expected a function of the optimizer, such as lambda optimizer: "
            f"StepLR(optimizer, 10), found {value!r}."
        )
    return value


def _stateful(name: str, value: Iterable[Any]) -> list[Any]:
    converted = objects(name, value)
    for entry in converted:
        if not has_state(entry):
            raise ParamError(
                f"{name}: expected objects with state_dict() and load_state_dict(), found "
                f"{entry!r}."
            )
    return converted


class TorchParams(TorchFiles, ClassWeightParams, CollectivesParams, LoggerParams, HorovodEstimator):
    """Params for tensors and for the training of a torch module."""

    model = narrowed(HorovodEstimator, "model", "torch.nn.Module | Callable[..., torch.nn.Module]")
    optimizer = narrowed(
        HorovodEstimator,
        "optimizer",
        "torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]",
    )
    loss = narrowed(HorovodEstimator, "loss", "Callable[..., Any] | Sequence[Callable[..., Any]]")

    input_shapes = param(
        "Shape of each input: the shape of one row, or of a batch with -1 as its first "
        "dimension. Default: the columns' shapes.",
        convert=shapes,
    )
    input_form = param(
        "Form of the model's inputs: 'positional' (one tensor per feature column), 'keyword' "
        "(tensors by column name), or 'dict' (one dict of column name to tensor).",
        default="positional",
        convert=one_of(*INPUT_FORMS),
    )
    loss_form = param(
        "Form of the loss: 'per_label' (loss(output, label), one loss per output and label) or "
        "'joint' (one loss for all). A joint loss takes any of the keywords outputs (the "
        "model's result), labels and inputs (lists of tensors) and sample_weights. It returns "
        "the mean over the rows. label_cols=[] requires 'joint'.",
        default="per_label",
        convert=one_of(*LOSS_FORMS),
    )
    loss_constructors = param(
        "A callable, or one per label, that creates the loss on the rank; replaces loss. It "
        "takes any of the keywords model, optimizer, device, rank, size and spec.",
        convert=functions,
    )
    train_minibatch_fn = param(
        "Function that replaces forward pass, backward pass and step. It takes (model, "
        "optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights, "
        "backward_passes_per_step, batch_idx), or the first of these, and returns (outputs, "
        "loss). When the last backward() before a step returns, gradients are the mean over the "
        "ranks, so you can clip them. Step if (batch_idx + 1) % backward_passes_per_step == 0; "
        "the last batch of an epoch has such a number. List objects whose state it uses, such as "
        "a GradScaler, in stateful.",
        type="Callable[..., Any]",
    )
    stateful = param(
        "Objects with state_dict() and load_state_dict(), such as schedulers, gradient scalers, "
        "averaged weights and further optimizers, that train_minibatch_fn, losses or callbacks "
        "use. Gradients of these optimizers are averaged. Checkpoints "
        "contain their state. On the ranks, the estimator's functions and objects share them, "
        "together with the trained model and optimizer. [] declares that there are none.",
        convert=_stateful,
    )
    column_dtypes = param(
        "Dict of column to torch dtype, such as {'label': 'int64'}. Other columns become float32.",
        default={},
        convert=_dtypes,
    )

    gradient_clip_norm = param(
        "Maximum norm of the averaged gradient of all parameters; larger gradients are scaled.",
        convert=number(0),
    )
    gradient_clip_value = param(
        "Maximum absolute value of each element of the averaged gradient.", convert=number(0)
    )
    lr_scheduler = param(
        "Function that takes the optimizer and returns a scheduler, such as lambda optimizer: "
        "StepLR(optimizer, 10). Checkpoints contain the scheduler's state. ReduceLROnPlateau gets "
        "the validation loss, or the training loss without validation.",
        convert=_function,
    )
    lr_scheduler_interval = param(
        "When the scheduler steps: after each 'epoch' or after each optimizer 'step'.",
        default="epoch",
        convert=one_of(*INTERVALS),
    )
    precision = param(
        "Precision of forward pass and loss in training: '32', 'bf16' or 'fp16' (with a gradient "
        "scaler), by torch.autocast. Parameters are 32-bit floats, and transform() uses these.",
        default="32",
        convert=one_of(*PRECISIONS),
    )

    _model_class = torch.nn.Module

    _run_settings = (
        *HorovodEstimator._run_settings,
        *("input_shapes", "input_form", "column_dtypes"),
        *("loss", "loss_constructors", "train_minibatch_fn"),
    )
    _step_params = tuple(field.name for field in fields(StepOptions))
    _optional_run_settings = (
        *HorovodEstimator._optional_run_settings,
        "loss_form",
        "class_weight",
        *_step_params,
    )

    _sent = (
        *HorovodEstimator._sent,
        *("loss", "loss_constructors", "metrics", "train_minibatch_fn", "stateful", "lr_scheduler"),
    )

    def _with_objects(self) -> Self:
        estimator = super()._with_objects()
        model, optimizer = map(estimator.getOrDefault, ("model", "optimizer"))
        if isinstance(model, torch.nn.Module) and is_function(optimizer):
            built = build("optimizer", optimizer, torch.optim.Optimizer, model.parameters())
            return estimator.copy({"optimizer": built})
        return estimator

    def _told_by_loss(self, shape: tuple[int | None, ...] | None) -> str | None:
        loss = self._loss_of_label()
        return None if loss is None else kind_of_outputs(loss, shape)

    def _with_class_labels(self, numbers: Collection[str]) -> Self:
        given, losses = self.getOrDefault("column_dtypes"), self._functions("loss") or ()
        # A transformation may change the shape of labels, and a user's step their type.
        changed = self._transformation() or self.getOrDefault("train_minibatch_fn")
        if self._is_joint or changed is not None:
            return self
        dtypes = {
            label: "int64"
            for label, loss in zip(self.getOrDefault("label_cols"), losses, strict=False)
            if takes_class_indices(loss) and label in numbers and label not in given
        }
        return self.copy({"column_dtypes": {**given, **dtypes}}) if dtypes else self

    def _tensor_dtype(self, name: str, stored: str, trial: Trial) -> str:
        if name == self.getOrDefault("sample_weight_col"):
            return "float32"
        dtype: str = self.getOrDefault("column_dtypes").get(name, "float32")
        return dtype

    def _dtype_remedy(self, name: str, dtype: str) -> str:
        if name == self.getOrDefault("sample_weight_col"):
            return "Divide the weights by a constant, or cast them to float or double."
        is_label = name in self.getOrDefault("label_cols")
        # Losses of numbers take no integers.
        return f"Set column_dtypes={{{name!r}: {'float64' if is_label else dtype!r}}}."

    def _class_limits(self, trial: Trial) -> Mapping[str, tuple[int, float | None]]:
        get, losses = self.getOrDefault, self._functions("loss") or ()
        if self._is_joint or get("train_minibatch_fn") is not None:
            return {}
        dtypes = get("column_dtypes")
        limits: dict[str, tuple[int, float | None]] = {}
        for label, loss, shape in zip(
            get("label_cols"), losses, trial.output_shapes or (), strict=False
        ):
            is_index = takes_class_indices(loss) and dtypes.get(label, "").startswith("int")
            if is_index and shape and shape[0] is not None:
                limits[label] = shape[0], ignored_class(loss)
        return limits

    def _loss_of_label(self) -> Callable[..., Any] | None:
        """Return the loss of the only label; None for several labels, or an unknown loss."""
        losses = self._functions("loss") or ()
        is_single = len(self.getOrDefault("label_cols")) == len(losses) == 1
        return losses[0] if is_single and not self._is_joint else None

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield

    def _check_params(self) -> None:
        super()._check_params()
        self._check_training()
        self._check_collectives()
        needed, dtypes = self._needed_columns(), self.getOrDefault("column_dtypes")
        unknown = sorted(dtypes.keys() - {*needed})
        if unknown and self._transformation() is None:
            raise ParamError(
                f"column_dtypes: {unknown[0]!r} is not a column that is read. Set one of "
                f"{', '.join(map(repr, needed))}.{did_you_mean(unknown[0], needed)}"
            )

    def _check_collectives(self) -> None:
        """Check that the ranks can use the chosen collectives, and log the choice."""
        super()._check_collectives()
        if self._uses_horovod():
            return
        for name, layer in plain_module(self.getOrDefault("model")).named_modules():
            if type(layer).__module__.startswith("horovod."):
                raise ParamError(
                    f"collectives: expected 'horovod', because the model's layer {name!r} is a "
                    f"{type(layer).__name__} of Horovod, found {self.getOrDefault('collectives')!r}"
                    f", which stands for torch.distributed here. Set collectives='horovod', or "
                    "another layer."
                )

    def _check_sent(self) -> None:
        super()._check_sent()
        model = plain_module(self.getOrDefault("model"))
        if isinstance(model, torch.nn.Module):
            check_parameters(model, None)
        if not isinstance(model, torch.jit.ScriptModule):
            check_sendable("model", model, Pickler)
        optimizer = self.getOrDefault("optimizer")
        if isinstance(optimizer, torch.optim.Optimizer):
            check_sendable("optimizer", optimizer, Pickler)

    def _check_callbacks(self) -> None:
        for callback in self.getOrDefault("callbacks"):
            check_callback(callback)

    def _check_training(self) -> None:
        """Check model, optimizer, loss and metrics together."""
        get = self.getOrDefault
        if not isinstance(get("model"), torch.nn.Module):
            raise ParamError(f"model: expected a torch.nn.Module, found {type(get('model'))}.")
        check_modes(get("model"))
        check_initialized(get("model"))
        if not isinstance(get("optimizer"), torch.optim.Optimizer):
            raise ParamError(
                f"optimizer: expected a torch.optim.Optimizer, found {get('optimizer')!r}."
            )
        if not isinstance(getattr(get("optimizer"), "param_groups", None), list):
            raise ParamError(
                f"optimizer: {type(get('optimizer')).__name__} has no param_groups, in which an "
                "optimizer lists the parameters that it trains. Set the optimizer that it wraps."
            )
        check_first_order(get("optimizer"))
        needed = get("train_minibatch_fn") is None and _needed_of_step(get("optimizer"))
        if needed:
            raise ParamError(
                f"optimizer: {type(get('optimizer')).__name__}.step() needs {needed}, with which "
                "it runs the model repeatedly. Here a step has one forward and one backward pass "
                "per batch. Set another optimizer, or a "
                "train_minibatch_fn that calls optimizer.step(closure)."
            )
        if (
            not get("callbacks")
            and get("train_minibatch_fn") is None
            and _has_scheduler(get("optimizer"))
        ):
            logger.warning(
                "optimizer: it has a learning rate scheduler that nothing steps here, so its "
                "learning rate stays %s. Create the scheduler in a callback's on_train_begin(), or "
                "step it in a train_minibatch_fn, with stateful=[scheduler].",
                ", ".join(str(group.get("lr")) for group in get("optimizer").param_groups),
            )
        check_parameters(get("model"), get("optimizer"))
        if getattr(get("model"), "_compiled_call_impl", None) is not None:
            logger.warning(
                "model: model.compile() has no effect on the ranks, because pickling drops it. Set "
                "model=torch.compile(model) instead."
            )
        reductions_of(plain_module(get("model")), get("buffer_reduction"))
        self._check_losses()
        for loss in self._functions("loss") or ():
            if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
                raise ParamError(
                    f"loss: found the class {loss.__name__}. Set an object of it, "
                    f"{loss.__name__}()."
                )
        self._column_shapes()
        self._metric_groups()
        self._check_step()
        self._check_callbacks()
        step = get("train_minibatch_fn")
        if step is not None and not callable(step):
            raise ParamError(f"train_minibatch_fn: expected a function, found {step!r}.")
        if self._get_store().saving_runs():
            _check_extra_state(plain_module(get("model")))
            self._warn_of_undeclared_state()

    def _column_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of columns from input_shapes and label_shapes.

        Raises
        ------
        ParamError
            If the number of shapes differs from the number of columns.
        """
        get = self.getOrDefault
        given_shapes: dict[str, tuple[int, ...]] = {}
        for param_name, of, columns in (
            ("input_shapes", "feature_cols", self._input_columns().names),
            ("label_shapes", "label_cols", get("label_cols")),
        ):
            given = get(param_name)
            if given is None:
                continue
            if len(given) != len(columns):
                raise ParamError(
                    f"{param_name}: expected one shape per column of {of}, {len(columns)}, found "
                    f"{len(given)}."
                )
            given_shapes.update(zip(columns, map(tuple, given), strict=True))
        return given_shapes

    def _check_step(self) -> None:
        """Check clipping, scheduler, precision and class weights."""
        get = self.getOrDefault
        defaults = self._defaults()
        if get("train_minibatch_fn") is not None:
            for name in (*self._step_params, "class_weight"):
                of_epochs = name == "lr_scheduler" and get("lr_scheduler_interval") == "epoch"
                if get(name) != defaults.get(name) and not of_epochs:
                    raise ParamError(
                        f"{name}: found {get(name)!r} and a train_minibatch_fn, which has its own "
                        f"loss and step. Leave {name} out, and do this in the function."
                    )
        if get("lr_scheduler") is not None:
            module, optimizer = get("model"), get("optimizer")
            copied = load_optimizer(dump_optimizer(optimizer, module), module)
            make_scheduler(get("lr_scheduler"), copied, get("lr_scheduler_interval"))

    def _check_losses(self) -> None:
        """Check the loss, or its constructors, against the labels."""
        get = self.getOrDefault
        loss, constructors, labels = get("loss"), get("loss_constructors"), get("label_cols")
        if loss is not None and constructors is not None:
            raise ParamError("Set either loss or loss_constructors.")
        if loss is None and constructors is None:
            if get("train_minibatch_fn") is None or get("validation") is not None:
                raise ParamError(
                    "Set either loss or loss_constructors. A train_minibatch_fn that computes its "
                    "own loss needs neither, without validation."
                )
            return
        self._check_class_weight(labels)
        if self._is_joint:
            self._check_joint_loss("loss" if constructors is None else "loss_constructors")
            return
        if not labels:
            raise ParamError(
                "label_cols: found [], and loss_form='per_label' compares outputs to labels. Set "
                "loss_form='joint' with a loss that takes outputs (and inputs), or label_cols."
            )
        for name in ("loss", "loss_constructors"):
            if get(name) is not None:
                self._per_label(name)
        chosen = get("outputs")
        if chosen is not None and len(chosen) != len(labels):
            raise ParamError(
                f"outputs: expected one per label, {len(labels)}, found {len(chosen)}: {chosen}. "
                "Set loss_form='joint' for one loss of all outputs."
            )
        if loss is not None and self._is_weighted:
            check_weightable(self._per_label("loss"))
        if loss is not None and get("sample_weight_col") is None:
            check_reduced(self._per_label("loss"))

    def _check_joint_loss(self, name: str) -> None:
        get = self.getOrDefault
        given = functions(name, get(name))
        if len(given) != 1:
            raise ParamError(f"{name}: expected one with loss_form='joint', found {len(given)}.")
        if name == "loss":
            check_joint(given[0], self._is_weighted)
        if get("loss_weights") is not None:
            raise ParamError(
                "loss_weights: a joint loss weights its parts itself. Leave loss_weights out."
            )
        labels, chosen = get("label_cols"), get("outputs")
        if get("metrics") and (not labels or (chosen and len(chosen) != len(labels))):
            raise ParamError(
                "metrics: they compare outputs to labels, one to one, found "
                f"label_cols={labels}, outputs={chosen}. Leave metrics out, or set one output per "
                "label in outputs."
            )

    @property
    def _is_weighted(self) -> bool:
        return bool(self.getOrDefault("sample_weight_col") or self.getOrDefault("class_weight"))

    @property
    def _is_joint(self) -> bool:
        return bool(self.getOrDefault("loss_form") == "joint")

    def _tensor_spec(self) -> TensorSpec:
        get = self.getOrDefault
        input_shapes, label_shapes = get("input_shapes"), get("label_shapes")
        return TensorSpec(
            feature_cols=self._input_columns().names,
            label_cols=tuple(get("label_cols")),
            sample_weight_col=get("sample_weight_col"),
            input_shapes=tuple(map(tuple, input_shapes)) if input_shapes else None,
            label_shapes=tuple(map(tuple, label_shapes)) if label_shapes else None,
            dtypes=get("column_dtypes"),
            input_form=get("input_form"),
            outputs=get("outputs"),
            pairs=bool(get("label_cols")) and not self._is_joint,
        )

    def _objective(self) -> Objective:
        """Return the training objective: losses and metrics."""
        return replace(
            make_objective(self.getOrDefault, self._tensor_spec()),
            train_minibatch_fn=self.getOrDefault("train_minibatch_fn"),
            upstream_names=self._upstream_names,
            class_weight=self.getOrDefault("class_weight"),
        )

    def _loss(self) -> Loss | JointLoss | None:
        """Return the loss; None if the ranks create it."""
        functions = self._functions("loss")
        if functions is None:
            return None
        if self._is_joint:
            return JointLoss(functions[0])
        get = self.getOrDefault
        return Loss(functions, loss_weights(get("loss_weights"), len(get("label_cols"))))

    def _warn_of_undeclared_state(self) -> None:
        """Warn if train_minibatch_fn is set and no object with a state is declared."""
        get = self.getOrDefault
        if get("train_minibatch_fn") is None or get("stateful") is not None:
            return
        given = {name: get(name) for name in ("train_minibatch_fn", "callbacks")}
        declared = StatefulObjects(given, plain_module(get("model")), (get("optimizer"),))
        if not any(declared.items()):
            logger.warning(
                "train_minibatch_fn is set and stateful is not. If the function uses objects with "
                "state, such as a scheduler or a GradScaler, checkpoints do not hold their state, "
                "and a resumed run starts with the state from before training. Set stateful=[...] "
                "to these objects, or stateful=[] if there are none."
            )

    def _per_label(self, name: str) -> list[Any]:
        """Return a param's callables, one per label; a single callable serves all labels."""
        get = self.getOrDefault
        return per_label(name, get(name), len(get("label_cols")))

    def _functions(self, name: str) -> tuple[Any, ...] | None:
        """Return a param's callables, one per label, or a joint one; None if it is not set."""
        get = self.getOrDefault
        return losses(name, get(name), len(get("label_cols")), self._is_joint)

    def _metric_groups(self) -> tuple[tuple[Any, ...], ...]:
        """Return metrics as groups; a single metric is a group of one."""
        return metric_groups(self.getOrDefault("metrics"), len(self.getOrDefault("label_cols")))

    def _named_metrics(self) -> Metrics:
        """Return the metrics by name; empty for a model that logs its own metrics."""
        columns = self.getOrDefault("label_cols")
        return Metrics(self._metric_groups(), columns, self._upstream_names)


def _check_extra_state(model: torch.nn.Module) -> None:
    """Reject a module if a checkpoint could not restore its ``get_extra_state()``."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) and not is_loadable(to_python(value)):
            raise ParamError(
                f"model: {name!r} in its state_dict() is more than tensors and plain values: "
                f"found {value!r:.80}. Loading it from a checkpoint would run code from the file. "
                "Return numbers, strings, tensors, and lists and dicts of them from "
                "get_extra_state()."
            )


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a torch scheduler has replaced the optimizer's ``step``."""
    return "step" in vars(optimizer) and any("initial_lr" in g for g in optimizer.param_groups)


def _needed_of_step(optimizer: torch.optim.Optimizer) -> str:
    """Return the required arguments of an optimizer's ``step``, such as ``closure``."""
    # Inspect the class's step: a scheduler's replacement on the object has no bound self.
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return ", ".join(needed)
