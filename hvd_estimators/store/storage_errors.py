"""Classification of filesystem errors: whether a retry can help, and how the user can fix them.

fsspec's filesystems pass on the errors of their clients, which come in different forms: Python
errors, HTTP statuses, error codes, names of classes, and texts. Clients are recognized by the names
of their classes, so that none must be installed. Errors of Spark's clients are Java exceptions.

Readers, frameworks and user code write temporary files. If the disk is full, each raises another
error, which seldom names the folder. `naming_full_disk` names it.

Runs on the driver and on ranks.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import http.client
import itertools
import os
import re
import shutil
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping

from hvd_estimators.exceptions import HvdEstimatorsError, StoreError, StoreUnavailableError


class Kind(enum.Enum):
    """Kinds of storage errors. Only a transient one may vanish if the operation is retried."""

    TRANSIENT = "the storage or the network does not answer as it should"
    FORBIDDEN = "access is denied by permissions, credentials or a read-only mode"
    FULL = "no space left, or a quota is used up"
    MISSING = "the file does not exist"
    OTHER = "unknown"


REMEDIES = {
    Kind.TRANSIENT: (
        "See whether the storage is up (HDFS: hdfs dfsadmin -report), its address right (endpoint, "
        "host, port), and whether the driver and all executors can reach it."
    ),
    Kind.FORBIDDEN: (
        "Set valid credentials that may read, write, list and delete under the store's paths: the "
        "store's storage_options, or what the filesystem's client finds by itself (environment, "
        "profile, role, ticket cache) on the driver and on all executors. Or set other paths."
    ),
    Kind.FULL: "Free space, raise the quota, or set a store elsewhere.",
}
"""Suggested fix for each kind of error."""


def typed_error(kind: Kind, what: str, text: str, default: str = "") -> StoreError:
    """Return a storage error with its suggested fix.

    Parameters
    ----------
    kind : Kind
        Kind of the error.
    what : str
        The operation that failed, as a sentence without an end.
    text : str
        The error of the client.
    default : str
        Suggested fix for an error of another kind. Default: none.
    """
    error_class = StoreUnavailableError if kind is Kind.TRANSIENT else StoreError
    cause = f": {kind.value}" if kind in REMEDIES else ""
    return error_class(f"{what}{cause} ({text}). {REMEDIES.get(kind, default)}".rstrip())


_ERRNOS = {
    getattr(errno, name): kind
    for kind, names in {
        # s3fs raises EBUSY for HTTP 503, and EREMOTEIO for HTTP 500.
        Kind.TRANSIENT: (
            *("EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN"),
            *("EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOTCONN", "EPIPE"),
            *("EREMOTEIO", "ESTALE", "ETIMEDOUT"),
        ),
        Kind.FORBIDDEN: ("EACCES", "EPERM", "EROFS"),
        Kind.FULL: ("ENOSPC", "EDQUOT", "EFBIG"),
        Kind.MISSING: ("ENOENT",),
    }.items()
    for name in names
    if hasattr(errno, name)  # some exist on Linux only
}

_STATUSES = {
    **dict.fromkeys((401, 403, 407), Kind.FORBIDDEN),
    **dict.fromkeys((404, 410), Kind.MISSING),
    **dict.fromkeys((408, 425, 429), Kind.TRANSIENT),
    **dict.fromkeys((501, 505), Kind.OTHER),
    507: Kind.FULL,
}

_PATTERNS = (
    (Kind.OTHER, r"SSLError|failed to lookup address(?!.*Temporary failure)|UnknownHostException"),
    (Kind.FULL, r"QuotaExceeded|DiskOutOfSpaceException|No space left on device"),
    (Kind.FULL, r"There are [1-9]\d* datanode\(s\) running and (0|no) node\(s\) are excluded"),
    # A name node leaves its safe mode by itself, unless an administrator turned it on, or the name
    # node's disk is full.
    (Kind.FORBIDDEN, r"SafeModeException(?!.*Safe mode will be turned off automatically)"),
    (Kind.MISSING, r"code=NoSuch|java\.io\.FileNotFoundException"),
    (
        Kind.FORBIDDEN,
        # A response to HEAD has no body that could contain ExpiredToken.
        r"code=400|AccessControlException|Authenticat|Authorization|AuthToken|Credential|Expired|"
        r"GSSAPI|Invalid(AccessKey|ClientToken|Security|Token)|Kerberos|LoginError|NoSASLMechanism|"
        r"ProfileNotFound|RefreshError|SASLError|SSOError|SaslException|SecretManager|"
        r"SignatureDoesNotMatch|TimeTooSkewed|Token(Refresh|Retrieval)|UnrecognizedClient",
    ),
    (
        Kind.TRANSIENT,
        # Clients of object stores, and HTTP.
        r"BadDigest|ChunkedEncoding|ConditionalRequestConflict|ConnectionError|FlexibleChecksum|"
        r"HTTPClientError|Incomplete|PayloadError|PriorRequest|ProtocolError|ResponseParser|ServiceRe(quest|sponse)Error|"
        r"SHA256Mismatch|SlowDown|Throttl|TransportError|Timeout|"
        # hdfs-native and Hadoop's Java clients.
        r"BlockMissing|ChecksumError|ConnectException|Connection (refused|reset|closed)|"
        r"Could not (get|obtain) block|EOFException|Failed to complete file|Insufficient blocks|"
        r"IO error occurred while communicating|NoRouteToHost|RPC listener|RetriableException|"
        r"SafeModeException|StandbyException|Temporary failure in name|Unable to (create|close)|"
        r"[Bb]ad datanode|[Bb]lock writer|[Dd]ata ?[Nn]ode|[Dd]ata ?[Tt]ransfer ?[Ee]rror|"
        r"[Nn]odes failed|[Tt]imed out",
    ),
)
"""Patterns of class names, codes of responses and texts, in order of precedence.

Errors of HDFS have no Python classes. Their texts contain the names of Hadoop's exceptions and of
the Rust client's errors.
"""

_TRACE = re.compile(r"(?:\n|\\n)(?:\s|\\t)*(?:at |Caused by: )")
"""The start of a Java stack trace, in a text or in a Rust string."""

_RPC_ERROR = re.compile(r"RPCError\(\"(?:[\w$]+\.)*([\w$]+)\", \"(.*)", re.DOTALL)
"""hdfs-native's form of an exception of the name node, without the stack trace."""


def text_of(error: BaseException) -> str:
    """Return the class and message of one error, without a stack trace of Java."""
    java = getattr(error, "java_exception", None)
    if java is not None:
        return _TRACE.split(str(java.toString()), maxsplit=1)[0].replace("\n", " ")
    text = _TRACE.split(str(error), maxsplit=1)[0]
    rpc = _RPC_ERROR.match(text)
    if rpc is None:
        return f"{type(error).__name__}: {text}".rstrip(": ")
    message = rpc[2].removesuffix('")').replace('\\"', '"').replace("\\n", " ")
    return f"{rpc[1]}: {message}"


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an error; its root cause takes precedence, being the most specific."""
    # This package's own errors are already classified.
    causes = itertools.takewhile(lambda e: not isinstance(e, HvdEstimatorsError), _chain(error))
    kinds = map(_kind_of_one, reversed([*causes]))
    return next((kind for kind in kinds if kind is not None), Kind.OTHER)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = cause.__cause__


def _kind_of_one(error: BaseException) -> Kind | None:
    """Return the kind of an error regardless of its cause; None if nothing tells it."""
    if isinstance(error, (ssl.SSLCertVerificationError, FileExistsError)):
        return Kind.OTHER
    if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLError, http.client.IncompleteRead)):
        return Kind.TRANSIENT
    if isinstance(error, socket.gaierror):
        return Kind.TRANSIENT if error.errno == socket.EAI_AGAIN else Kind.OTHER
    if isinstance(error, FileNotFoundError):
        return Kind.MISSING
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    classes = (cls for cls in type(error).__mro__ if cls.__module__ != "builtins")
    described = " ".join(cls.__name__ for cls in classes)
    response = getattr(error, "response", None)
    status = None
    if isinstance(response, Mapping):  # of botocore
        described += f" code={response.get('Error', {}).get('Code')}"
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif described:
        found = (getattr(source, name, None) for source in (error, response) for name in _STATUS)
        status = next((each for each in found if isinstance(each, int)), None)
    has_text = isinstance(error, (OSError, RuntimeError)) and not getattr(error, "errno", None)
    if has_text or hasattr(error, "java_exception"):
        described += f" {text_of(error)}"
    kind = kind_of_text(described)
    if kind is not None:
        return kind
    if status in _STATUSES:
        return _STATUSES[status]
    if isinstance(error, PermissionError):
        return Kind.FORBIDDEN
    return Kind.TRANSIENT if 500 <= (status or 0) < 600 else None


_STATUS = ("status_code", "status", "code")


def kind_of_text(text: str) -> Kind | None:
    """Return the kind of an error from its text; None if the text does not tell it."""
    # Frames of a stack trace have names like the patterns.
    text = _TRACE.split(text, maxsplit=1)[0].replace("\n", " ")
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, text)), None)


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
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return MemoryError(
            f"The memory of a GPU ran out at {where} ({text_of(error)}). End other processes that "
            "use this GPU, or give each rank a GPU with more memory."
        )
    is_of_torch = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    no_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if no_memory or is_of_torch:
        return MemoryError(
            f"Memory ran out at {where} ({text_of(error)}). Give each rank more memory, or set a "
            "smaller shuffle_buffer_size or fewer train_reader_num_workers."
        )
    if not isinstance(error, OSError):
        return None
    kind = kind_of(error)
    if kind not in REMEDIES and error.errno not in _SYSTEM_ERRNOS:
        return None
    remedy = (
        "The file may be intact: see whether the disk, the mount and the limits of that machine "
        "are in order."
    )
    return typed_error(kind, f"The store failed at {where}", text_of(error), remedy)


_NO_SPACE = re.compile("|".join(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)))

_FAILED_WRITE = re.compile(
    r"PytorchStreamWriter failed|iostream error|unexpected pos \d+ vs"  # torch
    r"|\d+ requested and \d+ written"  # NumPy's tofile
)
"""Messages of failed writes that do not include the reason."""

_FULL_BYTES = 2**26
"""Free space below which a failed write without a reason counts as a lack of space."""

_MOST_ERROR_CHARACTERS = 500


@contextlib.contextmanager
def naming_full_disk() -> Iterator[None]:
    """Convert errors of the block that a full disk causes to a `StoreError`.

    Its message names the folder and the remedy. A `StoreError` is not changed.

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
        # Python itself passes over a TMPDIR that is full when it first needs the folder.
        temporary = tempfile.tempdir or os.environ.get("TMPDIR") or tempfile.gettempdir()
        free = _free_bytes(temporary)
        if not any(_is_full(cause, free) for cause in _chain(error)):
            raise
        file = getattr(error, "filename", None)
        folder = os.path.dirname(file) if isinstance(file, str) else temporary
        text = f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]
        raise StoreError(
            f"No space is left on a disk, or a quota is used up ({text}). Free space in "
            f"{folder!r}. Temporary files are in {temporary!r}, whose disk has {free / 1e6:,.1f} "
            "MB left: the environment variable TMPDIR sets a folder with more space (on Spark: "
            "spark.executorEnv.TMPDIR)."
        ) from error


def _is_full(error: BaseException, free: float) -> bool:
    text = str(error)
    has_failed = free < _FULL_BYTES and _FAILED_WRITE.search(text)
    return kind_of(error) is Kind.FULL or bool(_NO_SPACE.search(text) or has_failed)


def _free_bytes(folder: str) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return float("nan")
