"""Wrong calls of launchers, backends, stores and checkpoints: immediate typed errors, no Spark."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from wrong_calls import Calls, Wrong, cases, check_wrong

from hvd_estimators import Store, load_checkpoint
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.launch import HorovodRunner, LocalBackend, SparkBackend, run, run_elastic
from hvd_estimators.store import register_store

lock = threading.Lock()


def closed_over() -> Any:
    return lock


def local(name: str, remedy: str, *args: Any, **options: Any) -> Wrong:
    return lambda calls: LocalBackend(*args, **options), ParamError, name, remedy


def spark(name: str, remedy: str, **options: Any) -> Wrong:
    return lambda calls: SparkBackend(**options), ParamError, name, remedy


def locally(name: str, remedy: str, *call: Any, **options: Any) -> Wrong:
    return lambda calls: LocalBackend(1).run(*call, **options), ParamError, name, remedy


def runner(name: str, remedy: str, **options: Any) -> Wrong:
    return lambda calls: HorovodRunner(**options), ParamError, name, remedy


LAUNCHES: dict[str, Wrong] = {
    "LocalBackend: text": local("num_proc", "expected a whole number", "2"),
    "LocalBackend: env": local("env", "by their names", env=5),
    "LocalBackend: env of a rank": local("env", "for all ranks", env={"HOROVOD_RANK": "0"}),
    "LocalBackend: stdout": local("stdout", r"open\(path, 'w'\)", stdout="log"),
    "SparkBackend: start_timeout": spark("start_timeout", "seconds", start_timeout="long"),
    "SparkBackend: nics": spark("nics", "the name of a network interface", nics=5),
    "SparkBackend: GPUs": spark("gpus_per_task", "1 or more", gpus_per_task=0),
    "SparkBackend: profile": spark(
        "resource_profile", r"ResourceProfileBuilder\(\)", resource_profile="gpu"
    ),
    "local run: no function": locally("fn", "expected a function", 5),
    "local run: a lock": locally("closed_over", "within the function", closed_over),
    "run: no function": (lambda calls: run(5), ParamError, "fn", "expected a function"),
    "run: args": (lambda calls: run(len, "abc"), ParamError, "args", "tuple or list"),
    "run: kwargs": (lambda calls: run(len, (), 5), ParamError, "kwargs", "dict of arguments"),
    "run_elastic: reset_limit": (
        lambda calls: run_elastic(len, num_proc=1, reset_limit="1"),
        ParamError,
        "reset_limit",
        "expected a whole number",
    ),
    "run_elastic: bounds": (
        lambda calls: run_elastic(len, num_proc=1, min_num_proc=2),
        ParamError,
        "min_num_proc",
        "expected 1 <= min_num_proc",
    ),
    "run_elastic: elastic_timeout": (
        lambda calls: run_elastic(len, num_proc=1, elastic_timeout="long"),
        ParamError,
        "elastic_timeout",
        "expected seconds",
    ),
    "HorovodRunner: verbosity": runner(
        "driver_log_verbosity", "expected one of 'all'", np=-1, driver_log_verbosity="some"
    ),
    "HorovodRunner: num_proc": runner("num_proc", "Set np", np=-1, num_proc=2),
}


def store(name: str, remedy: str, *prefix: Any, **options: Any) -> Wrong:
    def make(calls: Any) -> Any:
        return Store.create(*(prefix or (str(calls.folder / "other"),)), **options)

    return make, ParamError, name, remedy


STORES: dict[str, Wrong] = {
    "no path": store("prefix_path", "Set it, or both train_path", ""),
    "a Path": store("prefix_path", r"Set str\(path\)", Path("/data")),
    "a scheme": store("prefix_path", "register_store", "nope://here"),
    "what cannot be written to": store("prefix_path", "Set a path without a scheme", "http://here"),
    "a secret": store("prefix_path", "Set them as storage_options", "s3://key:secret@bucket/a"),
    "no root": store("prefix_path", "Set hdfs://host:port/path", "hdfs://"),
    "checkpoint_filename": store("checkpoint_filename", "slashes", checkpoint_filename="a/b"),
    "another filesystem": store("path", "set a prefix_path on the URL", train_path="s3://b/rows"),
    "unknown": store("storage_option", "Did you mean", storage_option={}),
    "register_store": (
        lambda calls: register_store("mine", 5),  # type: ignore[arg-type]
        ParamError,
        "store",
        "expected a subclass of Store",
    ),
    "no run": (lambda c: c.store.load_history("no"), ParamError, "run_id", "has no run 'no'"),
    "a run elsewhere": (
        lambda c: c.store.delete_run("../intermediate_train_data"),
        ParamError,
        "run_id",
        "expected letters, digits",
    ),
    "no checkpoint": (lambda c: load_checkpoint(c.store, "no"), StoreError, "run", "no checkpoint"),
    "no run_id": (lambda c: load_checkpoint(c.store), ParamError, "run_id", "Set run_id"),
    "which": (
        lambda c: load_checkpoint(c.store, "no", which=5),
        ParamError,
        "which",
        "expected 'newest', 'best' or a path",
    ),
    "no file of a framework": (
        lambda c: load_checkpoint(os.path.join(c.store.get_train_data_path(), "part.parquet")),
        StoreError,
        "checkpoint",
        "was not written by this version",
    ),
}


@cases({**LAUNCHES, **{f"store: {name}": row for name, row in STORES.items()}})
def test_a_wrong_call_is_rejected_at_once(tmp_path: Path, wrong: Wrong) -> None:
    check_wrong(Calls(tmp_path), wrong)


@pytest.mark.parametrize("text", ["long", "nan", "-1"])
def test_a_variable_without_a_number_of_seconds_is_named(monkeypatch: Any, text: str) -> None:
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", text)
    with pytest.raises(ParamError, match=f"TIMEOUT: expected seconds, 0 or more, found .*{text}"):
        SparkBackend(2)
