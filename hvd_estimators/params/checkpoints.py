"""The params of a run's checkpoints: when they are written, and which are kept.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import DeclaredParams, declare, integer, one_of, text
from hvd_estimators.training.monitoring import check_monitor, mode_of
from hvd_estimators.training.spec import LONG_VALIDATION, CheckpointOptions

__all__ = ["CheckpointParams"]


class CheckpointParams(DeclaredParams):
    """When checkpoints of a run are written, and which of them are kept."""

    checkpoint_every_n_steps = declare(
        "Optimizer steps, counted over the whole run, after which a checkpoint is written within "
        "an epoch, too: a run that is interrupted loses no more than these. They count for "
        "keep_checkpoints as others do. Default: at the end of each epoch only.",
        convert=integer(1),
    )
    keep_checkpoints = declare(
        "How many of a run's newest checkpoints are kept. The best by checkpoint_monitor is kept, "
        "too. If the newest is damaged, a fit goes on from the one before.",
        default=2,
        convert=integer(1),
    )
    checkpoint_monitor = declare(
        "What tells which checkpoint is best: a name of getHistory(), with 'val_' before it for "
        "validation. Default: 'val_loss', or 'loss' without validation.",
        convert=text,
    )
    checkpoint_mode = declare(
        "Whether less ('min') or more ('max') of checkpoint_monitor is better; 'auto' tells by its "
        "name.",
        default="auto",
        convert=one_of("auto", "min", "max"),
    )

    def _checkpoint_options(self, framework: str) -> CheckpointOptions:
        """Return what the ranks are told."""
        get = self.getOrDefault
        return CheckpointOptions(
            framework,
            get("keep_checkpoints"),
            self._monitor(),
            get("checkpoint_mode"),
            get("checkpoint_every_n_steps"),
            long_validation=LONG_VALIDATION,
        )

    def _monitor(self) -> str | None:
        """Return the monitored metric; for subclasses whose metrics have had other names."""
        monitor: str | None = self.getOrDefault("checkpoint_monitor")
        return monitor

    def _check_checkpoints(self) -> None:
        """Make sure that it can be told which of two values of the monitored metric is better."""
        monitor = self._monitor()
        if monitor is not None:
            mode_of(monitor, self.getOrDefault("checkpoint_mode"))

    def _check_monitor(self, names: Sequence[str] | None, has_validation: bool) -> None:
        """Make sure that the monitored metric is measured, as far as that is known.

        Parameters
        ----------
        names : sequence of str or None
            What is measured in training; None where only the ranks know.
        has_validation : bool
            Whether there is validation.

        Raises
        ------
        ParamError
            If it is not measured.
        """
        monitor = self._monitor()
        if monitor is None:
            return
        if monitor.startswith("val_") and not has_validation:
            raise ParamError(
                f"checkpoint_monitor: found {monitor!r}, and there are no rows for validation. Set "
                "validation, or a metric of training."
            )
        if names is not None:
            of_validation = [f"val_{name}" for name in names] if has_validation else []
            check_monitor(monitor, [*names, *of_validation])
