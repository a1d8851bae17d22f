"""Classification of filesystem errors: whether a retry can help, and how the user can fix them.

fsspec's filesystems pass on the errors of their clients, which come in different forms: Python
errors, HTTP statuses and named error codes. Client errors are recognized by their class names, so
that no client must be installed. Errors of Spark's clients are Java exceptions.

Readers, frameworks and user code write temporary files. If the disk is full, each raises another
error, which seldom names the folder. `naming_full_disk` names it.

Runs on the driver and on ranks.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import http.client
import math
import os
import re
import shutil
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from hvd_estimators.exceptions import HvdEstimatorsError, StoreError, StoreUnavailableError


class Kind(enum.Enum):
    """Kinds of storage errors."""

    TRANSIENT = "the storage or the network does not answer as it should"
    STARTING = "the name node has started a short time ago, and is in safe mode"
    NO_DATA_NODE = "the name node answers, and no data node can be used"
    SAFE_MODE = "the name node is in safe mode, which does not end by itself"
    UNKNOWN_HOST = "the host is unknown"
    CREDENTIALS = "the credentials are missing, wrong or expired"
    PERMISSION = "permission is denied"
    SPACE = "no space left, or a quota is used up"
    MISSING = "the file does not exist"
    OTHER = "unknown"

    @property
    def is_transient(self) -> bool:
        """True if a retry may succeed."""
        return self in (Kind.TRANSIENT, Kind.STARTING, Kind.NO_DATA_NODE)

    @property
    def error_class(self) -> type[StoreError]:
        """Class of the typed error."""
        return StoreUnavailableError if self.is_transient else StoreError


REMEDIES = {
    Kind.TRANSIENT: "See whether the storage is up and its address (endpoint, host, port) right.",
    Kind.STARTING: (
        "Safe mode ends when the data nodes have reported their blocks. If it does not, see "
        "whether they are up (hdfs dfsadmin -report)."
    ),
    Kind.NO_DATA_NODE: (
        "See whether data nodes are up (hdfs dfsadmin -report), and whether the driver and all "
        "executors can reach them."
    ),
    Kind.SAFE_MODE: (
        "Ask the administrator of HDFS to end it (hdfs dfsadmin -safemode leave). If the name "
        "node's disk is full, it needs space first."
    ),
    Kind.UNKNOWN_HOST: (
        "See whether the address is right, and whether the driver and all executors can resolve "
        "it. Hadoop's configuration (HADOOP_CONF_DIR) defines name services."
    ),
    Kind.CREDENTIALS: (
        "Set valid credentials: the store's storage_options, or what the filesystem's client finds "
        "by itself (environment, profile, role, ticket cache) on the driver and on all executors."
    ),
    Kind.PERMISSION: (
        "Let the user or role of these credentials read, write, list and delete under the store's "
        "paths, or set other credentials or other paths."
    ),
    Kind.SPACE: "Free space, raise the quota, or set a store elsewhere.",
}
"""Suggested fix for each kind of error."""

_CODES = {
    **dict.fromkeys(
        (
            *("CredentialsNotSupported", "ExpiredToken", "ExpiredTokenException"),
            *("InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity", "InvalidToken"),
            *("RequestTimeTooSkewed", "SignatureDoesNotMatch", "TokenRefreshRequired"),
            "UnrecognizedClientException",
        ),
        Kind.CREDENTIALS,
    ),
    **dict.fromkeys(
        (
            "BadDigest",  # of a truncated upload
            *("EC2ThrottledException", "IncompleteBody", "InternalError", "OperationAborted"),
            *("PriorRequestNotComplete", "RequestLimitExceeded", "RequestTimeout"),
            *("RequestTimeoutException", "ServiceUnavailable", "SlowDown", "Throttling"),
            *("ThrottlingException", "TooManyRequestsException", "XAmzContentSHA256Mismatch"),
        ),
        Kind.TRANSIENT,
    ),
    **dict.fromkeys(
        ("QuotaExceeded", "QuotaExceededException", "ServiceQuotaExceededException"), Kind.SPACE
    ),
}
"""Error codes in responses of S3 and of services with the same protocol."""

_CLASSES = {
    **dict.fromkeys(
        (
            *("aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError"),
            *("aiohttp.ServerTimeoutError", "azure.IncompleteReadError"),
            *("azure.ServiceRequestError", "azure.ServiceResponseError"),
            *("botocore.ConnectionError", "botocore.FlexibleChecksumError"),
            *("botocore.HTTPClientError", "botocore.IncompleteReadError"),
            *("botocore.ResponseParserError", "google.TransportError"),
            *("requests.ChunkedEncodingError", "requests.ConnectionError", "requests.Timeout"),
            *("urllib3.IncompleteRead", "urllib3.ProtocolError", "urllib3.TimeoutError"),
        ),
        Kind.TRANSIENT,
    ),
    **dict.fromkeys(
        (
            *("azure.ClientAuthenticationError", "botocore.CredentialRetrievalError"),
            *("botocore.LoginError", "botocore.NoAuthTokenError", "botocore.NoCredentialsError"),
            *("botocore.PartialCredentialsError", "botocore.ProfileNotFound"),
            *("botocore.SSOError", "botocore.TokenRetrievalError"),
            *("google.DefaultCredentialsError", "google.RefreshError"),
        ),
        Kind.CREDENTIALS,
    ),
    **dict.fromkeys(("aiohttp.ClientConnectorCertificateError", "botocore.SSLError"), Kind.OTHER),
}
"""Error classes of the clients, by package and class name."""

_ERRNOS = {
    getattr(errno, name): kind
    for kind, names in {
        # s3fs raises EBUSY for HTTP 503, and EREMOTEIO for HTTP 500.
        Kind.TRANSIENT: (
            *("EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN"),
            *("EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOTCONN", "EPIPE"),
            *("EREMOTEIO", "ESTALE", "ETIMEDOUT"),
        ),
        Kind.PERMISSION: ("EACCES", "EPERM", "EROFS"),
        Kind.SPACE: ("ENOSPC", "EDQUOT", "EFBIG"),
        Kind.MISSING: ("ENOENT",),
    }.items()
    for name in names
    if hasattr(errno, name)  # some exist on Linux only
}

# Messages of hdfs-native and of Hadoop's Java clients. They contain the class names of Hadoop's
# exceptions and of the Rust client's errors, which have no Python classes.
_HADOOP = (
    # HDFS says whether safe mode ends by itself. It does not if an administrator turned it on, if
    # the name node's disk is full, or if blocks are newer than the name node's files.
    (Kind.STARTING, r"(?s)SafeModeException.*Safe mode will be turned off automatically"),
    (Kind.SAFE_MODE, r"SafeModeException"),
    (Kind.SPACE, r"QuotaExceededException|DiskOutOfSpaceException|No space left on device"),
    (Kind.SPACE, r"There are [1-9]\d* datanode\(s\) running and (0|no) node\(s\) are excluded"),
    (Kind.CREDENTIALS, r"SASLError|GSSAPIError|GSSAPI error|NoSASLMechanism|SaslException"),
    (Kind.CREDENTIALS, r"InvalidToken|SecretManager|Kerberos"),
    (Kind.PERMISSION, r"AccessControlException|AuthorizationException"),
    (Kind.MISSING, r"java\.io\.FileNotFoundException"),
    (Kind.TRANSIENT, r"Temporary failure in name resolution"),
    (Kind.UNKNOWN_HOST, r"failed to lookup address|UnknownHostException"),
    (
        Kind.NO_DATA_NODE,
        r"DataTransferError|data transfer error|datanode\(s\) running|All datanodes|"
        r"bad datanode|[Nn]odes failed|BlockMissingException|Could not obtain block|"
        r"Could not get block locations",
    ),
    (
        Kind.TRANSIENT,
        r"StandbyException|RetriableException|ConnectException|NoRouteToHostException|"
        r"SocketTimeoutException|EOFException|IO error occurred while communicating|"
        r"[Dd]ata[Nn]ode|RPC listener|ChecksumError|Failed to complete file|[Bb]lock writer|"
        r"Unable to (create new block|close file)|Insufficient blocks|"
        r"Connection (refused|reset|closed)|[Tt]imed out",
    ),
)

_FULL = re.compile("|".join(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)))

_FAILED_WRITE = re.compile(
    r"PytorchStreamWriter failed|iostream error|unexpected pos \d+ vs"  # torch
    r"|\d+ requested and \d+ written"  # NumPy's tofile
)
"""Messages of failed writes that do not include the reason."""

_FULL_BYTES = 2**26
"""Free space below which a failed write without a reason counts as a lack of space."""

_MOST_ERROR_CHARACTERS = 500

_TRACE = re.compile(r"(?:\n|\\n)(?:\s|\\t)*(?:at |Caused by: )")
"""The start of a Java stack trace, in a text or in a Rust string."""

_RPC_ERROR = re.compile(r"RPCError\(\"(?:[\w$]+\.)*([\w$]+)\", \"(.*)", re.DOTALL)
"""hdfs-native's form of an exception of the name node, without the stack trace."""


def text_of(error: BaseException) -> str:
    """Return the class and message of one error, without a stack trace of Java."""
    java = _java_messages(error)
    if java:
        return "; caused by ".join(java)
    text = _TRACE.split(str(error), maxsplit=1)[0]
    rpc = _RPC_ERROR.match(text)
    if rpc is None:
        return f"{type(error).__name__}: {text}".rstrip(": ")
    message = rpc[2].removesuffix('")').replace('\\"', '"').replace("\\n", " ")
    return f"{rpc[1]}: {message}"


def _java_messages(error: BaseException) -> list[str]:
    """Return the messages of py4j's error and of its causes in Java; none for other errors."""
    messages: dict[str, None] = {}
    cause = getattr(error, "java_exception", None)
    while cause is not None and len(messages) < 5:
        message = _TRACE.split(str(cause.toString()), maxsplit=1)[0].replace("\n", " ")
        # The client wraps the name node's exception in one of the same message.
        if not any(message.partition(": ")[2] in earlier for earlier in messages):
            messages[message] = None
        cause = cause.getCause()
    return list(messages)


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an error; its root cause takes precedence, being the most specific."""
    for cause in reversed(list(_causes(error))):
        kind = _kind_of_one(cause)
        if kind is not Kind.OTHER:
            return kind
    return Kind.OTHER


def _causes(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        if isinstance(cause, HvdEstimatorsError):
            return  # already classified
        visited.add(id(cause))
        yield cause
        cause = cause.__cause__


def _kind_of_one(error: BaseException) -> Kind:
    if not isinstance(error, Exception):
        return Kind.OTHER
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        return _kind_of_response(response, str(getattr(error, "operation_name", "")))
    for cls in type(error).__mro__:
        kind = _CLASSES.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if kind is not None:
            return kind
    status = _status(error)
    if status is not None:
        return _kind_of_status(status)
    return _kind_of_python_error(error)


def _kind_of_response(response: Mapping[str, Any], operation: str) -> Kind:
    """Return the kind of an S3 error response, as found in botocore's ClientError."""
    code = str(response.get("Error", {}).get("Code", ""))
    if code in _CODES:
        return _CODES[code]
    if code.startswith("NoSuch"):
        return Kind.MISSING
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status is None and code.isdigit():
        status = int(code)
    if status == 400 and operation.startswith("Head"):
        # A response to HEAD has no body that could contain ExpiredToken.
        return Kind.CREDENTIALS
    return Kind.OTHER if status is None else _kind_of_status(int(status))


def _status(error: Exception) -> int | None:
    """Return the HTTP status of a client's error, or None."""
    if type(error).__module__ == "builtins":
        return None
    for source in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(source, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None


def _kind_of_status(status: int) -> Kind:
    if status in (401, 407):
        return Kind.CREDENTIALS
    if status == 403:
        return Kind.PERMISSION
    if status in (404, 410):
        return Kind.MISSING
    if status == 507:
        return Kind.SPACE
    if status in (408, 425, 429) or (status >= 500 and status not in (501, 505)):
        return Kind.TRANSIENT
    return Kind.OTHER


def _kind_of_python_error(error: Exception) -> Kind:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Kind.OTHER
    if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLError, http.client.IncompleteRead)):
        return Kind.TRANSIENT
    if isinstance(error, socket.gaierror):
        return Kind.TRANSIENT if error.errno == socket.EAI_AGAIN else Kind.UNKNOWN_HOST
    if isinstance(error, FileNotFoundError):
        return Kind.MISSING
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    if isinstance(error, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        return Kind.OTHER
    kind = Kind.OTHER
    if hasattr(error, "java_exception"):
        kind = kind_of_text("; ".join(_java_messages(error)))
    elif isinstance(error, (OSError, RuntimeError)):
        kind = kind_of_text(str(error))
    is_denied = kind is Kind.OTHER and isinstance(error, PermissionError)
    return Kind.PERMISSION if is_denied else kind


def kind_of_text(text: str) -> Kind:
    """Return the kind of an error from its text. Hadoop's clients give nothing else."""
    # Frames of a stack trace have names like the patterns.
    text = _TRACE.split(text, maxsplit=1)[0]
    return next((kind for kind, pattern in _HADOOP if re.search(pattern, text)), Kind.OTHER)


_SYSTEM_ERRNOS = {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENXIO}
"""Errors of a disk, a mount or a limit, which say nothing about a file's content."""


def not_damage(error: BaseException, path: str) -> BaseException | None:
    """Return the error to raise if a file could not be read and its content is not the cause.

    Parameters
    ----------
    error : BaseException
        Any error of reading a file or of parsing its content.
    path : str
        The file.

    Returns
    -------
    BaseException or None
        A MemoryError or a `StoreError` that says what failed. None if the content may be the cause,
        or if the file is missing.
    """
    where = f"reading {path!r} on the machine {socket.gethostname()}"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return MemoryError(
            f"Memory ran out at {where} ({text_of(error)}). Give each rank more memory, or set a "
            "smaller shuffle_buffer_size or fewer train_reader_num_workers."
        )
    if not isinstance(error, OSError):
        return None
    kind = kind_of(error)
    if kind is Kind.OTHER and error.errno in _SYSTEM_ERRNOS:
        return StoreError(
            f"The store failed at {where} ({text_of(error)}). The file may be intact: see whether "
            "the disk, the mount and the limits of that machine are in order."
        )
    if kind in (Kind.OTHER, Kind.MISSING):
        return None
    return kind.error_class(
        f"The store failed at {where}: {kind.value} ({text_of(error)}). {REMEDIES[kind]}"
    )


@contextlib.contextmanager
def naming_full_disk() -> Iterator[None]:
    """Convert errors of the block that a full disk causes to a `StoreError`.

    Its message names the folder, the free space and the remedy. A `StoreError` is not changed.

    Raises
    ------
    StoreError
        If a disk is full, or a quota is used up.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        if not _is_full(error):
            raise
        raise StoreError(_full_disk_message(error)) from error


def _is_full(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if kind_of(error) is Kind.SPACE or _FULL.search(str(error)):
            return True
        if _FAILED_WRITE.search(str(error)) and _free_bytes(_temporary_folder()) < _FULL_BYTES:
            return True
        error = error.__cause__
    return False


def _full_disk_message(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]
    temporary = _temporary_folder()
    free = _free_bytes(temporary) / 1e6
    file = getattr(error, "filename", None)
    folder = os.path.dirname(file) if isinstance(file, str) else temporary
    found = f"No space is left on a disk, or a quota is used up ({text})."
    if not _same_disk(folder, temporary):
        return f"{found} Free space in {folder!r}, or write the file elsewhere."
    return (
        f"{found} Temporary files are in {temporary!r}, whose disk has {free:,.1f} MB left. "
        "Free space there, or set the environment variable TMPDIR to a folder with more space (on "
        "Spark: spark.executorEnv.TMPDIR)."
    )


def _temporary_folder() -> str:
    # Python itself passes over a TMPDIR that is full when it first needs the folder.
    return tempfile.tempdir or os.environ.get("TMPDIR") or tempfile.gettempdir()


def _same_disk(folder: str, other: str) -> bool:
    while folder and not os.path.exists(folder):  # the writer may have deleted its folder
        folder = os.path.dirname(folder)
    try:
        return os.stat(folder or ".").st_dev == os.stat(other).st_dev
    except OSError:
        return True


def _free_bytes(folder: str) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.nan
