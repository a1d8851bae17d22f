"""Classification of filesystem errors: whether a retry can help, and how the user can fix them.

fsspec's filesystems pass on the errors of their clients, which come in different forms: Python
errors, HTTP statuses and named error codes. Client errors are recognized by their class names, so
that no client must be installed. Runs on the driver and on ranks.
"""

from __future__ import annotations

import enum
import errno
import http.client
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from hvd_estimators.exceptions import HvdEstimatorsError

__all__ = ["REMEDIES", "Kind", "kind_of"]


class Kind(enum.Enum):
    """Kinds of storage errors."""

    TRANSIENT = "the storage or the network does not answer as it should"
    CREDENTIALS = "the credentials are missing, wrong or expired"
    PERMISSION = "permission is denied"
    SPACE = "there is no space left, or a quota is used up"
    MISSING = "there is no such file"
    OTHER = "unknown"


REMEDIES = {
    Kind.TRANSIENT: "See whether the storage is up and its address (endpoint, host, port) right.",
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

_CREDENTIAL_CODES = {
    "CredentialsNotSupported",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "UnrecognizedClientException",
}
_TRANSIENT_CODES = {
    "BadDigest",  # of a truncated upload
    "EC2ThrottledException",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "XAmzContentSHA256Mismatch",
}
_SPACE_CODES = {"QuotaExceeded", "QuotaExceededException", "ServiceQuotaExceededException"}
"""Error codes in responses of S3 and of services with the same protocol."""

_CLASSES = {
    "aiohttp.ClientConnectionError": Kind.TRANSIENT,
    "aiohttp.ClientConnectorCertificateError": Kind.OTHER,
    "aiohttp.ClientPayloadError": Kind.TRANSIENT,
    "aiohttp.ServerTimeoutError": Kind.TRANSIENT,
    "azure.ClientAuthenticationError": Kind.CREDENTIALS,
    "azure.IncompleteReadError": Kind.TRANSIENT,
    "azure.ServiceRequestError": Kind.TRANSIENT,
    "azure.ServiceResponseError": Kind.TRANSIENT,
    "botocore.ConnectionError": Kind.TRANSIENT,
    "botocore.CredentialRetrievalError": Kind.CREDENTIALS,
    "botocore.FlexibleChecksumError": Kind.TRANSIENT,
    "botocore.HTTPClientError": Kind.TRANSIENT,
    "botocore.IncompleteReadError": Kind.TRANSIENT,
    "botocore.LoginError": Kind.CREDENTIALS,
    "botocore.NoAuthTokenError": Kind.CREDENTIALS,
    "botocore.NoCredentialsError": Kind.CREDENTIALS,
    "botocore.PartialCredentialsError": Kind.CREDENTIALS,
    "botocore.ProfileNotFound": Kind.CREDENTIALS,
    "botocore.ResponseParserError": Kind.TRANSIENT,
    "botocore.SSLError": Kind.OTHER,
    "botocore.SSOError": Kind.CREDENTIALS,
    "botocore.TokenRetrievalError": Kind.CREDENTIALS,
    "google.DefaultCredentialsError": Kind.CREDENTIALS,
    "google.RefreshError": Kind.CREDENTIALS,
    "google.TransportError": Kind.TRANSIENT,
    "requests.ChunkedEncodingError": Kind.TRANSIENT,
    "requests.ConnectionError": Kind.TRANSIENT,
    "requests.Timeout": Kind.TRANSIENT,
    "urllib3.IncompleteRead": Kind.TRANSIENT,
    "urllib3.ProtocolError": Kind.TRANSIENT,
    "urllib3.TimeoutError": Kind.TRANSIENT,
}
"""Error classes of the clients, by package and class name."""

_ERRNOS = {
    **dict.fromkeys(
        (
            errno.EAGAIN,
            errno.EBUSY,  # s3fs raises it for HTTP 503
            errno.ECONNABORTED,
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ENETDOWN,
            errno.ENETRESET,
            errno.ENETUNREACH,
            errno.ENOTCONN,
            errno.EPIPE,
            errno.ETIMEDOUT,
            getattr(errno, "EREMOTEIO", errno.EBUSY),  # s3fs raises it for HTTP 500
            getattr(errno, "ESTALE", errno.EBUSY),
        ),
        Kind.TRANSIENT,
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Kind.PERMISSION),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Kind.SPACE),
    errno.ENOENT: Kind.MISSING,
}

# Messages of hdfs-native and PyArrow's libhdfs. They contain the class names of Hadoop's exceptions
# and of the Rust client's errors, which have no Python classes.
_HADOOP = (
    (Kind.SPACE, r"QuotaExceededException|DiskOutOfSpaceException"),
    (Kind.SPACE, r"There are [1-9]\d* datanode\(s\) running and (0|no) node\(s\) are excluded"),
    (Kind.CREDENTIALS, r"SASLError|GSSAPIError|GSSAPI error|NoSASLMechanism|SaslException"),
    (Kind.CREDENTIALS, r"InvalidToken|SecretManager|Kerberos"),
    (Kind.PERMISSION, r"AccessControlException|AuthorizationException"),
    (Kind.MISSING, r"java\.io\.FileNotFoundException"),
    (
        Kind.TRANSIENT,
        r"StandbyException|SafeModeException|RetriableException|ConnectException|"
        r"SocketTimeoutException|EOFException|IO error occurred while communicating|"
        r"DataTransferError|data transfer error|[Dd]ata[Nn]ode|datanode\(s\) running|"
        r"RPC listener|ChecksumError|Failed to complete file|[Nn]odes failed|[Bb]lock writer|"
        r"BlockMissingException|Insufficient blocks|Connection (refused|reset|closed)|[Tt]imed out",
    ),
)


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an error; its root cause takes precedence, being the most specific."""
    for found in reversed(list(_causes(error))):
        kind = _kind_of_one(found)
        if kind is not Kind.OTHER:
            return kind
    return Kind.OTHER


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, HvdEstimatorsError):
            return  # already classified
        seen.add(id(found))
        yield found
        found = found.__cause__


def _kind_of_one(error: BaseException) -> Kind:
    if not isinstance(error, Exception):
        return Kind.OTHER
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        return _kind_of_answer(response, str(getattr(error, "operation_name", "")))
    for cls in type(error).__mro__:
        kind = _CLASSES.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if kind is not None:
            return kind
    status = _status(error)
    if status is not None:
        return _kind_of_status(status)
    return _kind_of_pythons(error)


def _kind_of_answer(response: Mapping[str, Any], operation: str) -> Kind:
    """Return the kind of an S3 error response, as found in botocore's ClientError."""
    code = str(response.get("Error", {}).get("Code", ""))
    for codes, kind in (
        (_CREDENTIAL_CODES, Kind.CREDENTIALS),
        (_TRANSIENT_CODES, Kind.TRANSIENT),
        (_SPACE_CODES, Kind.SPACE),
    ):
        if code in codes:
            return kind
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
    holders = (error, getattr(error, "response", None))
    for holder in holders:
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
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


def _kind_of_pythons(error: Exception) -> Kind:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Kind.OTHER
    if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLError, http.client.IncompleteRead)):
        return Kind.TRANSIENT
    if isinstance(error, socket.gaierror):
        return Kind.TRANSIENT if error.errno == socket.EAI_AGAIN else Kind.OTHER
    if isinstance(error, FileNotFoundError):
        return Kind.MISSING
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    if isinstance(error, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        return Kind.OTHER
    if isinstance(error, (OSError, RuntimeError)):
        text = str(error)
        for kind, pattern in _HADOOP:
            if re.search(pattern, text):
                return kind
    return Kind.PERMISSION if isinstance(error, PermissionError) else Kind.OTHER
