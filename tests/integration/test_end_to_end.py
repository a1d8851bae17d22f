"""Prepare, fit, checkpoint, kill, resume, transform, save and load, on each kind of store."""

from __future__ import annotations

import importlib.util
import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_runs import (
    FRAMEWORKS,
    epochs_begun,
    killing_ranks,
    make_estimator,
    make_frame,
    predict_alone,
    send_by_value,
    stopping_callback,
)

from hvd_estimators import Store
from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.store.local import DBFSLocalStore

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.once, pytest.mark.slow]

STORES = ("local", "hdfs", "s3", "dbfs")
READERS = ("arrow", "petastorm") if importlib.util.find_spec("petastorm") else ("arrow",)


@pytest.fixture
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Any]:
    """Return a function that makes a store of a kind and a path for saved models in it."""

    def make(kind: str) -> tuple[Any, str]:
        name = uuid.uuid4().hex
        if kind == "hdfs":
            url = f"{request.getfixturevalue('hdfs').url}/{name}"
            return Store.create(url), f"{url}/model"
        if kind == "s3":
            s3 = request.getfixturevalue("s3a")
            url = f"{s3.url}/{name}"
            store = Store.create(url, storage_options=s3.storage_options)
            return store, f"{url}/model".replace("s3://", "s3a://")
        if kind == "dbfs":
            mount = request.getfixturevalue("dbfs_on_spark")
            return DBFSLocalStore(f"dbfs:/{name}", mount=str(mount)), f"dbfs:/{name}/model"
        return Store.create(str(tmp_path / name)), str(tmp_path / name / "model")

    return make


def setup_module() -> None:
    send_by_value()


def check(
    spark: Any, store: Any, saved: str, framework: str, readers: tuple[str, str], folder: Path
) -> None:
    """Run all steps once, and compare with uninterrupted training in one process."""
    frame = make_frame(spark)
    estimator = make_estimator(
        framework,
        store=store,
        num_proc=2,
        run_id="killed",
        callbacks=[stopping_callback(framework, folder)],
    )
    first, second = readers
    with killing_ranks(store, "killed", folder), pytest.raises(WorkerFailedError, match="SIGKILL"):
        estimator.setParams(data_module=first).fit(frame)
    model = estimator.setParams(data_module=second).fit(frame)
    # Epochs before the kill are neither repeated nor forgotten.
    assert epochs_begun(folder) == [[0, 1], [0, 1], [1, 2], [1, 2]]
    assert len(model.getHistory()["loss"] if framework == "keras" else model.getHistory()) == 3

    model.save(saved)
    loaded = type(model).load(saved)
    found = loaded.transform(frame).toPandas().iloc[:, -1]
    np.testing.assert_allclose(
        np.array(found.tolist()).reshape(-1), predict_alone(framework), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "framework", "readers"),
    [
        ("local", "torch", ("arrow", "petastorm")),
        pytest.param("hdfs", "keras", ("petastorm", "arrow"), marks=pytest.mark.soak),
        pytest.param("dbfs", "torch", ("petastorm", "arrow"), marks=pytest.mark.soak),
    ],
)
def test_a_killed_run_resumes(
    spark: Any, make_store: Any, tmp_path: Path, kind: str, framework: str, readers: Any
) -> None:
    available = tuple(name if name in READERS else "arrow" for name in readers)
    check(spark, *make_store(kind), framework, available, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "framework", "reader"), list(itertools.product(STORES, FRAMEWORKS, READERS))
)
def test_a_killed_run_resumes_with_each_framework_reader_and_store(
    spark: Any, make_store: Any, tmp_path: Path, kind: str, framework: str, reader: str
) -> None:
    check(spark, *make_store(kind), framework, (reader, reader), tmp_path)
