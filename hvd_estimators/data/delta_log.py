"""Active files of a Delta table, read from its log by `deltalake`. Runs on the driver.

The log alone says which files of the table's folder are current. `deltalake` reads only the log,
and a store fetches that, so any store's credentials suffice.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from hvd_estimators._util.documents import parse_object
from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.data.tables import TableFile
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.base import Store

DELTA_LOG = "_delta_log"
"""Name of the folder of a Delta table's log."""

_READABLE = {
    *("columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("typeWidening", "typeWidening-preview", "variantType", "variantType-preview"),
}
"""Features of Delta's protocol with which files can be read one by one.

Mapped columns and deletion vectors are errors of their own if a table uses them.
"""


@dataclass(frozen=True)
class DeltaLog:
    """The current version of a Delta table.

    Attributes
    ----------
    schema : str
        JSON of the schema, in Spark's format.
    files : mapping of str to TableFile
        Path, relative to the table's folder, to file.
    """

    schema: str
    files: Mapping[str, TableFile]


def read_delta_log(store: Store, table: str) -> DeltaLog:
    """Read the current version of a Delta table.

    Parameters
    ----------
    store : Store
        Reads the log.
    table : str
        Full path of the table's folder.

    Raises
    ------
    StoreError
        If `deltalake` is not installed or cannot read the log. Also if the files cannot be read one
        by one: because of deletion vectors, mapped columns or files of other tables.
    """
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise _unreadable(
            table,
            f"only its log says which files are current, and deltalake reads it ({error})",
            f"Run: {INSTALL['deltalake']}",
        ) from error
    from deltalake.exceptions import DeltaError

    with contextlib.ExitStack() as stack:
        try:
            delta = DeltaTable(stack.enter_context(_local_log(store, table)))
            features = set(delta.protocol().reader_features or ())
            mapping = delta.metadata().configuration.get("delta.columnMapping.mode", "none")
            actions = pa.table(delta.get_add_actions()).to_pylist()
        except DeltaError as error:
            raise _unreadable(table, f"deltalake cannot read its log ({error})") from error
        if features - _READABLE:
            raise _unreadable(table, f"it uses {', '.join(sorted(features - _READABLE))}")
        if mapping != "none":
            raise _unreadable(
                table, f"its files name columns otherwise (column mapping by {mapping})"
            )
        if "deletionVectors" in features and _hides_rows(delta):
            raise _unreadable(
                table,
                "deletion vectors hide rows of its files",
                f"Rewrite these files with Spark: REORG TABLE delta.`{table}` APPLY (PURGE).",
            )
        schema = str(delta.schema().to_json())
    files = {}
    for action in actions:
        path = unquote(action["path"])
        if path.startswith("/") or re.match(r"\w+:/", path):
            raise _unreadable(table, f"it reads files of another table ({path!r}), as a clone does")
        files[path] = TableFile(action["num_records"], action.get("partition") or {})
    return DeltaLog(schema, files)


def _hides_rows(delta: Any) -> bool:
    from deltalake.exceptions import DeltaError

    try:
        return any(len(pa.record_batch(batch)) for batch in delta.deletion_vectors())
    except (DeltaError, OSError):
        return True  # the vectors are in files that are not part of the log


def _unreadable(table: str, reason: str, remedy: str = "") -> StoreError:
    train = f'fit(spark.read.format("delta").load("{table}"))'
    beginning = f"{remedy} Or train" if remedy else "Train"
    return StoreError(
        f"{table!r} is a Delta table whose files cannot be read one by one: {reason}. {beginning} "
        f"on its DataFrame: {train}."
    )


@contextlib.contextmanager
def _local_log(store: Store, table: str) -> Iterator[str]:
    """Yield a local folder with the current part of a table's log."""
    local = store.local_path(table)
    if local is not None:
        yield local
        return
    log = f"{table}/{DELTA_LOG}"
    last = store.read_if_exists(f"{log}/_last_checkpoint")
    # Older entries of the log are part of the checkpoint.
    oldest = int(parse_object(last)["version"]) if last else 0
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        for file in store.find(log):
            name = file.removeprefix(f"{log}/")
            number = re.match(r"\d{20}\b", name)
            if number is None or int(number[0]) >= oldest:
                copy = Path(folder, DELTA_LOG, name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(store.read(file))
        yield folder
