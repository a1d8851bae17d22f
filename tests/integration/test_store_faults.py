"""Faults of real storage: writes are retried or errors reported, and checkpoints are kept."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_saves import KIB, newest, save
from servers.fault_proxy import FaultProxy
from store_runs import (
    FRAMEWORKS,
    epochs_begun,
    make_estimator,
    make_rows,
    predict_alone,
    send_by_value,
    stopping_callback,
)

from hvd_estimators import Store
from hvd_estimators.exceptions import StoreError, WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.store import retries

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def setup_module() -> None:
    send_by_value()


@pytest.fixture
def proxy(s3: Any) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def store_behind_proxy(s3: Any, proxy: FaultProxy) -> Any:
    """Store behind the proxy, whose client retries for a second instead of a minute."""
    options = s3.options(endpoint=proxy.endpoint)
    options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    return Store.create(f"{s3.new_bucket()}/store", storage_options=options)


def is_checkpoint(method: str, path: str) -> bool:
    return method in ("PUT", "POST") and ".ckpt" in path


def test_failed_writes_raise_and_keep_the_previous_checkpoint(
    s3: Any, proxy: FaultProxy, store_behind_proxy: Any
) -> None:
    save(store_behind_proxy, 1)
    proxy.fault("ExpiredToken", matches=is_checkpoint, times=None)
    started = time.monotonic()
    told = "(?s)checkpoint-000002.*credentials.*resumes from the newest"
    with pytest.raises(StoreError, match=told):
        save(store_behind_proxy, 2)
    # Lasting faults are not retried.
    assert time.monotonic() - started < retries.RETRY_SECONDS / 2
    direct = Store.create(store_behind_proxy.prefix_path, storage_options=s3.storage_options)
    assert newest(direct) == 1
    # After the fault, the next checkpoint is written as usual.
    proxy.faults.clear()
    save(store_behind_proxy, 3)
    assert newest(direct) == 3


def test_a_full_disk_is_reported_and_the_previous_checkpoint_is_kept(small_disk: Path) -> None:
    store = Store.create(str(small_disk / "store"))
    save(store, 1)
    with pytest.raises(StoreError, match=r"(?s)checkpoint-000002.*no space left.*Free space"):
        save(store, 2, 900 * KIB)
    assert newest(store) == 1
    # The partial file is deleted: as much space is free as before.
    save(store, 3)
    assert newest(store) == 3


def test_a_full_disk_of_temporary_files_is_reported(
    small_disk: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(f"{s3.new_bucket()}/store", storage_options=s3.storage_options)
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    save(store, 1)
    with pytest.raises(StoreError, match=r"(?s)no space left.*"):
        save(store, 2, 1200 * KIB)
    assert newest(store) == 1
    assert list(small_disk.iterdir()) == []


def test_writes_by_another_user_are_denied_on_hdfs(hdfs: Any) -> None:
    own = Store.create(f"{hdfs.url}/{uuid.uuid4().hex}")
    save(own, 1)
    assert "user=stranger" in save_elsewhere(own, {"user": "stranger"})
    assert newest(own) == 1


def test_writes_without_permission_are_denied_on_a_disk(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    save(store, 1)
    folder = Path(store.run_paths("run").checkpoints_path)
    folder.chmod(0o555)
    # Root may write anyway, unless it drops these capabilities.
    less = "-dac_override,-dac_read_search"
    limited = ["setpriv", f"--bounding-set={less}", f"--inh-caps={less}"]
    save_elsewhere(store, {}, limited if os.geteuid() == 0 else [])
    folder.chmod(0o755)
    assert newest(store) == 1


def save_elsewhere(store: Any, settings: dict[str, Any], prefix: Sequence[str] = ()) -> str:
    """Save a checkpoint in a process without permission, and return its error output."""
    program = str(Path(__file__).with_name("checkpoint_saves.py"))
    done = subprocess.run(
        [*prefix, sys.executable, program, store.prefix_path, "2", json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 1, done.stderr
    assert "StoreError" in done.stderr
    assert "access is denied" in done.stderr
    return done.stderr


# With ranks.


def prepare(store: Any) -> np.ndarray:
    """Write the rows without Spark, and return their features."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = make_rows()
    held_out = rows.pop("held out")
    for path, part in (
        (store.get_train_data_path(), rows[~held_out]),
        (store.get_val_data_path(), rows[held_out]),
    ):
        table = pa.table(
            {
                "features": pa.array(part["features"].tolist(), pa.list_(pa.float32())),
                "label": pa.array(part["label"], pa.float32()),
            }
        )
        with store.open_atomic(f"{path}/part-0.parquet") as file:
            parquet.write_table(table, file, row_group_size=17)
    return np.stack(rows["features"]).astype(np.float32)


def check_predictions(model: Any, features: np.ndarray) -> None:
    import torch

    with torch.no_grad():
        found = model.getModel()(torch.from_numpy(features)).numpy().reshape(-1)
    np.testing.assert_allclose(found, predict_alone("torch"), rtol=1e-3, atol=1e-4)


def fit(store: Any, folder: Path, **params: Any) -> Any:
    settings = {
        "validation": 0.5,
        "backend": LocalBackend(2),
        "run_id": "run",
        "callbacks": [stopping_callback("torch", folder)],
        **params,
    }
    return make_estimator("torch", store=store, **settings).fit_on_parquet()


def while_ranks_wait(store: Any, folder: Path, action: Callable[[], None]) -> threading.Thread:
    """Act when both ranks start the second epoch and the checkpoint of the first exists.

    The action lets the ranks continue.
    """

    return act_when(
        lambda: len(list(folder.glob("*.pid"))) >= 2 and newest(store) >= 1, action, 120
    )


def act_when(
    is_time: Callable[[], bool], action: Callable[[], None], seconds: float
) -> threading.Thread:
    """Start a thread that acts when a condition is true, which it must be within some seconds."""

    def act() -> None:
        deadline = time.monotonic() + seconds
        while not is_time():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_training_survives_faults_of_s3(
    s3: Any, proxy: FaultProxy, store_behind_proxy: Any, tmp_path: Path
) -> None:
    features = prepare(store_behind_proxy)
    direct = Store.create(store_behind_proxy.prefix_path, storage_options=s3.storage_options)

    def expire() -> None:
        proxy.fault("ExpiredToken", times=None)
        (tmp_path / "go on").touch()

    expiring = while_ranks_wait(direct, tmp_path, expire)
    with pytest.raises((WorkerFailedError, StoreError), match=r"credentials .*expired"):
        fit(store_behind_proxy, tmp_path)
    expiring.join()
    assert newest(direct) == 1

    proxy.faults.clear()
    (tmp_path / "go on").unlink()
    for file in tmp_path.glob("*.pid"):
        file.unlink()
    throttled = proxy.fault("SlowDown", times=10)

    def go_away() -> None:
        proxy.stop()
        (tmp_path / "go on").touch()
        time.sleep(3)
        proxy.fault("cut", matches=is_checkpoint, times=8)
        proxy.start()

    going = while_ranks_wait(direct, tmp_path, go_away)
    model = fit(store_behind_proxy, tmp_path)
    going.join()
    check_predictions(model, features)
    assert newest(direct) == 3
    assert throttled.happened == 10
    # The ranks have read the small files before. So the first fit may begin another epoch before
    # the failed write of a checkpoint ends it.
    begun = [epochs[:2] for epochs in epochs_begun(tmp_path)]
    assert begun == [[0, 1], [0, 1], [1, 2], [1, 2]]


@pytest.mark.soak
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_resumes_after_space_is_freed_on_a_full_disk(
    small_disk: Path, tmp_path: Path, framework: str
) -> None:
    store = Store.create(str(small_disk / "store"))
    prepare(store)
    filler = small_disk / "filler"
    settings: dict[str, Any] = {"validation": 0.5, "backend": LocalBackend(2), "run_id": "run"}
    filling = while_ranks_wait(store, tmp_path, lambda: fill(filler, tmp_path / "go on"))
    waiting = {**settings, "callbacks": [stopping_callback(framework, tmp_path)]}
    with pytest.raises(StoreError, match=r"Rank 0 .*checkpoint-000002.*no space left") as caught:
        make_estimator(framework, store=store, **waiting).fit_on_parquet()
    filling.join()
    assert isinstance(caught.value, WorkerFailedError)
    assert caught.value.rank == 0
    assert newest(store) == 1
    filler.unlink()
    make_estimator(framework, store=store, **settings).fit_on_parquet()
    assert newest(store) == 3


def fill(filler: Path, then: Path) -> None:
    """Fill a disk with a file, and create another file."""
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(KIB))
    then.touch()


@pytest.mark.soak
def test_ranks_whose_temporary_folder_is_full_name_it(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(str(tmp_path / "store"))
    prepare(store)
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with pytest.raises(StoreError, match=rf"No space is left .*{small_disk}.*TMPDIR") as caught:
        make_estimator(
            "torch",
            **{"store": store, "validation": 0.5, "callbacks": [SavesTensors()]},
            backend=LocalBackend(2),
        ).fit_on_parquet()
    assert isinstance(caught.value, WorkerFailedError)


class SavesTensors:
    """Callback that saves more than a small disk of temporary files holds."""

    def on_epoch_begin(self, epoch: int) -> None:
        import tempfile

        import torch

        torch.save(torch.zeros(10**6), f"{tempfile.gettempdir()}/tensors")
