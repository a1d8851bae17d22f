"""Errors of HDFS as its clients for Python and Java report them: kind, message and remedy."""

import pytest
from fake_clock import set_clock

from hvd_estimators.exceptions import StoreError, StoreUnavailableError
from hvd_estimators.prepare.connectors import storage_errors
from hvd_estimators.store import HDFSStore, retries
from hvd_estimators.store.storage_errors import REMEDIES, Kind, kind_of, text_of

SAFE_MODE = "org.apache.hadoop.hdfs.server.namenode.SafeModeException"
MANUAL = (
    "Cannot create file/s/a. Name node is in safe mode.\nIt was turned on manually. Use "
    '"hdfs dfsadmin -safemode leave" to turn safe mode off. NamenodeHostName:localhost'
)
FULL = (
    "Cannot create file/s/a. Name node is in safe mode.\nResources are low on NN. Please add or "
    "free up more resourcesthen turn off safe mode manually. NOTE:  If you turn off safe mode "
    "before adding resources, the NN will immediately return to safe mode. Use "
    '"hdfs dfsadmin -safemode leave" to turn safe mode off. NamenodeHostName:localhost'
)
STARTING = (
    "Cannot create file/s/a. Name node is in safe mode.\nThe reported blocks 0 needs additional 3 "
    "blocks to reach the threshold 0.9990 of total blocks 4.\nThe minimum number of live datanodes "
    "is not required. Safe mode will be turned off automatically once the thresholds have been "
    "reached. NamenodeHostName:localhost"
)
NAMES = (
    "The NameSpace quota (directories and files) of directory /s is exceeded: quota=3 file count=4"
)
BYTES = (
    "The DiskSpace quota of /s is exceeded: quota = 314572800 B = 300 MB but diskspace consumed = "
    "335217728 B = 319.69 MB"
)
DENIED = 'Permission denied: user=stranger, access=WRITE, inode="/s":root:supergroup:drwxr-xr-x'
NO_TARGET = (
    "File /s/.a-1 could only be written to 0 of the 1 minReplication nodes. There are 0 "
    "datanode(s) running and 0 node(s) are excluded in this operation."
)
CAUSES = [
    (SAFE_MODE, MANUAL, Kind.FORBIDDEN),
    (SAFE_MODE, FULL, Kind.FORBIDDEN),
    (SAFE_MODE, STARTING, Kind.TRANSIENT),
    ("org.apache.hadoop.hdfs.protocol.NSQuotaExceededException", NAMES, Kind.FULL),
    ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", BYTES, Kind.FULL),
    ("org.apache.hadoop.security.AccessControlException", DENIED, Kind.FORBIDDEN),
    ("java.io.IOException", NO_TARGET, Kind.TRANSIENT),
]
TRACE = (
    "\tat org.apache.hadoop.hdfs.server.blockmanagement.DatanodeManager.run(DatanodeManager.java:1)"
    "\n\tat org.apache.hadoop.ipc.Server$Handler.run(Server.java:2976)\n"
)


def native(name: str, message: str) -> RuntimeError:
    """Return hdfs-native's error, whose text is a value of Rust."""
    text = f"{message}\n{TRACE}".replace("\n", "\\n").replace("\t", "\\t").replace('"', '\\"')
    return RuntimeError(f'RPCError("{name}", "{text}")')


class Throwable:
    """Exception of Java, as py4j presents it."""

    def __init__(self, text: str, cause: "Throwable | None" = None) -> None:
        self.text, self.cause = text, cause

    def toString(self) -> str:
        return self.text

    def getCause(self) -> "Throwable | None":
        return self.cause


class JavaError(Exception):
    """py4j's error."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__("An error occurred while calling o431.create.")
        cause = Throwable(f"org.apache.hadoop.ipc.RemoteException({name}): {message}\n{TRACE}")
        self.java_exception = Throwable(f"{name}: {message}\n{TRACE}", cause)


def failed_job(name: str, message: str) -> Exception:
    """Return Spark's error of a failed job, which contains the executors' errors as text."""
    return RuntimeError(
        "An error occurred while calling o1.parquet.\n: org.apache.spark.SparkException: Job "
        "aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: "
        f"Lost task 0.3 in stage 1.0 (TID 7) (host executor 1): {name}: {message}\n{TRACE}\n"
        f"Caused by: org.apache.hadoop.ipc.RemoteException({name}): {message}\n{TRACE}"
    )


@pytest.mark.parametrize(("name", "message", "kind"), CAUSES)
@pytest.mark.parametrize("client", [native, JavaError])
def test_both_clients_errors_have_one_kind_and_keep_hdfs_words(client, name, message, kind):
    error = client(name, message)
    assert kind_of(error) is kind
    text = text_of(error)
    assert message.replace("\n", " ") in text
    assert text.count(message.split(".")[0]) == 1
    assert name.rpartition(".")[2] in text
    assert "Server.java" not in text


@pytest.mark.parametrize(("name", "message", "kind"), CAUSES)
def test_failed_writes_of_spark_name_folder_cause_and_remedy(name, message, kind):
    if name == "java.io.IOException":
        name = "org.apache.hadoop.ipc.RemoteException(java.io.IOException)"
    error_class = StoreUnavailableError if kind is Kind.TRANSIENT else StoreError
    with (
        pytest.raises(error_class) as raised,
        storage_errors(HDFSStore("hdfs://nn:8020/s"), "hdfs://nn:8020/s/train"),
    ):
        raise failed_job(name, message)
    assert type(raised.value) is error_class
    told = str(raised.value)
    for part in ("'hdfs://nn:8020/s/train'", message.replace("\n", " ")[:300], REMEDIES[kind]):
        assert part in told
    assert "Server.java" not in told


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "java.net.ConnectException: Call From a/127.0.0.1 to nn:8020 failed on connection "
            "exception: java.net.ConnectException: Connection refused; For more details see:  "
            "http://wiki.apache.org/hadoop/ConnectionRefused",
            Kind.TRANSIENT,
        ),
        (
            'java.io.EOFException: End of File Exception between local host is: "a/127.0.0.1"; '
            'destination host is: "nn":8020; : java.io.EOFException; For more details see:  '
            "http://wiki.apache.org/hadoop/EOFException",
            Kind.TRANSIENT,
        ),
        (
            "java.net.SocketException: Call From a/127.0.0.1 to nn:8020 failed on socket "
            "exception: java.net.SocketException: Connection reset; For more details see:  "
            "http://wiki.apache.org/hadoop/SocketException",
            Kind.TRANSIENT,
        ),
        (
            "java.io.IOException: All datanodes [DatanodeInfoWithStorage[127.0.0.1:9866,DS-1,DISK]]"
            " are bad. Aborting...",
            Kind.TRANSIENT,
        ),
        ("java.io.IOException: No space left on device", Kind.FULL),
    ],
)
def test_connections_that_spark_lost_are_errors_of_the_store(text, kind):
    name, _, message = text.partition(": ")
    with (
        pytest.raises(StoreError) as raised,
        storage_errors(HDFSStore("hdfs://nn:8020/s"), "hdfs://nn:8020/s/train"),
    ):
        raise failed_job(name, message)
    assert isinstance(raised.value, StoreUnavailableError) == (kind is Kind.TRANSIENT)
    assert f": {kind.value} ({text})" in str(raised.value)


def test_errors_of_the_rows_own_source_do_not_change():
    error = RuntimeError(
        "An error occurred while calling o1.parquet.\n: org.apache.spark.SparkException: Job "
        "aborted (host executor 1): java.net.ConnectException: Connection to db:5432 refused.\n"
        "\tat org.postgresql.core.v3.ConnectionFactoryImpl.openConnection(Impl.java:1)\n"
    )
    with (
        pytest.raises(RuntimeError) as raised,
        storage_errors(HDFSStore("hdfs://nn:8020/s"), "hdfs://nn:8020/s/train"),
    ):
        raise error
    assert raised.value is error


@pytest.fixture
def no_waiting(monkeypatch):
    """Return the list of all waits, which take no time."""
    return set_clock(monkeypatch, retries).waits


class Names:
    """Filesystem of files in memory that loses connections, as HDFS does when it restarts."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.errors: dict[str, list[Exception]] = {}

    def invalidate_cache(self, path):
        pass

    def _fail(self, what):
        if self.errors.get(what):
            raise self.errors[what].pop(0)

    def open(self, path, mode):
        self._fail("open")
        self.files[path] = b""
        return Writing(self, path)

    def mv(self, source, target, overwrite):
        if target in self.files and not overwrite:
            raise FileExistsError(target)
        self._fail("mv")
        self.files[target] = self.files.pop(source)

    def info(self, path):
        self.cat_file(path)
        return {"type": "file"}

    def cat_file(self, path):
        path = path.removeprefix("hdfs://nn")
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def rm_file(self, path):
        del self.files[path]


class Writing:
    def __init__(self, names, path):
        self.names, self.path = names, path

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.names._fail("close")

    def write(self, content):
        self.names.files[self.path] += bytes(content)
        return len(content)


@pytest.fixture
def names(monkeypatch):
    names = Names()
    monkeypatch.setattr(HDFSStore, "fs", property(lambda store: names))
    return names


LOST = OSError("Connection reset by peer (os error 104)")


@pytest.mark.parametrize("what", ["open", "close", "mv"])
def test_a_write_that_is_tried_again_leaves_one_file(names, no_waiting, what):
    store = HDFSStore("hdfs://nn/s")
    names.errors[what] = [LOST, native(SAFE_MODE, STARTING)]
    store.write_text("hdfs://nn/s/file", "text")
    assert names.files == {"/s/file": b"text"}


@pytest.mark.parametrize("what", ["close", "mv"])
def test_a_write_that_fails_leaves_the_old_file_only(names, no_waiting, what):
    store = HDFSStore("hdfs://nn/s")
    store.write_text("hdfs://nn/s/file", "old")
    names.errors[what] = [native("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", BYTES)]
    with pytest.raises(StoreError, match=r"writing 'hdfs://nn/s/file'.*quota = 314572800 B"):
        store.write_text("hdfs://nn/s/file", "new")
    assert names.files == {"/s/file": b"old"}
