"""Find the Spark session to use and its kind. Runs on the driver."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import pyspark
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from hvd_estimators.exceptions import DependencyError

_session: contextvars.ContextVar[SparkSession | None] = contextvars.ContextVar(
    "hvd_estimators session", default=None
)


@contextlib.contextmanager
def using_session(session: SparkSession) -> Iterator[None]:
    """Make `current_session` return a given session until the block ends."""
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


def known_session() -> SparkSession | None:
    """Return the session of `using_session`, else this thread's session, else None."""
    return _session.get() or SparkSession.getActiveSession()


def current_session() -> SparkSession:
    """Return the session of `using_session`, else this thread's session, else a new one.

    Raises
    ------
    DependencyError
        If no session can be created, for example in a thread without its Spark Connect session.
    """
    session = known_session()
    if session is not None:
        return session
    try:
        return SparkSession.builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise DependencyError(
            f"This thread has no Spark session, and creating one failed ({error}). Start the "
            "thread as pyspark.InheritableThread(target, session=spark), or set SPARK_REMOTE."
        ) from error


def is_connect(session: SparkSession) -> bool:
    """Return whether a session is a Spark Connect session, with the application on a server.

    Raises
    ------
    DependencyError
        If it is a Connect session of PySpark 3.5, whose clients receive no progress reports.
    """
    try:
        if session.sparkContext is not None:
            return False
    except (AttributeError, NotImplementedError):
        pass
    if not hasattr(session, "registerProgressHandler"):
        raise DependencyError(
            f"Spark Connect needs PySpark 4 or newer, found {pyspark.__version__}. Install "
            "'pyspark[connect]>=4' here and where the server runs, or use a session that is not "
            "one of Spark Connect (SparkSession.builder.master(...))."
        )
    return True


def is_stopped(session: SparkSession) -> bool:
    """Return whether a session's application, or its connection, was stopped."""
    if is_connect(session):
        return bool(getattr(session, "is_stopped", False))
    context = session.sparkContext._jsc
    return context is None or bool(context.sc().isStopped())
