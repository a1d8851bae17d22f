"""A short estimator without a framework, built on the recipe that all estimators share.

It solves the normal equations in NumPy, so the expected line is known beforehand.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import InProcessBackend
from parquet_files import write_columns

from hvd_estimators import Store
from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.framework import Framework
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.fitting.trial import Trial
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.loading.spec import open_data_module
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import number, param
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.spec import EpochMetrics, TrainResult, TrainSpec

pytestmark = [pytest.mark.spark, pytest.mark.once]


@dataclass(frozen=True)
class LeastSquaresSpec(TrainSpec):
    ridge: float


def solve(spec: LeastSquaresSpec) -> TrainResult:
    """Sum up the normal equations over all shards, on every rank, and solve them."""
    gram, moments, rows = np.zeros((2, 2)), np.zeros(2), 0
    with open_data_module(spec.data, 0, 1, epoch=0, epochs=1) as data:
        batches = spec.data.train_steps_per_epoch * spec.data.num_shards
        for columns in itertools.islice(data.train_data(), batches):
            x, y = (columns[name] for name in (*spec.data.feature_cols, *spec.data.label_cols))
            design = np.stack([x, np.ones_like(x)], axis=1)
            gram, moments, rows = gram + design.T @ design, moments + design.T @ y, rows + len(x)
    line = np.linalg.solve(gram + spec.ridge * np.eye(2), moments)
    history = (EpochMetrics(0, {"rows": rows}),)
    rank = int(os.environ.get("HOROVOD_RANK", "0"))
    if spec.run.checkpoints_path is not None and rank == 0:
        with CheckpointWriter(spec.store, spec.run, spec.checkpoints) as writer:
            state = RunState(1, 0, spec.data.num_shards, history)
            writer.save(state, lambda file: np.savez(file, line=line))
    return TrainResult(line.round(6).tobytes().hex(), line.tobytes(), history)


class Line(HorovodModel):
    """Model that predicts ``slope * x + intercept``; its parameters are an array of both."""

    def _make_predictor(self) -> tuple[bytes, Callable[[bytes], Any]]:
        def load(document: bytes) -> Any:
            slope, intercept = np.frombuffer(document)
            return lambda arrays: [slope * arrays[0] + intercept]

        return self.getOrDefault("model").tobytes(), load

    def _output_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.getOrDefault("output_shapes")]


class LineFramework(Framework):
    name = "line"

    def dry_run(self, columns: Mapping[str, Any]) -> Trial:
        for name in self.settings.needed_columns:
            if columns[name].ndim > 1:
                raise ShapeError(f"feature_cols: {name!r} has shape {columns[name].shape[1:]}.")
        return Trial([()])

    def model_identity(self, trial: Trial) -> dict[str, Any]:
        return {"ridge": self.settings.ridge}

    def make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        return LeastSquaresSpec(**vars(common), ridge=self.settings.ridge)

    @property
    def train(self) -> Any:
        return self.settings.model


class LeastSquares(HorovodEstimator):
    framework_class = LineFramework

    ridge = param("Added to the diagonal.", default=0.0, convert=number(0))

    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> HorovodModel:
        return self.get_model_class()(
            **self._get_model_kwargs(
                model=np.frombuffer(run_results.state),
                history=[epoch.as_dict() for epoch in run_results.history],
                run_id=run_id,
                metadata=metadata,
            )
        )

    def get_model_class(self) -> type[Line]:
        return Line


X = (np.arange(60) * 37 % 101) / 101
Y = 2 * X - 3 + np.cos(np.arange(60))
HELD_OUT = np.arange(60) % 4 == 0


def make_estimator(store: Any, **params: Any) -> LeastSquares:
    defaults = {"backend": InProcessBackend(2), "model": solve, "batch_size": 7, "verbose": 0}
    columns = {"feature_cols": ["an x"], "label_cols": ["y"]}
    return LeastSquares(**{"store": store, **defaults, **columns, **params})


def expected(rows: Any = slice(None), ridge: float = 0.0) -> Any:
    design = np.stack([X[rows], np.ones_like(X[rows])], axis=1)
    padded = np.concatenate([design, np.sqrt(ridge) * np.eye(2)])
    return np.linalg.lstsq(padded, np.concatenate([Y[rows], [0, 0]]), rcond=None)[0]


def make_frame(spark: Any) -> Any:
    rows = zip(X.tolist(), Y.tolist(), HELD_OUT.tolist(), strict=True)
    return spark.createDataFrame(list(rows), ["an x", "y", "held out"])


def write_files(store: Any) -> None:
    for path, rows in (
        (store.get_train_data_path(), ~HELD_OUT),
        (store.get_val_data_path(), HELD_OUT),
    ):
        write_columns(path, {"an x": X[rows], "y": Y[rows]}, row_group_size=10)


def test_a_frame_is_fitted_and_transformed(spark: Any, store: Any) -> None:
    frame = make_frame(spark)
    model = make_estimator(store, validation="held out", ridge=0.5).fit(frame)

    assert type(model) is Line
    np.testing.assert_allclose(model.getModel(), expected(~HELD_OUT, ridge=0.5), rtol=1e-9)
    assert model.getHistory() == [{"epoch": 0, "train": {"rows": 45}}]
    assert model.history_frame().values.tolist() == [[0, "train", "rows", 45.0]]
    assert model.getRunId().startswith("line_")
    assert set(model._get_metadata()) == {"an x", "y"}
    predicted = model.transform(frame).select("y__output").toPandas()["y__output"]
    slope, intercept = model.getModel()
    np.testing.assert_allclose(predicted, slope * X + intercept, rtol=1e-12)


def test_ranks_fit_files_without_spark(store: Any) -> None:
    write_files(store)

    model = make_estimator(store, backend=LocalBackend(2)).fit_on_parquet()

    np.testing.assert_allclose(model.getModel(), expected(~HELD_OUT), rtol=1e-9)
    assert model.getOrDefault("output_shapes") == [[]]


class NotingFramework(LineFramework):
    """Record the calls of its methods."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in METHODS:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            CALLED.append(name)
            return value(*args, **kwargs)

        return call


class Noting(LeastSquares):
    framework_class = NotingFramework


CALLED: list[str] = []
METHODS = (
    *("check", "dry_run", "without_dry_run", "check_trial"),
    *("model_identity", "min_batch_rows", "make_spec"),
)


@pytest.mark.parametrize("dry_run", [True, False])
def test_methods_are_called_in_the_order_of_their_contracts(store: Any, dry_run: bool) -> None:
    write_files(store)
    CALLED.clear()
    params = make_estimator(store, dry_run=dry_run)
    estimator = Noting(**{param.name: value for param, value in params._paramMap.items()})

    model = estimator.fit_on_parquet()

    left_out = "without_dry_run" if dry_run else "dry_run"
    assert [name for name in METHODS if name != left_out] == CALLED
    assert model.isSet("output_shapes") == dry_run


def test_a_run_resumes_only_with_the_same_model(store: Any) -> None:
    write_files(store)
    make_estimator(store, run_id="mine").fit_on_parquet()

    make_estimator(store, run_id="mine", epochs=3).fit_on_parquet()
    with pytest.raises(ParamError, match=r"run_id: .* model: ridge 0\.0 \(now 1\.0\)"):
        make_estimator(store, run_id="mine", ridge=1.0).fit_on_parquet()


def test_fit_on_parquet_uses_the_store_it_is_given(tmp_path: Path) -> None:
    """Pass params to fit_on_parquet, where they override the estimator's."""
    empty, full = Store.create(str(tmp_path / "a")), Store.create(str(tmp_path / "b"))
    write_files(full)
    estimator = make_estimator(empty)

    model = estimator.fit_on_parquet({estimator.store: full, estimator.ridge: 2.0})

    np.testing.assert_allclose(model.getModel(), expected(~HELD_OUT, ridge=2.0), rtol=1e-9)
