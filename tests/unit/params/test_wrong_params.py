"""Wrong params of all estimators fail early with a typed error that names param and fix."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wrong_calls import Calls, Wrong, cases, check_wrong, plain_module

from hvd_estimators.exceptions import (
    ColumnError,
    DataError,
    HvdEstimatorsError,
    ParamError,
    ShapeError,
    StoreError,
)
from hvd_estimators.loading.readers import DataModule

FRAMEWORKS = ("torch", "keras", "lightning")

pytestmark = pytest.mark.usefixtures("imported")

lock = threading.Lock()


class Count:
    """User-written backend."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def num_processes(self) -> Any:
        return self.ranks

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("ranks were to be started")


def param(error: Any, name: str, remedy: str, **changes: Any) -> tuple[Callable[..., Any], Any]:
    """Return a call with changed params, and the expected error."""
    return (lambda calls, framework: calls.train(framework, **changes)), (error, name, remedy)


def whole(name: str, value: Any, remedy: str = "a whole number") -> Any:
    return param(ParamError, name, f"expected {remedy}, found", **{name: value})


def truth(name: str) -> Any:
    return param(ParamError, name, "expected True or False", **{name: "yes"})


ALL = {
    "store: a number": param(ParamError, "store", r"Set Store\.create", store=7),
    "store: none": param(ParamError, "path", "Pass the path or URL", store=None),
    "model: none": param(ParamError, "model", "Set model", model=None),
    "unknown": param(ParamError, "epoch", "Did you mean 'epochs'", epoch=3),
    "run_id: a path": param(ParamError, "run_id", "expected letters, digits", run_id="../a"),
    "run_id: too long": param(ParamError, "run_id", "expected at most 255 bytes", run_id="é" * 128),
    "num_proc: text": whole("num_proc", "2"),
    "num_proc and backend": param(
        ParamError, "num_proc", "Set num_proc on the backend only", num_proc=2, backend=Count(2)
    ),
    "backend: a number": param(ParamError, "backend", r"expected an object with run\(", backend=5),
    "backend: no ranks": param(
        ParamError, "backend", "expected the number of ranks", backend=Count(0)
    ),
    "gpus_per_task: none": whole("gpus_per_task", 0, "1 or more"),
    "resource_profile: a number": param(
        ParamError, "resource_profile", r"ResourceProfileBuilder\(\)", resource_profile=5
    ),
    "min_num_proc: more than ranks": param(
        ParamError, "min_num_proc", "Set it to 2 or less", min_num_proc=3
    ),
    "checkpoint_monitor: no validation": param(
        ParamError, "checkpoint_monitor", "Set validation", checkpoint_monitor="val_loss"
    ),
    "checkpoint_monitor: less or more": param(
        ParamError, "checkpoint_mode", "Set checkpoint_mode", checkpoint_monitor="fancy"
    ),
    "terminate_on_nan": truth("terminate_on_nan"),
    "buffer_reduction: unknown": param(
        ParamError, "buffer_reduction", "expected one of 'mean', 'max'", buffer_reduction={"m": "x"}
    ),
    "epochs: none": whole("epochs", 0, "1 or more"),
    "learning_rate: NaN": param(
        ParamError, "learning_rate", "expected a finite", learning_rate=float("nan")
    ),
    "shuffle_buffer_size: rows": param(
        ParamError, "shuffle_buffer_size", "Set bytes", shuffle_buffer_size=1000
    ),
    "reader_pool_type": param(
        ParamError, "reader_pool_type", "expected one of 'thread'", reader_pool_type="threads"
    ),
    "data_module: unknown": param(
        ParamError, "data_module", "expected 'petastorm', 'arrow' or a class", data_module="csv"
    ),
    "gradient_compression: a name": param(
        ParamError, "gradient_compression", r"Compression\.fp16", gradient_compression="fp16"
    ),
    "callbacks: a number": param(
        ParamError, "callbacks", r"Wrap a single value: \[5\]", callbacks=5
    ),
    "feature_cols: none": param(ParamError, "feature_cols", "Set feature_cols", feature_cols=[]),
    "feature_cols: twice": param(
        ParamError, "feature_cols", "'x' more than once", feature_cols=["x", "x"]
    ),
    "featuresCol: another": param(ParamError, "featuresCol", "Set one of them", featuresCol="v"),
    "label_cols: missing": param(
        ColumnError, "label_cols", "their columns are x, y", label_cols=["z"]
    ),
    "feature_cols: missing": param(
        ColumnError, "feature_cols", "their columns are x, y", feature_cols=["z"]
    ),
    "sample_weight_col: missing": param(
        ColumnError, "sample_weight_col", "their columns are x, y", sample_weight_col="z"
    ),
    "label_cols: text": param(ColumnError, "label_cols", "StringIndexer", label_cols=["text"]),
    "label_cols: nulls": param(DataError, "label_cols", "fill or drop them", label_cols=["holes"]),
    "continuous_cols: ragged": param(
        DataError, "continuous_cols", "Pad or cut", continuous_cols=["ragged"]
    ),
    "validation: no files": param(StoreError, "validation_path", "Write one there", validation=0.2),
    "transformation_fn: both": param(
        ParamError,
        "transformation_batch_fn",
        "Set one of them",
        transformation_fn=len,
        transformation_batch_fn=len,
    ),
    "transformation_fn: returns nothing": param(
        DataError, "transformation_fn", "Return a dict", transformation_fn=lambda row: None
    ),
    "transformation_fn: closes over a lock": param(
        ParamError, "transformation_fn", "that cannot be sent", transformation_fn=lambda r: lock
    ),
    "transformation_edit_fields: no dtype": param(
        ParamError,
        "transformation_edit_fields",
        "expected entries such as",
        transformation_fn=len,
        transformation_edit_fields=[("x", "flot", ())],
    ),
    "outputs_are": param(
        ParamError, "outputs_are", "expected one of 'logits'", outputs_are="logit"
    ),
}


@pytest.mark.parametrize("row", list(ALL.values()), ids=list(ALL))
def test_wrong_params_fail_before_training(tmp_path: Path, row: Any) -> None:
    call, expected = row
    calls = Calls(tmp_path)
    for framework in FRAMEWORKS:
        wrong: Wrong = (lambda calls, name=framework: call(calls, name), *expected)
        check_wrong(calls, wrong)


SPELLED: dict[str, Any] = {
    # Spark's name: wrong columns, and the start of the message.
    "featuresCol": [("text", "featuresCol: Column 'text'"), ("none", "no column 'none'")],
    "labelCol": [("holes", "labelCol: Column 'holes'"), ("text", "labelCol: Column 'text'")],
    "weightCol": [("v", "weightCol: expected a column of numbers"), ("holes", "weightCol: Col")],
}
OURS = {"featuresCol": "feature_cols", "labelCol": "label_cols", "weightCol": "sample_weight_col"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("spelling", SPELLED)
def test_errors_use_the_spelling_of_the_caller(
    tmp_path: Path, framework: str, spelling: str
) -> None:
    calls, ours = Calls(tmp_path), OURS[spelling]
    for column, told in SPELLED[spelling]:
        estimator = getattr(calls, framework)()
        estimator.clear(estimator.getParam(ours))
        estimator.setParams(**{spelling: column})
        with pytest.raises(HvdEstimatorsError) as raised:
            estimator.fit_on_parquet()
        assert told in str(raised.value)
        assert ours not in str(raised.value)
        with pytest.raises(HvdEstimatorsError) as raised:
            getattr(calls, framework)(
                **{ours: column if "weight" in ours else [column]}
            ).fit_on_parquet()
        assert told.replace(spelling, ours) in str(raised.value)
        assert spelling not in str(raised.value)


def test_errors_have_their_parts_as_attributes(tmp_path: Path) -> None:
    calls = Calls(tmp_path)
    told = []
    for error, changes in (
        (ColumnError, {"label_cols": ["text"]}),
        (DataError, {"label_cols": ["holes"]}),
        (ColumnError, {"feature_cols": [["x", "none"]]}),
        (ColumnError, {"label_cols": None}),
    ):
        with pytest.raises(error) as raised:
            calls.torch(**changes).fit_on_parquet()
        read = pickle.loads(pickle.dumps(raised.value))
        assert (str(read), vars(read)) == (str(raised.value), vars(raised.value))
        assert read.problem in str(read)
        told.append((read.param, read.column, read.default))
    assert told == [
        ("label_cols", "text", None),
        ("label_cols", "holes", None),
        ("feature_cols", "none", None),
        ("label_cols", "label", "label"),
    ]
    assert str(read).startswith("label_cols is not set, and its default is label: The Parquet")
    assert read.remedy == "Set label_cols, or [] to train without labels."


def _in_a_file(calls: Any) -> Any:
    from hvd_estimators import Store

    part = f"{calls.store.get_train_data_path()}/part.parquet"
    return calls.train("torch", store=Store.create(f"{part}/below"))


FIT: dict[str, Wrong] = {
    "fit: a number": (lambda c: c.torch().fit(5), ParamError, "dataset", "createDataFrame"),
    "fit: with a wrong param": (
        lambda c: c.torch().fit(None, {"epochs": 0}),
        ParamError,
        "epochs",
        "1 or more",
    ),
    "dataset_idx": (
        lambda c: c.torch().fit_on_parquet(dataset_idx="none"),
        StoreError,
        "dataset_idx",
        "Call fit_on_parquet inside",
    ),
    "store: in a file": (_in_a_file, StoreError, "prefix_path", "Set a prefix"),
    "store: only in memory": (
        lambda c: c.train("torch", store=_memory()),
        ParamError,
        "store",
        "Set a prefix on storage",
    ),
    "more ranks than rows": (
        lambda c: c.train("torch", backend=Count(9)),
        DataError,
        "num_proc",
        "Set num_proc to 8 or less",
    ),
    "sample_weight_col: several numbers": (
        lambda c: c.train("torch", sample_weight_col="v"),
        ColumnError,
        "sample_weight_col",
        "Set a column with one",
    ),
    "fit_on_parquet: no such path": (
        lambda c: c.torch().fit_on_parquet("/none"),
        StoreError,
        "'/none'",
        "pass the path of one .*prepare_data as dataset_idx",
    ),
    "fit_on_parquet: an index and a path": (
        lambda c: c.torch().fit_on_parquet("/data", "index"),
        ParamError,
        "dataset_idx",
        "Pass the index of a dataset, or the paths",
    ),
    "fit_on_parquet: validation without its path": (
        lambda c: c.torch(validation=0.1).fit_on_parquet("/data"),
        ParamError,
        "validation",
        "as validation_path",
    ),
    "fit_on_parquet: two paths for a user's data module": (
        lambda c: c.torch(data_module=DataModule).fit_on_parquet(["/a", "/b"]),
        ParamError,
        "path",
        "Pass one folder",
    ),
    "optimizer: of another model, as in a grid": (
        lambda c: c.torch(model=_linear()).copy({"model": _linear()}).fit_on_parquet(),
        ParamError,
        "optimizer",
        r"In a grid over model, give each model with its own optimizer",
    ),
    "model: a compiled LightningModule": (
        lambda c: c.lightning(model=_compiled(plain_module())).fit_on_parquet(),
        ParamError,
        "model",
        r"Give the LightningModule itself, and compile its networks in configure_model",
    ),
    "min_num_proc: a loss that needs one batch": (
        lambda c: c.train("keras", loss=_sum(), max_restarts=1, min_num_proc=1),
        ParamError,
        "min_num_proc",
        "Leave min_num_proc out",
    ),
    "min_num_proc: two losses, one of them with ignored classes": (
        lambda c: c.train("keras", max_restarts=1, min_num_proc=1, **_two_losses()),
        ParamError,
        "min_num_proc",
        "several losses, .* need one batch. Leave min_num_proc out",
    ),
    "min_num_proc: a step with two updates": (
        lambda c: c.train("keras", model=_two_updates(), max_restarts=1, min_num_proc=1),
        ParamError,
        "min_num_proc",
        "train_step applies optimizers 2 times. Leave min_num_proc out",
    ),
    "backward_passes_per_step: a step with two updates": (
        lambda c: c.train("keras", model=_two_updates(), backward_passes_per_step=2),
        ParamError,
        "backward_passes_per_step",
        "Set backward_passes_per_step=1",
    ),
    "checkpoint_monitor: unknown to Keras": (
        lambda c: c.train("keras", metrics=["accuracy"], checkpoint_monitor="acc"),
        ParamError,
        "checkpoint_monitor",
        "Set one of 'accuracy', 'loss', or none",
    ),
    "label_shapes": (
        lambda c: c.train("torch", label_shapes=[[3]]),
        ShapeError,
        "label_shapes",
        "cannot be reshaped",
    ),
}


def _linear() -> Any:
    import torch

    return torch.nn.Linear(1, 1)


def _sum() -> Any:
    import keras

    return keras.losses.MeanSquaredError(reduction="sum")


def _two_losses() -> dict[str, Any]:
    import keras

    inputs = keras.Input((1,))
    outputs = [keras.layers.Dense(size)(inputs) for size in (3, 1)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model = keras.Model(inputs, outputs)
    return {"model": model, "loss": [loss, "mse"], "label_cols": ["y", "x"]}


def _two_updates() -> Any:
    import keras

    class Twice(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data) and super().train_step(data)

    return Twice([keras.Input((1,)), keras.layers.Dense(1)])


def _compiled(module: Any) -> Any:
    import torch

    return torch.compile(module)


def _memory() -> Any:
    from hvd_estimators import Store

    return Store.create("memory://wrong-calls")


@cases(FIT)
def test_wrong_fits_fail_at_once(tmp_path: Path, wrong: Wrong) -> None:
    check_wrong(Calls(tmp_path), wrong)
