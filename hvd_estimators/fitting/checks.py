"""Checks of a fit that all frameworks share, before the ranks start. Runs on the driver."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from hvd_estimators.data.exact import check_labels, check_range, limits
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import ColumnError, ParamError, did_you_mean, listed
from hvd_estimators.fitting.framework import Framework
from hvd_estimators.fitting.settings import Settings
from hvd_estimators.fitting.trial import Trial
from hvd_estimators.inference.classification import check_classes, class_scores
from hvd_estimators.launch.backend import Backend
from hvd_estimators.loading.shuffle import SHUFFLE_BUFFER_BYTES
from hvd_estimators.loading.spec import check_data_module, reads_several
from hvd_estimators.training.collectives_choice import choose_collectives
from hvd_estimators.training.spec import check_monitor, mode_of

logger = logging.getLogger(__name__)

_LEAST_BUFFER_BYTES = 2**20

_ONE_VS_REST = "mc2b$"
"""Prefix of the label columns that Spark's ``OneVsRest`` creates."""


def check_params(framework: Framework) -> None:
    """Check all params, and that their values can be sent, without reading files of the store.

    Raises
    ------
    ParamError
        If a required param is not set, or if params contradict each other.
    """
    settings: Settings = framework.settings
    if settings.model is None:
        raise ParamError("model is not set. Set model.")
    if not settings.feature_cols:
        raise ParamError("feature_cols is not set. Set feature_cols.")
    _ = settings.inputs
    labels = len(settings.label_cols)
    store = settings.store
    if settings.run_id is not None:
        store.run_paths(settings.run_id)
    if settings.checkpoint_monitor is not None:
        mode_of(settings.checkpoint_monitor, settings.checkpoint_mode)
    weights = settings.loss_weights
    if isinstance(weights, list) and len(weights) != labels:
        raise ParamError(f"loss_weights: expected one per label, {labels}, found {len(weights)}.")
    check_one_vs_rest(settings)
    if not settings.reads_itself:
        check_data_module(settings.data_module)
        buffer_bytes = settings.shuffle_buffer_size
        if buffer_bytes < _LEAST_BUFFER_BYTES:
            raise ParamError(
                f"shuffle_buffer_size: expected bytes, {_LEAST_BUFFER_BYTES} or more, found "
                f"{buffer_bytes}, which may have been meant as rows. Set bytes, or leave it out "
                f"for {SHUFFLE_BUFFER_BYTES}; shuffle=False turns shuffling off."
            )
    check_collate(settings)
    framework.check()
    # Without labels the number of outputs may not be known yet.
    outputs = len(settings.outputs or ()) or labels or 1
    check_classes(settings.class_columns, settings.kind_of_outputs(None), outputs)
    _ = settings.transformation


def check_collate(settings: Settings) -> None:
    """Check the params for rows of any length together with others."""
    collate_fn, padding = settings.collate_fn, settings.padding
    name = "padding" if collate_fn is None else "collate_fn"
    if settings.masks and padding is None:
        raise ParamError("masks: found True without padding. Set padding, or leave masks out.")
    if settings.collate is None:
        return
    if collate_fn is not None and padding is not None:
        raise ParamError("collate_fn and padding are both set. Pad in the collate_fn.")
    columns = [*settings.inputs.columns, *settings.label_cols]
    for column in padding or ():
        if column not in columns:
            raise ParamError(
                f"padding: {column!r} is no feature or label column. Set one of "
                f"{listed(map(repr, columns))}.{did_you_mean(column, columns)}"
            )
    for other in ("input_shapes", "label_shapes"):
        if settings.get(other) is not None:
            raise ParamError(
                f"{other}: found {settings.get(other)}, and {name} makes tensors whose shapes "
                f"differ by batch. Leave {other} out, and reshape in the model or in a collate_fn."
            )
    if settings.transformation is not None:
        raise ParamError(
            f"{name}: found a transformation_fn or transformation_batch_fn as well, which needs "
            "rows of one length. Transform the rows in a collate_fn."
        )
    module = settings.data_module
    if settings.reads_itself or not reads_several(module):
        raise ParamError(
            f"{name}: the data_module {module.__name__} makes its own batches. Leave {name} out, "
            "or set data_module to 'arrow' or 'petastorm'."
        )


def check_class_weight(settings: Settings) -> None:
    """Check that there is one label if classes have weights."""
    if settings.class_weight and len(settings.label_cols) != 1:
        raise ParamError(
            f"class_weight: expected a single label, found {settings.label_cols}. Set "
            "sample_weight_col, or weights in the losses."
        )


def check_one_vs_rest(settings: Settings) -> None:
    """Check that a classifier in Spark's ``OneVsRest`` returns the scores that it compares.

    Without these scores, `OneVsRest` would fail only after it trained all classes.
    """
    labels = settings.label_cols or [""]
    if labels[0].startswith(_ONE_VS_REST) and not settings.rawPredictionCol:
        raise ParamError(
            "rawPredictionCol: OneVsRest compares the scores that its classifiers put into "
            "this column, found none. Set rawPredictionCol in the classifier to the one of "
            "OneVsRest, 'rawPrediction' by default, and outputs_are to what the model's "
            "output is, 'logits' for example."
        )


def check_collectives(framework: Framework) -> None:
    """Check that the ranks can use the chosen collectives, and log the choice."""
    assert framework.tensor_library is not None
    wanted = framework.settings.collectives
    chosen, reason = choose_collectives(wanted, framework.tensor_library)
    library = "Horovod" if chosen == "horovod" else "torch.distributed"
    logger.info("collectives: the ranks use %s (%s).", library, reason.rstrip("."))


def check_restarts(settings: Settings, backend: Backend) -> None:
    """Check that the ranks can be relaunched with ``min_num_proc`` ranks.

    Raises
    ------
    ParamError
        If ``min_num_proc`` exceeds the initial number of ranks, or if fewer ranks cannot read
        the data.
    """
    least = settings.min_num_proc
    if least is None:
        return
    if not settings.max_restarts:
        logger.warning(
            "min_num_proc has no effect without max_restarts, because no relaunch follows. Set "
            "max_restarts as well."
        )
    num_ranks = backend.num_processes()
    if least > num_ranks:
        raise ParamError(
            f"min_num_proc: expected at most num_proc, the {num_ranks} ranks of the first "
            f"launch, found {least}. Set it to {num_ranks} or less."
        )
    if least < num_ranks and not reads_several(settings.data_module):
        raise ParamError(
            f"min_num_proc: found {least}, and data_module {settings.data_module!r} reads the "
            "shard of one rank only. Leave min_num_proc out, or use a data module of this package."
        )


def check_weights(settings: Settings, manifest: DatasetManifest) -> None:
    """Check that each sample weight is one number, unless a transformation creates them."""
    name = settings.sample_weight_col
    are_numbers = {column.name: column.is_number for column in manifest.columns}
    if settings.transformation is None and not are_numbers.get(name, True):
        raise ColumnError(
            f"expected a column of numbers, found {name!r}, whose rows are "
            "several numbers each. Set a column with one for each row.",
            param="sample_weight_col",
        )


def check_trial(framework: Framework, trial: Trial, manifest: DatasetManifest) -> None:
    """Run the checks that need the trial: columns of classifiers, and ranges of labels."""
    settings = framework.settings
    if shapes := trial.output_shapes:
        kind = settings.kind_of_outputs(shapes[0] if len(shapes) == 1 else None)
        class_scores(settings.class_columns, kind, shapes)
    for label, (count, _) in trial.class_limits.items():
        for number in settings.class_weight or {}:
            if not 0 <= number < count:
                raise ParamError(
                    f"class_weight: found a weight of class {number}; the model's {count} "
                    f"outputs for {label!r} are classes 0 to {count - 1}. Leave it out."
                )
    for column in () if settings.makes_values else manifest.columns:
        if column.range is not None and column.name in trial.class_limits:
            check_labels(column.name, *column.range, *trial.class_limits[column.name])
    framework.check_trial(trial, manifest)


def check_numbers(framework: Framework, trial: Trial, manifest: DatasetManifest) -> None:
    """Check that the model's tensors hold the numbers of the columns without a change.

    Functions of the user may change the numbers, so they are not checked then.
    """
    settings = framework.settings
    if settings.makes_values:
        return
    inputs, columns = settings.inputs, {spec.name: spec for spec in manifest.columns}
    used = {*inputs.names, *settings.needed_columns}
    for spec in inputs.specs(manifest.columns):
        if spec.name not in used:
            continue
        members = [columns[name] for name in inputs.matrices.get(spec.name, (spec.name,))]
        target, remedy = framework.tensor_dtype(spec.name, spec.dtype, trial)
        for member in members:
            is_integer = np.dtype(member.dtype).kind in "iu"
            if member.range is None and is_integer and limits(member.dtype, target):
                logger.warning(
                    "The files do not state the range of column %r, which is read as %s. "
                    "Larger integers than it holds would lose digits.",
                    *(member.name, target),
                )
            # A matrix of integers and floats holds floats.
            for dtype in dict.fromkeys((spec.dtype, target)):
                check_range(member, dtype, spec.dtype, remedy)


def check_monitored(
    settings: Settings, has_validation: bool, tried: Sequence[str] | None = None
) -> None:
    """Check that training measures the monitored metrics, if the metric names are known.

    The params determine the names, or a trial has found them.

    Raises
    ------
    ParamError
        If a metric is not measured.
    """
    names = tried if settings.metric_names is None else settings.metric_names
    validates = has_validation or settings.reads_itself
    for setting, monitor in settings.monitors:
        if monitor is None:
            continue
        if monitor.startswith("val_") and not validates:
            raise ParamError(
                f"{setting}: found {monitor!r}, but the data have no validation rows. "
                "Set validation, or a metric of training."
            )
        if names is not None:
            of_validation = [f"val_{name}" for name in names] if validates else []
            check_monitor(monitor, [*names, *of_validation], setting)
