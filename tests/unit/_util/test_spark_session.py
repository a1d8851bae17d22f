"""Classic and Spark Connect sessions."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.prepare.schema import require_frame


class Classic:
    sparkContext = object()


class Connect:
    """As in PySpark 4."""

    @property
    def sparkContext(self) -> Any:
        raise AttributeError("JVM_ATTRIBUTE_NOT_SUPPORTED")

    def registerProgressHandler(self, handler: Any) -> None: ...


class OldConnect:
    """As in PySpark 3.5."""

    @property
    def sparkContext(self) -> Any:
        raise NotImplementedError("sparkContext() is not implemented.")


class Frame:
    sparkSession = OldConnect()


def test_connect_sessions_are_recognized_by_their_attributes() -> None:
    sessions: list[Any] = [Classic(), Connect()]
    assert [is_connect(session) for session in sessions] == [False, True]


def test_connect_clients_of_an_older_pyspark_are_rejected_with_a_remedy() -> None:
    old: Any = OldConnect()
    with pytest.raises(DependencyError, match=r"needs PySpark 4 or newer.*pyspark\[connect\]>=4"):
        is_connect(old)
    with pytest.raises(DependencyError, match="Spark Connect needs PySpark 4"):
        require_frame("df", Frame())
