"""Spark's connectors to a store: their Hadoop filesystems, packages and keys.

Spark writes through its own connectors, which are separate from the Python clients of the ranks.
They have different names, settings and credentials. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators.exceptions import DependencyError, StoreError
from hvd_estimators.store import Store
from hvd_estimators.store.redaction import redacted
from hvd_estimators.store.registry import facts, scheme_of
from hvd_estimators.store.storage_errors import Kind, kind_of, kind_of_text, text_of, typed_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# These are enough to detect a server that does not answer. The connectors' defaults take many
# minutes.
_IMPATIENT = {
    "fs.s3a.attempts.maximum": "2",
    "fs.s3a.retry.limit": "2",
    "fs.s3a.connection.establish.timeout": "10000",
    "fs.azure.io.retry.max.retries": "2",
    "fs.gs.http.max.retry": "2",
    "ipc.client.connect.max.retries": "2",
}

# Java's exceptions of storage clients and of full disks, in a text that also has stack traces. The
# message ends where a stack trace or another exception begins.
_STORAGE_ERROR = re.compile(
    r"^(?!\s*at ).*?\b("
    r"(?:java\.nio\.file\.AccessDeniedException|"
    r"java\.io\.IOException: (?:No space left on device|All datanodes|Failed to replace a bad "
    r"datanode|Could not get block locations|Unable to (?:create new block|close file))|"
    # Hadoop's descriptions of failed connections.
    r"java\.[\w.]+Exception: (?=.*(?:wiki\.apache\.org/hadoop|DestHost:destPort))|"
    r"(?:com\.amazonaws|software\.amazon|com\.google\.cloud|com\.microsoft\.azure|"
    r"org\.apache\.hadoop\.(?:fs\.(?:s3a|azurebfs|gs|oss)|hdfs|ipc|security))"
    r"\.[\w.$]*(?:Exception|Error)\b).*(?:\n(?!\s*(?:at |Caused by: |$)).*){0,4})",
    re.MULTILINE,
)
_MESSAGE_CHARS = 500


def spark_url(session: SparkSession, store: Store, path: str) -> str:
    """Return a path as a URL to which the session's Spark can write.

    Raises
    ------
    DependencyError
        If Spark has no connector for the path.
    """
    urls = store.spark_urls(path)
    if is_connect(session) or scheme_of(urls[0]) == "file":
        return urls[0]
    jvm, configuration = _jvm(session), _configuration(session)
    for url in urls:
        with contextlib.suppress(Py4JJavaError):
            jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme_of(url), configuration)
            return url
    schemes = [scheme_of(url) for url in urls]
    connector = next(filter(None, (facts(url).connector for url in urls)), None)
    remedy = (
        f"Add the package that has it to Spark, for all of {schemes}."
        if connector is None
        else connector.remedy(str(jvm.org.apache.hadoop.util.VersionInfo.getVersion()))
    )
    raise DependencyError(
        f"store: Spark cannot write to {urls[0]!r}: it has no connector for the scheme "
        f"{' or '.join(map(repr, schemes))}. {remedy}"
    )


def check_connector(session: SparkSession, store: Store) -> None:
    """Check that Spark writes to the storage that this process reads. Leaves no files behind.

    Raises
    ------
    DependencyError
        If Spark has no connector for the store, or if a package of the connector is missing.
    StoreError
        If Spark cannot write to the store, or writes to another place.
    """
    name = f".probe-{uuid.uuid4().hex}"
    probe = f"{store.data_folder}/{name}"
    url = f"{spark_url(session, store, store.data_folder)}/{name}"
    if is_connect(session) or scheme_of(url) == "file":
        return
    jvm, configuration = _jvm(session), _configuration(session)
    hadoop = jvm.org.apache.hadoop.fs
    for name, value in _IMPATIENT.items():
        configuration.set(name, value)
    try:
        path = hadoop.Path(url)
        # A new instance, because cached ones keep their longer timeouts.
        filesystem = hadoop.FileSystem.newInstance(path.toUri(), configuration)
        try:
            filesystem.create(path, True).close()
            is_seen = store.exists(probe)
            if is_seen:
                store.delete(probe)  # Spark's delete would leave a directory marker
            else:
                filesystem.delete(path, False)
        finally:
            filesystem.close()
    except Py4JJavaError as error:
        raise _typed(jvm, url, store, error) from None
    if not is_seen:
        raise StoreError(
            f"store: Spark writes to {url!r}, and Python does not see it at {probe!r}. Set a store "
            "that both take for the same: the same server (endpoint, name node) and bucket or "
            "folder."
        )


def _jvm(session: SparkSession) -> Any:
    return session.sparkContext._jvm


def _configuration(session: SparkSession) -> Any:
    """Return a copy of Hadoop's configuration, including the session's settings."""
    frame: Any = session.range(0)
    return frame._jdf.sparkSession().sessionState().newHadoopConf()


def _typed(jvm: Any, url: str, store: Store, error: Py4JJavaError) -> Exception:
    message = redacted(text_of(error), store.secrets)
    connector = facts(url).connector
    if any(name in message for name in ("NoClassDefFound", "ClassNotFound", "NoSuchMethodError")):
        version = str(jvm.org.apache.hadoop.util.VersionInfo.getVersion())
        remedy = connector.remedy(version) if connector else "Add the packages that it lacks."
        return DependencyError(
            f"store: Spark cannot write to {url!r}, since a package of its connector is missing "
            f"({message}). {remedy}"
        )
    settings = connector.settings if connector else "Set what its connector needs for it."
    typed = typed_error(kind_of(error), f"store: Spark cannot write to {url!r}", message)
    return type(typed)(f"{typed} {settings}")


@contextlib.contextmanager
def storage_errors(store: Store, url: str) -> Iterator[None]:
    """Convert a storage error of Spark's connector in the block to a `StoreError`.

    If the error is transient, it becomes a `StoreUnavailableError`. Other errors do not change.
    Executors read the rows of the DataFrame while they write, so the error may also be one of the
    storage that the rows come from.

    Parameters
    ----------
    store : Store
        The store that Spark writes to.
    url : str
        The folder, as Spark addresses it.
    """
    try:
        yield
    except Exception as error:
        # Spark's error contains executors' errors as text, and over Connect its own one, too.
        found = _STORAGE_ERROR.search(str(error))
        if found is None:
            raise
        message = redacted(found[1].replace("\n", " ")[:_MESSAGE_CHARS], store.secrets)
        connector = facts(url).connector
        settings = f" {connector.settings}" if connector else ""
        what = f"store: Spark failed while it wrote training data to {url!r}"
        remedy = "Check that there is enough space, and that credentials are valid until the end."
        typed = typed_error(kind_of_text(found[1]) or Kind.OTHER, what, message, remedy)
        raise type(typed)(
            f"{typed} If the rows come from other storage, check it, too.{settings}"
        ) from error
