"""Iceberg tables without PyArrow's newest version, which pyiceberg's own writer needs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyarrow import parquet
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestWriterV2,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.typedef import Record
from pyiceberg.types import IcebergType, NestedField


def create(folder: Path, by: Sequence[str] = (), **columns: IcebergType) -> Table:
    """Return an empty table at a folder, with columns of some types, partitioned by some."""
    catalog = InMemoryCatalog("tests", **{"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"})
    catalog.create_namespace("house")
    fields = [NestedField(i, *column) for i, column in enumerate(columns.items(), 1)]
    table = catalog.create_table("house.rows", Schema(*fields), location=f"file://{folder}")
    if by:
        with table.update_spec() as update:
            for name in by:
                update.add_identity(name)
    return table


def append(
    table: Table,
    rows: pa.Table,
    partition: Sequence[Any] = (),
    *,
    content: DataFileContent = DataFileContent.DATA,
    file_format: FileFormat = FileFormat.PARQUET,
    has_ids: bool = True,
    removed: Sequence[str] = (),
) -> str:
    """Commit one file in place of others, and return its path.

    With another content than data, the file hides rows.
    """
    if has_ids:
        numbers = {field.name: field.field_id for field in table.schema().fields}
        fields = [
            f.with_metadata({"PARQUET:field_id": str(numbers[f.name])})
            for f in rows.schema
            if f.name in numbers
        ]
        rows = rows.cast(pa.schema(fields))
    path = f"{table.location()}/data/{uuid.uuid4()}.parquet"
    local = Path(path.removeprefix("file://"))
    local.parent.mkdir(exist_ok=True)
    parquet.write_table(rows, local)
    new = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=file_format,
        partition=Record(*partition),
        record_count=rows.num_rows,
        file_size_in_bytes=local.stat().st_size,
    )
    new.spec_id = table.spec().spec_id
    kind = ManifestContent.DATA if content == DataFileContent.DATA else ManifestContent.DELETES
    is_kind = mock.patch.object(ManifestWriterV2, "content", return_value=kind)
    with is_kind, table.transaction() as transaction:
        update = transaction.update_snapshot()
        with update.overwrite() if removed else update.fast_append() as files:
            files.append_data_file(new)
            for old in _files(table) if removed else ():
                if old.file_path.removeprefix("file://") in removed:
                    files.delete_data_file(old)
    return str(local)


def _files(table: Table) -> Iterator[DataFile]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    for manifest in snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io):
            yield entry.data_file
