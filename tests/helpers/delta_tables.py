"""Delta tables with features that `deltalake` reads but does not write."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def actions(table: Path, version: int = 0) -> list[dict[str, Any]]:
    """Return the actions of a commit."""
    log = table / "_delta_log" / f"{version:020d}.json"
    return [json.loads(line) for line in log.read_text().splitlines()]


def commit(table: Path, *new: dict[str, Any]) -> None:
    """Write actions as the table's next version."""
    version = len(list((table / "_delta_log").glob("*.json")))
    lines = "\n".join(json.dumps(action) for action in new)
    (table / "_delta_log" / f"{version:020d}.json").write_text(lines)


def protocol(*features: str) -> dict[str, Any]:
    """Return the action that sets reader features."""
    named = {"readerFeatures": list(features), "writerFeatures": list(features)}
    return {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **named}}


def hide_rows(table: Path, *rows: int) -> None:
    """Hide an even number of rows of the table's only file by a deletion vector, as Spark does."""
    (add,) = [action["add"] for action in actions(table) if "add" in action]
    # Delta's protocol: a bitmap in Roaring's format, as text in base 85.
    vector = struct.pack("<IQI", 1681511377, 1, 0)
    vector += struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16)
    vector += struct.pack(f"<{len(rows)}H", *rows)
    hidden = {
        **{"storageType": "i", "pathOrInlineDv": _z85(vector)},
        **{"sizeInBytes": len(vector), "cardinality": len(rows)},
    }
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    commit(table, protocol("deletionVectors"), {"remove": remove})
    commit(table, {"add": {**add, "deletionVector": hidden}})


def _z85(content: bytes) -> str:
    text = ""
    for (word,) in struct.iter_unpack(">I", content):
        text += "".join(_Z85[word // 85**power % 85] for power in range(4, -1, -1))
    return text
