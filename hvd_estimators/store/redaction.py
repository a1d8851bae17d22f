"""Recognition and masking of secrets in URLs, options and messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_SECRET_NAMES = re.compile(
    r"(?i)key|secret|token|passw|credential|sas|signature|connection_string|anon_id"
)
_SIGNED = re.compile(r"(?i)[?&](sig|signature|x-(amz|goog)-[a-z-]+|awsaccesskeyid|token)=")
_SECRET_TEXTS = (
    # User and password, or key and secret, before a host. The first part has no colon: otherwise a
    # line of colons would take quadratic time.
    (re.compile(r"://[^/@:\s'\"]*:[^@\s'\"]*@"), "://***@"),
    (
        re.compile(
            r"(?i)\b(sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)|"
            r"(?:access|account|secret|session|security|api)?[-_]?(?:key|token|secret|password)|"
            r"sharedaccesssignature|awsaccesskeyid|authorization)(\s*[=:]\s*|%3D)[^&\s'\",;)]+"
        ),
        r"\1\2***",
    ),
)


def holds_credentials(path: str) -> bool:
    """Return whether a URL contains a user and password, a key and secret, or a signature."""
    _, separator, rest = path.partition("://")
    if not separator:
        return False
    user, at, _ = rest.partition("/")[0].rpartition("@")
    # A secret may contain a slash before the "@"; a host may not.
    before = rest.rpartition("@")[0]
    return (bool(at) and ":" in user) or (
        bool(re.match(r"[^/@]+:(?!\d+/)[^@]*$", before)) or bool(_SIGNED.search(rest))
    )


def secret_values(options: Any) -> frozenset[str]:
    """Return the option values that may be secrets, judging by the option names."""
    secrets: set[str] = set()

    def collect(value: Any, is_secret: bool) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                collect(item, is_secret or bool(_SECRET_NAMES.search(str(name))))
        elif isinstance(value, (list, tuple, set)):
            for item in value:
                collect(item, is_secret)
        elif is_secret and isinstance(value, (str, bytes)) and len(value) >= 6:
            secrets.add(value.decode(errors="replace") if isinstance(value, bytes) else value)

    collect(options, False)
    return frozenset(secrets)


def redacted(text: str, secrets: Collection[str] = ()) -> str:
    """Return a text with known secrets, and credentials in URLs, masked."""
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    for pattern, replacement in _SECRET_TEXTS:
        text = pattern.sub(replacement, text)
    return text
