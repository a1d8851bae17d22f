"""Retries of storage errors, and the typed errors and messages after the last one."""

import errno
import logging
import os
import ssl

import aiohttp
import botocore.exceptions
import pytest
from fake_clock import set_clock
from fsspec.implementations.memory import MemoryFileSystem
from s3fs.errors import translate_boto_error

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError, StoreError, StoreUnavailableError
from hvd_estimators.store import retries
from hvd_estimators.store.redaction import redacted, secret_values
from hvd_estimators.store.retries import with_retries
from hvd_estimators.store.storage_errors import Kind, kind_of


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Skip all waiting; return the clock of retries."""
    return set_clock(monkeypatch, retries)


def answer(code, status, operation="PutObject", message="why"):
    """Build the error that s3fs raises for a response of S3."""
    response = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return translate_boto_error(botocore.exceptions.ClientError(response, operation))


TRANSIENT = [
    answer("SlowDown", 503),
    answer("503", 503, "HeadObject"),
    answer("InternalError", 500),
    answer("500", 500, "HeadObject"),
    answer("RequestTimeout", 400),
    answer("IncompleteBody", 400),
    answer("SomethingNew", 502),
    answer("SomethingNew", 429),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
    botocore.exceptions.ConnectionClosedError(endpoint_url="http://127.0.0.1:1"),
    botocore.exceptions.ReadTimeoutError(endpoint_url="http://127.0.0.1:1"),
    botocore.exceptions.ConnectTimeoutError(endpoint_url="http://127.0.0.1:1"),
    botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    aiohttp.ClientPayloadError("Response payload is not completed"),
    aiohttp.ServerDisconnectedError(),
    TimeoutError(),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    OSError(errno.EHOSTUNREACH, "no route"),
    BrokenPipeError(),
    # Errors of hdfs-native.
    OSError("Connection refused (os error 111)"),
    RuntimeError('DataTransferError("All DataNodes failed: [DatanodeInfoProto {…}]")'),
    RuntimeError('OperationFailed("Failed to complete file in time")'),
    OSError("failed to lookup address information: Temporary failure in name resolution"),
    RuntimeError("There are 1 datanode(s) running and 1 node(s) are excluded in this operation."),
    RuntimeError("There are 0 datanode(s) running and no node(s) are excluded in this operation."),
    ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
]

NOT = [
    (answer("NoSuchKey", 404), Kind.MISSING),
    (answer("404", 404, "HeadObject"), Kind.MISSING),
    (answer("NoSuchBucket", 404), Kind.MISSING),
    (FileNotFoundError("a"), Kind.MISSING),
    (answer("AccessDenied", 403), Kind.FORBIDDEN),
    (answer("403", 403, "HeadObject"), Kind.FORBIDDEN),
    (PermissionError(errno.EACCES, "denied", "a"), Kind.FORBIDDEN),
    (OSError(errno.EROFS, "read-only"), Kind.FORBIDDEN),
    (answer("ExpiredToken", 400), Kind.FORBIDDEN),
    (answer("400", 400, "HeadObject"), Kind.FORBIDDEN),
    (answer("InvalidAccessKeyId", 403), Kind.FORBIDDEN),
    (answer("SignatureDoesNotMatch", 403), Kind.FORBIDDEN),
    (botocore.exceptions.NoCredentialsError(), Kind.FORBIDDEN),
    (OSError(errno.ENOSPC, "full"), Kind.FULL),
    (RuntimeError("There are 2 datanode(s) running and no node(s) are excluded"), Kind.FULL),
    (RuntimeError('RPCError("org.apache…DSQuotaExceededException", "…")'), Kind.FULL),
    (RuntimeError('RPCError("org.apache…AccessControlException", "…")'), Kind.FORBIDDEN),
    (RuntimeError('InvalidArgument("No viewfs fallback mount found")'), Kind.OTHER),
    (OSError("IO error occurred while communicating: failed to lookup address: none"), Kind.OTHER),
    (OSError("java.net.UnknownHostException: nameservice1"), Kind.OTHER),
    (OSError(errno.EDQUOT, "quota"), Kind.FULL),
    (answer("InvalidRequest", 400), Kind.OTHER),
    (answer("NotImplemented", 501), Kind.OTHER),
    (IsADirectoryError(errno.EISDIR, "directory"), Kind.OTHER),
    (ValueError("no"), Kind.OTHER),
    (ssl.SSLCertVerificationError("self-signed"), Kind.OTHER),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_transient_errors_are_retried(error):
    assert kind_of(error) is Kind.TRANSIENT


@pytest.mark.parametrize(("error", "kind"), NOT, ids=repr)
def test_permanent_errors_are_not_retried(error, kind):
    assert kind_of(error) is kind


def failing(*errors, result="done"):
    """Return a function that raises the errors one by one, then returns a value."""
    left = list(errors)

    def call():
        if left:
            raise left.pop(0)
        return result

    return call


def test_retries_continue_until_success_and_log_long_waits(caplog, clock):
    with caplog.at_level(logging.WARNING):
        assert with_retries(failing(*TRANSIENT[:3]), "reading 's3://b/a'") == "done"
    assert clock.now < 1
    assert not caplog.records

    action = failing(*TRANSIENT[:12])  # some seconds
    assert with_retries(action, "reading 's3://b/a'") == "done"
    (record,) = caplog.records
    assert "Reading 's3://b/a' fails" in record.getMessage()
    assert 5 < clock.now < 60


def test_the_final_error_names_path_cause_and_remedy(clock):
    error = answer("SlowDown", 503)

    def throttled():
        raise error

    with pytest.raises(StoreError, match=r"reading 's3://b/a'.*why.*tried again for 6\d seconds"):
        with_retries(throttled, "reading 's3://b/a'")
    assert 60 <= clock.now < 66


def test_the_time_limit_starts_at_the_first_failure(clock):
    def slow_then_good(calls=[]):  # noqa: B006 - counts its calls
        calls.append(1)
        clock.now += 200  # a client's own retries may take longer than ours
        if len(calls) == 1:
            raise ConnectionResetError
        return len(calls)

    assert with_retries(slow_then_good, "reading 'a'") == 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (answer("ExpiredToken", 400), "access is denied.*Expired.*storage_options"),
        (answer("AccessDenied", 403), "access is denied.*storage_options"),
        (OSError(errno.ENOSPC, "No space left"), "no space left.*Free space"),
    ],
)
def test_errors_that_users_can_fix_are_raised_at_once(error, message, clock):
    with pytest.raises(StoreError, match=f"writing 's3://b/a': .*{message}") as raised:
        with_retries(failing(error), "writing 's3://b/a'")
    assert clock.now == 0
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [FileNotFoundError("a"), ValueError("b"), ParamError("c")])
def test_errors_that_callers_handle_are_not_converted(error):
    with pytest.raises(type(error)) as raised:
        with_retries(failing(error), "reading 'a'")
    assert raised.value is error


def test_messages_hold_no_secrets():
    options = {"key": "AKIAEXAMPLE", "client_kwargs": {"aws_session_token": "tok/en+1234"}}
    secrets = secret_values({**options, "endpoint_url": "http://127.0.0.1", "secret": "s3cr3t!"})
    assert secrets == {"AKIAEXAMPLE", "tok/en+1234", "s3cr3t!"}

    for error in (
        PermissionError("the key AKIAEXAMPLE is no good"),
        ValueError("https://host/a?sv=1&sig=abc%2Fdef&se=2"),
        FileNotFoundError("s3://AKIA:s3cr3t!@bucket/a"),
    ):
        with pytest.raises((StoreError, FileNotFoundError)) as raised:
            with_retries(failing(error), "reading 'a'", secrets)
        assert "***" in str(raised.value)
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__
    assert redacted("https://host/a?sv=1&sig=abc%2Fdef&se=2") == "https://host/a?sv=1&sig=***&se=2"
    assert redacted("s3://AKIA:se/cret@bucket/a") == "s3://***@bucket/a"


class Cutting(MemoryFileSystem):
    """Filesystem in memory whose next responses have only half of the bytes asked for."""

    cachable = False
    cuts = 0

    def cat_file(self, path, start=None, end=None, **options):
        content = super().cat_file(path, start, end, **options)
        if not self.cuts:
            return content
        self.cuts -= 1
        return content[: len(content) // 2]


@pytest.fixture
def cutting(monkeypatch):
    """Return a store of a file of 100 bytes, and the filesystem that cuts its responses."""
    fs = Cutting()
    store = Store.create("memory://cut")
    fs.pipe_file("/cut/file", bytes(range(100)))
    monkeypatch.setattr(type(store), "fs", property(lambda self: fs))
    return store, fs


@pytest.mark.parametrize("ranges", [[(10, 30)], [(10, 30), (90, 200), (100, 300)]])
def test_cut_responses_are_asked_for_again(cutting, ranges):
    store, fs = cutting
    fs.cuts = 5
    assert store.read_ranges("memory://cut/file", ranges) == [
        bytes(range(start, min(stop, 100))) for start, stop in ranges
    ]
    assert fs.cuts == 0


def test_a_store_that_cuts_all_responses_is_unavailable_and_not_damaged(cutting):
    store, fs = cutting
    fs.cuts = 10**6
    with pytest.raises(StoreUnavailableError, match="the response was cut: it has 10 of 20 bytes"):
        store.read_ranges("memory://cut/file", [(10, 30)])


def test_an_open_file_has_its_own_position_and_continues_after_failures(cutting, monkeypatch):
    store, fs = cutting
    monkeypatch.setattr("hvd_estimators.store.files.CHUNK_BYTES", 16)
    content = bytes(range(100))
    with store.open("memory://cut/file") as file, store.open("memory://cut/file") as other:
        assert other.read(3) == content[:3]
        fs.cuts = 2
        parts = [file.read(10), file.read(15)]
        assert fs.cuts == 0
        assert file.tell() == 25
        fs.cuts = 3
        parts.append(file.read())
        assert b"".join(parts) == content
        assert file.read(1) == b""
        assert file.seek(-10, os.SEEK_END) == 90
        assert file.read() == content[90:]
        assert other.read() == content[3:]
    assert file.closed


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(cutting, monkeypatch):
    store, fs = cutting
    monkeypatch.setattr("hvd_estimators.store.files.CHUNK_BYTES", 16)
    with store.open("memory://cut/file") as file:
        file.read(10)
        fs.pipe_file("/cut/file", b"short")
        with pytest.raises(StoreError, match="another file meanwhile, of less than 100 bytes"):
            file.read()


def test_missing_files_are_reported_at_open(cutting):
    store, _ = cutting
    with pytest.raises(FileNotFoundError):
        store.open("memory://cut/absent")
