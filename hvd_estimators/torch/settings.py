"""Settings of a torch fit: the params and the objects that are made from them.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.rows import ROWS
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.settings import Settings
from hvd_estimators.loading.collate import BoundedCollate, Collate
from hvd_estimators.torch.callbacks import MONITOR, EarlyStopping
from hvd_estimators.torch.loss import kind_of_outputs
from hvd_estimators.torch.metrics import Metrics
from hvd_estimators.torch.objective import Objective
from hvd_estimators.torch.objective_args import losses, make_objective, metric_groups, per_label
from hvd_estimators.torch.sharding import ShardingOptions
from hvd_estimators.torch.tensors import TensorSpec


@dataclass(frozen=True)
class TorchSettings(Settings):
    """The params of `TorchEstimator` and `LightningEstimator` in one fit."""

    makes_layers_on_ranks = False
    """True for a LightningModule with ``configure_model()``."""

    @property
    def is_weighted(self) -> bool:
        """True if rows have weights."""
        return bool(self.sample_weight_col or self.class_weight)

    @property
    def is_joint(self) -> bool:
        """True if one loss takes all outputs."""
        return bool(self.loss_form == "joint")

    @cached_property
    def collate_of_ranks(self) -> BoundedCollate | Collate | None:
        """The maker of the batches that ranks train on, in parts if their size is bounded."""
        if self.collate is None or self.batch_size_fn is None:
            return self.collate
        return BoundedCollate(self.collate, self.batch_size_fn, self.max_batch_size)

    def delivered(self, columns: Columns) -> Any:
        """Return trial rows in the form of the readers, after the rows' sizes are tried, too."""
        if isinstance(self.collate_of_ranks, BoundedCollate):
            rows: Any = columns[ROWS]
            self.collate_of_ranks.sizes(rows)
        return super().delivered(columns)

    @property
    def collectives(self) -> str:
        """The library that reduces tensors; torch.distributed for a model that is sharded."""
        return "torch" if self.sharding != "none" else str(self.values["collectives"])

    @property
    def sharding_options(self) -> ShardingOptions:
        """How the ranks share the parameters."""
        modules = None if self.shard_modules is None else tuple(self.shard_modules)
        return ShardingOptions(
            self.sharding, modules, self.activation_checkpointing, self.precision, self.cpu_offload
        )

    @cached_property
    def column_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of columns from input_shapes and label_shapes.

        Raises
        ------
        ParamError
            If the number of shapes differs from the number of columns.
        """
        given_shapes: dict[str, tuple[int, ...]] = {}
        for param_name, of, columns in (
            ("input_shapes", "feature_cols", self.inputs.names),
            ("label_shapes", "label_cols", self.label_cols),
        ):
            given = self.get(param_name)
            if given is None:
                continue
            if len(given) != len(columns):
                raise ParamError(
                    f"{param_name}: expected one shape per column of {of}, {len(columns)}, found "
                    f"{len(given)}."
                )
            given_shapes.update(zip(columns, map(tuple, given), strict=True))
        return given_shapes

    @cached_property
    def tensor_spec(self) -> TensorSpec:
        """The conversion between columns and tensors."""
        input_shapes, label_shapes = self.input_shapes, self.label_shapes
        return TensorSpec(
            feature_cols=self.inputs.names,
            label_cols=tuple(self.label_cols),
            sample_weight_col=self.sample_weight_col,
            input_shapes=tuple(map(tuple, input_shapes)) if input_shapes else None,
            label_shapes=tuple(map(tuple, label_shapes)) if label_shapes else None,
            dtypes=self.column_dtypes,
            input_form=self.input_form,
            outputs=self.outputs,
            pairs=bool(self.label_cols) and not self.is_joint,
            keeps_dtypes=self.collate_fn is not None,
        )

    def objective(self) -> Objective:
        """Return the training objective: losses and metrics."""
        return replace(
            make_objective(self.get, self.tensor_spec),
            train_minibatch_fn=self.train_minibatch_fn,
            upstream_names=self.upstream_names,
            class_weight=self.class_weight,
        )

    def losses_per_label(self, name: str) -> list[Any]:
        """Return a param's callables, one per label; a single callable serves all labels."""
        return per_label(name, self.get(name), len(self.label_cols))

    def only_loss(self) -> Callable[..., Any] | None:
        """Return the loss of the only label; None for several labels, or an unknown loss."""
        losses = self.losses_in("loss") or ()
        is_single = len(self.label_cols) == len(losses) == 1
        return losses[0] if is_single and not self.is_joint else None

    def kind_of_loss(self, shape: tuple[int | None, ...] | None) -> str | None:
        loss = self.only_loss()
        return None if loss is None else kind_of_outputs(loss, shape)

    def losses_in(self, name: str) -> tuple[Any, ...] | None:
        """Return a param's callables, one per label, or a joint one; None if it is not set."""
        return losses(name, self.get(name), len(self.label_cols), self.is_joint)

    @property
    def metric_names(self) -> list[str] | None:
        names = self.named_metrics().names
        return None if names is None else ["loss", *names]

    @property
    def monitors(self) -> list[tuple[str, str | None]]:
        stopping = [c for c in self.callbacks if isinstance(c, EarlyStopping)]
        return [*super().monitors, *((MONITOR, callback.monitor) for callback in stopping)]

    def metric_groups(self) -> tuple[tuple[Any, ...], ...]:
        """Return metrics as groups; a single metric is a group of one."""
        return metric_groups(self.metrics, len(self.label_cols))

    def named_metrics(self) -> Metrics:
        """Return the metrics by name; empty for a model that logs its own metrics."""
        return Metrics(self.metric_groups(), self.label_cols, self.upstream_names)
