"""Errors about missing columns suggest the column that was meant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.prepare.schema import require_columns, require_frame

STOPPED = SimpleNamespace(isStopped=lambda: True)


@pytest.mark.parametrize(
    ("name", "case_sensitive", "hint"),
    [
        ("GRÖSSE", "false", r"Größe\.$"),
        ("größe", "false", r"\. Write 'Größe': upper and lower case"),
        ("größe", "true", r"\. Did you mean 'Größe'\?$"),
        ("pr.ice", "false", r"\. Did you mean 'pri\.ce'\?$"),
    ],
)
def test_a_missing_name_has_a_hint(name: str, case_sensitive: str, hint: str) -> None:
    conf = {"spark.sql.caseSensitive": case_sensitive}
    frame: Any = SimpleNamespace(
        columns=["pri.ce", "Größe"], sparkSession=SimpleNamespace(conf=conf)
    )
    with pytest.raises(ColumnError, match=f"feature_cols: .* no column '{name}'.*{hint}"):
        require_columns(frame, "feature_cols", [name])


@pytest.mark.parametrize("context", [None, SimpleNamespace(sc=lambda: STOPPED)])
def test_frames_of_a_stopped_session_are_named(context: Any) -> None:
    # PySpark forgets the context that it stops; the JVM may stop one by itself.
    session = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=context))
    frame: Any = SimpleNamespace(sparkSession=session)
    with pytest.raises(ParamError, match=r"validation: .* session that was stopped\. Start"):
        require_frame("validation", frame)
