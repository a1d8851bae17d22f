"""Faults of real HDFS: each is survived, or its error names the path, the cause and the remedy."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_saves import KIB, newest, save
from store_runs import send_by_value
from test_store_faults import act_when, check_predictions, fit, prepare, while_ranks_wait

from hvd_estimators import Store, prepare_data
from hvd_estimators.exceptions import StoreError, StoreUnavailableError, WorkerFailedError
from hvd_estimators.store import retries

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SAFE_MODE = r"(?s)access is denied.* safe mode.*turned on manually.*-safemode"
NAMES = r"(?s)quota is used up \(.*NSQuotaExceededException.*quota=\d+ file count=\d+.*raise the"
SPACE = r"(?s)quota is used up \(.*DSQuotaExceededException.*quota = \d+ B .*consumed = \d+ B"

LASTING = {"safe mode": SAFE_MODE, "Quota": NAMES, "SpaceQuota": SPACE}
"""Faults that do not end by themselves, and how their errors name them."""


def setup_module() -> None:
    send_by_value()


def new_store(cluster: Any) -> Any:
    return Store.create(f"{cluster.url}/{uuid.uuid4().hex}")


def path_of(store: Any) -> str:
    """Return the store's path without the name node."""
    return str(store.prefix_path).split("/", 3)[3].join(("/", ""))


def files(store: Any) -> list[str]:
    return [path.removeprefix(store.prefix_path) for path in store.find(store.prefix_path)]


@contextlib.contextmanager
def safe_mode(cluster: Any) -> Iterator[None]:
    assert "Safe mode is ON" in cluster.admin("-safemode", "enter")
    try:
        yield
    finally:
        cluster.admin("-safemode", "leave")


@contextlib.contextmanager
def quota(cluster: Any, store: Any, kind: str, limit: str) -> Iterator[None]:
    """Limit the number of names (``Quota``) or the bytes (``SpaceQuota``) of a store."""
    cluster.admin(f"-set{kind}", limit, path_of(store))
    try:
        yield
    finally:
        cluster.admin(f"-clr{kind}", path_of(store))


def lasting_fault(cluster: Any, store: Any, kind: str) -> contextlib.AbstractContextManager[None]:
    """Return the block of a fault of `LASTING`."""
    if kind == "safe mode":
        return safe_mode(cluster)
    return quota(cluster, store, kind, "1" if kind == "Quota" else "1m")


@contextlib.contextmanager
def restarted_namenode(cluster: Any, seconds: float) -> Iterator[None]:
    """Kill the name node, and start it again after some seconds, in which the block runs."""
    before = cluster.namenode_pid
    cluster.kill_namenode()
    starting = threading.Timer(seconds, cluster.start_namenode)
    starting.start()
    try:
        yield
    finally:
        starting.join()
    assert cluster.namenode_pid != before


def test_checkpoints_survive_a_name_node_restart_and_name_lasting_faults(hdfs: Any) -> None:
    store = new_store(hdfs)
    save(store, 1)
    before = files(store)
    with quota(hdfs, store, "Quota", "1"), pytest.raises(StoreError, match=NAMES) as caught:
        save(store, 2)
    assert store.prefix_path in str(caught.value)
    with safe_mode(hdfs):
        started = time.monotonic()
        with pytest.raises(StoreError, match=SAFE_MODE) as caught:
            save(store, 2)
        assert not isinstance(caught.value, StoreUnavailableError)
        assert time.monotonic() - started < retries.RETRY_SECONDS / 2
    assert files(store) == before
    with restarted_namenode(hdfs, 0):
        save(store, 2)
    assert newest(store) == 2
    assert not [path for path in files(store) if "/." in path]


@pytest.mark.soak
def test_a_space_quota_is_named_and_the_partial_file_deleted(hdfs_of_two: Any) -> None:
    store = new_store(hdfs_of_two)
    save(store, 1)
    before = files(store)
    with quota(hdfs_of_two, store, "SpaceQuota", "300m"), pytest.raises(StoreError, match=SPACE):
        # The first of two blocks of 128 MiB, with two replicas, fits.
        save(store, 2, 150 * 1024 * KIB)
    assert files(store) == before
    save(store, 2)
    assert newest(store) == 2


@pytest.mark.soak
def test_a_name_node_without_data_nodes_stays_in_safe_mode(
    hdfs_of_two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(hdfs_of_two)
    save(store, 1)
    for number in range(2):
        hdfs_of_two.kill_datanode(number=number)
    with restarted_namenode_without_waiting(hdfs_of_two):
        monkeypatch.setattr(retries, "RETRY_SECONDS", 5)
        with pytest.raises(StoreUnavailableError, match=r"(?s)does not answer.*needs additional"):
            store.write_text(f"{store.prefix_path}/file", "text")
        with pytest.raises(StoreUnavailableError, match=r"(?s)does not answer.*dfsadmin -report"):
            newest(store)
        monkeypatch.setattr(retries, "RETRY_SECONDS", 60)
        for number in range(2):
            hdfs_of_two.start_datanode(wait=False, number=number)
        save(store, 2)
    assert newest(store) == 2


@contextlib.contextmanager
def restarted_namenode_without_waiting(cluster: Any) -> Iterator[None]:
    """Restart the name node, which waits for its data nodes, and wait for them at the end."""
    cluster.kill_namenode()
    cluster.start_namenode(wait=False)
    try:
        assert "Safe mode is ON" in cluster.admin("-safemode", "get")
        yield
    finally:
        for number in range(2):
            cluster._await_datanode(number)


# With ranks.


@pytest.mark.soak
@pytest.mark.parametrize(("seconds", "max_restarts"), [(0, 0), (20, 0), (120, 3)])
def test_training_continues_after_a_name_node_restarts(
    hdfs_of_two: Any, tmp_path: Path, seconds: float, max_restarts: int
) -> None:
    store = new_store(hdfs_of_two)
    features = prepare(store)

    def restart() -> None:
        with restarted_namenode(hdfs_of_two, seconds):
            (tmp_path / "go on").touch()

    restarting = while_ranks_wait(store, tmp_path, restart)
    model = fit(store, tmp_path, max_restarts=max_restarts)
    restarting.join()
    check_predictions(model, features)
    assert newest(store) == 3
    assert not [path for path in files(store) if "/." in path]


@pytest.mark.soak
def test_training_continues_after_a_data_node_is_lost(hdfs_of_two: Any, tmp_path: Path) -> None:
    store = new_store(hdfs_of_two)
    features = prepare(store)

    def lose() -> None:
        hdfs_of_two.kill_datanode(number=1)
        (tmp_path / "go on").touch()

    losing = while_ranks_wait(store, tmp_path, lose)
    try:
        model = fit(store, tmp_path)
        losing.join()
        check_predictions(model, features)
        assert newest(store) == 3
        assert "Dead datanodes (1)" in wait_for_report(hdfs_of_two, "Dead datanodes (1)")
    finally:
        hdfs_of_two.start_datanode(number=1)


def wait_for_report(cluster: Any, text: str) -> str:
    deadline = time.monotonic() + 60
    while text not in (report := cluster.admin("-report")):
        assert time.monotonic() < deadline, report
    return str(report)


@pytest.mark.soak
@pytest.mark.parametrize("kind", LASTING)
def test_a_run_that_ends_by_a_lasting_fault_resumes(
    hdfs_of_two: Any, tmp_path: Path, kind: str
) -> None:
    store = new_store(hdfs_of_two)
    features = prepare(store)
    fault = contextlib.ExitStack()

    def begin() -> None:
        fault.enter_context(lasting_fault(hdfs_of_two, store, kind))
        (tmp_path / "go on").touch()

    beginning = while_ranks_wait(store, tmp_path, begin)
    with fault, pytest.raises(StoreError, match=LASTING[kind]) as caught:
        # A restart does not help.
        fit(store, tmp_path, max_restarts=2)
    beginning.join()
    assert isinstance(caught.value, WorkerFailedError)
    assert newest(store) == 1
    model = fit(store, tmp_path)
    check_predictions(model, features)
    assert newest(store) == 3
    assert not [path for path in files(store) if "/." in path]


# With Spark, whose JVM has its own client.


def rows(spark: Any, flag: Path | None = None) -> Any:
    """Return rows; the last one comes when a file exists."""
    from pyspark.sql import functions as F

    def wait(number: int) -> int:
        deadline = time.monotonic() + 60
        while number == 999 and not flag.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return number

    frame = spark.range(0, 1000, 1, 2)
    number = F.col("id") if flag is None else F.udf(wait, "long")("id")
    return frame.select(number.cast("float").alias("x"), (F.col("id") % 7).alias("y"))


def prepared(store: Any, frame: Any) -> list[float]:
    """Prepare the rows, and return the values that a reader finds."""
    import pyarrow.parquet as pq

    with prepare_data(1, store, frame, ["y"], ["x"], shuffle_on_write=False) as index:
        folder = store.get_train_data_path(index)
        parts = [path for path in store.find(folder) if path.endswith(".parquet")]
        tables = [pq.read_table(store.open(path)) for path in parts]
        return sorted(value for table in tables for value in table["x"].to_pylist())


def while_spark_writes(store: Any, action: Callable[[], None]) -> threading.Thread:
    """Act when a task of Spark has opened a file."""

    def is_writing() -> bool:
        with contextlib.suppress(FileNotFoundError):  # folders come and go
            return any("_temporary" in path for path in files(store))
        return False

    return act_when(is_writing, action, 60)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [0, 20])
def test_rows_are_written_once_more_after_a_name_node_restart(
    hdfs_of_two: Any, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    store = new_store(hdfs_of_two)
    flag = tmp_path / "flag"

    def restart() -> None:
        with restarted_namenode(hdfs_of_two, seconds):
            flag.touch()

    restarting = while_spark_writes(store, restart)
    assert prepared(store, rows(spark, flag)) == [float(i) for i in range(1000)]
    restarting.join()
    assert flag.exists()
    # A short outage is shorter than the retries of Spark's client.
    assert ("The rows are written once more" in caplog.text) or not seconds
    assert files(store) == []


@pytest.mark.soak
@pytest.mark.parametrize("kind", LASTING)
def test_lasting_faults_of_a_write_by_spark_are_named(
    hdfs_of_two: Any, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    store = new_store(hdfs_of_two)
    flag = tmp_path / "flag"
    fault = contextlib.ExitStack()

    def begin() -> None:
        fault.enter_context(lasting_fault(hdfs_of_two, store, kind))
        flag.touch()

    beginning = while_spark_writes(store, begin)
    with fault, pytest.raises(StoreError, match=LASTING[kind]) as caught:
        prepared(store, rows(spark, flag))
    beginning.join()
    assert store.prefix_path in str(caught.value)
    assert "once more" not in caplog.text
    # Files that HDFS does not allow to be deleted are deleted before the next write.
    assert prepared(store, rows(spark)) == [float(i) for i in range(1000)]
    assert files(store) == []


@pytest.mark.soak
def test_models_are_saved_in_spite_of_a_restart_and_lasting_faults_are_named(
    hdfs_of_two: Any, spark: Any
) -> None:
    from hvd_estimators.saving.folder import open_folder

    store = new_store(hdfs_of_two)
    folder = open_folder(spark, f"{store.prefix_path}/model")
    folder.write("a", b"1")
    with restarted_namenode(hdfs_of_two, 3):
        folder.write("b", b"2")
    assert (folder.read("a"), folder.read("b")) == (b"1", b"2")
    with safe_mode(hdfs_of_two), pytest.raises(StoreError, match=f"model/c.*{SAFE_MODE[4:]}"):
        folder.write("c", b"3")
    expected = pytest.raises(StoreError, match=f"model/d.*{NAMES[4:]}")
    with quota(hdfs_of_two, store, "Quota", "1"), expected:
        folder.write("d", b"4")
