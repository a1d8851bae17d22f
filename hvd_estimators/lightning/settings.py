"""Settings of a Lightning fit: the params and what follows from them. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hvd_estimators.lightning.loaders import is_lightning_data
from hvd_estimators.lightning.package import Flavor, one_flavor
from hvd_estimators.lightning.trainer_args import as_list
from hvd_estimators.torch.settings import TorchSettings


@dataclass(frozen=True)
class LightningSettings(TorchSettings):
    """The params of `LightningEstimator` in one fit."""

    # A LightningModule can ignore any field of a batch.
    needs_all_columns = False

    @property
    def trainer_args(self) -> dict[str, Any]:
        """The user's arguments of Lightning's Trainer."""
        return dict(self.values["trainer_args"] or {})

    @property
    def reads_itself(self) -> bool:
        return is_lightning_data(self.data_module)

    @property
    def metric_names(self) -> list[str] | None:
        return None  # modules and callbacks can log any name

    @property
    def makes_layers_on_ranks(self) -> bool:  # type: ignore[override]
        return bool(
            self.flavor.get("utilities.model_helpers.is_overridden")("configure_model", self.model)
        )

    @cached_property
    def flavor(self) -> Flavor:
        """The Lightning package that the user's objects belong to."""
        return one_flavor(self._objects())

    def _objects(self) -> Iterator[tuple[str, Any]]:
        for name in ("model", "data_module", "callbacks", "logger", "profiler"):
            for given in as_list(self.get(name)):
                yield name, given
        for name, value in self.trainer_args.items():
            for given in as_list(value):
                yield f"trainer_args: {name}", given
