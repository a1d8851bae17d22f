"""Stores on S3 over a failing network: retries, errors and remaining objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import s3fs
from servers.fault_proxy import FaultProxy

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import FilesystemStore, retries


@pytest.fixture
def proxy(s3: Any) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as found:
        yield found


@pytest.fixture
def store(s3: Any, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FilesystemStore:
    # Without the clients' own retries, which take seconds.
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    options = s3.options(secret="s3cr3t-of-mine", endpoint=proxy.endpoint)
    options["config_kwargs"] = {"retries": {"max_attempts": 0}}
    return FilesystemStore(f"{s3.new_bucket()}/store", storage_options=options)


def test_interrupted_uploads_and_reads_are_retried(
    store: FilesystemStore, proxy: FaultProxy
) -> None:
    path, content = f"{store.prefix_path}/file", os.urandom(300_000)
    cut = proxy.fault("cut", matches=lambda method, _: method == "PUT", times=2)
    with store.open_atomic(path) as file:
        file.write(content)
    assert cut.happened == 2

    cut = proxy.fault("cut answer", matches=lambda method, _: method == "GET", times=3)
    assert store.read(path) == content
    with store.open(path) as file:
        parts = [file.read(100_000), file.read()]
    assert b"".join(parts) == content
    assert store.read_ranges(path, [(10, 20), (-5, None)]) == [content[10:20], content[-5:]]
    assert cut.happened == 3

    slow = proxy.fault("SlowDown", times=4)
    assert store.names(store.prefix_path) == ["file"]
    assert slow.happened == 4
    store.delete(path)


def test_failed_uploads_keep_the_existing_object(
    store: FilesystemStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{store.prefix_path}/file"
    store.write_text(path, "before")
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0)
    for kind, message in (
        ("cut", f"failed at writing '{path}'.*does not answer"),
        ("AccessDenied", "access is denied.*storage_options"),
        ("ExpiredToken", "access is denied.*Expired.*storage_options"),
    ):
        fault = proxy.fault(kind, matches=lambda method, _: method == "PUT", times=None)
        with pytest.raises(StoreError, match=message) as raised:
            store.write_text(path, "after")
        assert "s3cr3t-of-mine" not in str(raised.value)
        proxy.faults.remove(fault)
        assert store.read(path) == b"before"
        assert store.find(store.prefix_path) == [path]


def test_a_store_that_does_not_answer_is_not_an_empty_store(
    store: FilesystemStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{store.prefix_path}/file"
    store.write_text(path, "there")
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0)
    for kind in ("InternalError", "AccessDenied"):
        fault = proxy.fault(kind, times=None)
        for ask in (store.exists, store.names, store.find, store.read, store.delete):
            with pytest.raises(StoreError, match=f"failed at .*'{path}'"):
                ask(path)
        proxy.faults.remove(fault)
    assert store.read(path) == b"there"


def test_missing_buckets_are_reported_and_not_created(s3: Any) -> None:
    store = FilesystemStore("s3://bucket-of-nobody/a", storage_options=s3.storage_options)
    with pytest.raises(StoreError, match=r"cannot be written to.*bucket does not exist"):
        store.check()
    buckets = s3.client().list_buckets()["Buckets"]
    assert "bucket-of-nobody" not in {bucket["Name"] for bucket in buckets}
