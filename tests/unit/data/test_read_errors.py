"""Errors of reading rows that the file's content does not cause."""

import errno
import os
import subprocess
import sys
import textwrap

import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data.footers import damage_is_store_error
from hvd_estimators.exceptions import StoreError, StoreUnavailableError
from hvd_estimators.training.run_state import describing_damage


def system_error(number):
    """Return an error as PyArrow raises it for a failed system call."""
    text = os.strerror(number)
    return OSError(number, f"Error reading bytes from file. Detail: [errno {number}] {text}")


CASES = {
    "memory": (pa.ArrowMemoryError("malloc of size 64 failed"), MemoryError, "malloc of size 64"),
    "Python's memory": (MemoryError(), MemoryError, "Memory ran out"),
    "no memory": (system_error(errno.ENOMEM), MemoryError, "Memory ran out"),
    "stale handle": (system_error(errno.ESTALE), StoreUnavailableError, "Stale file handle"),
    "timeout": (system_error(errno.ETIMEDOUT), StoreUnavailableError, "timed out"),
    "disk": (system_error(errno.EIO), StoreError, "see whether the disk"),
    "open files": (system_error(errno.EMFILE), StoreError, "limits of that machine"),
    "permission": (system_error(errno.EACCES), StoreError, "access is denied"),
    "Ctrl-C in PyArrow": (pa.ArrowCancelled("stop", signum=2), pa.ArrowCancelled, "stop"),
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt, None),
    "exit": (SystemExit(3), SystemExit, "3"),
}
DAMAGE = [pa.ArrowInvalid("Parquet magic bytes not found"), OSError("Unexpected end of stream")]


@pytest.mark.parametrize("row_group", [None, 1], ids=["footer", "pages"])
@pytest.mark.parametrize(("error", "expected", "told"), CASES.values(), ids=CASES)
def test_only_damage_is_called_damage(error, expected, told, row_group):
    with pytest.raises(expected, match=told) as raised, damage_is_store_error("a", row_group):
        raise error
    assert raised.type is expected or expected is StoreError
    assert "damaged" not in str(raised.value)
    assert raised.value is error or raised.value.__cause__ is error


@pytest.mark.parametrize("error", DAMAGE, ids=["footer", "pages"])
def test_damage_is_called_damage(error):
    with pytest.raises(StoreError, match="The file is damaged"), damage_is_store_error("a", 1):
        raise error


@pytest.mark.parametrize("case", ["no memory", "stale handle", "disk", "open files", "permission"])
def test_a_checkpoint_is_not_called_damaged(case):
    error, expected, told = CASES[case]
    with pytest.raises(expected, match=told) as raised, describing_damage("a"):
        raise error
    assert "damaged" not in str(raised.value)


READ = """
    import ctypes
    import resource
    from hvd_estimators.data.manifest import ColumnSpec, RowRange
    from hvd_estimators.data.remote_reads import RangeFiles, RangeRead
    from hvd_estimators.loading.interleave import range_tables
    from hvd_estimators.store import LocalStore

    read = RangeRead(RowRange("{file}", 0, 0, 1))
    specs = [ColumnSpec("x", "text", "object")]
    with RangeFiles(LocalStore("{folder}"), specs) as files, files.open(read) as file:
        {prepare}
        try:
            list(range_tables(file, read, specs))
        except Exception as error:
            print(type(error).__name__, error)
"""
LITTLE_MEMORY = (
    "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
    "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))"
)
STALE = r"""
#include <cerrno>
#include <unistd.h>
extern "C" int is_stale = 0;
extern "C" ssize_t pread64(int file, void *buffer, size_t size, off64_t offset) {
    if (is_stale) { errno = ESTALE; return -1; }
    lseek64(file, offset, SEEK_SET);
    return read(file, buffer, size);
}
extern "C" ssize_t pread(int file, void *buffer, size_t size, off_t offset) {
    return pread64(file, buffer, size, offset);
}
"""


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (LITTLE_MEMORY, "MemoryError Memory ran out at reading"),
        ("ctypes.c_int.in_dll(ctypes.CDLL(None), 'is_stale').value = 1", "StoreUnavailableError"),
    ],
    ids=["memory", "stale handle"],
)
def test_what_failed_for_real_is_told(tmp_path, prepare, told):
    """A page of 300 MB does not fit into 64 MiB; a library fails the system calls as NFS does."""
    file, source, library = (tmp_path / name for name in ("a.parquet", "stale.cc", "stale.so"))
    table = pa.table({"x": [bytes(300_000_000)]})
    parquet.write_table(table, file, use_dictionary=False, write_statistics=False)
    source.write_text(STALE)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    program = textwrap.dedent(READ).format(file=file, folder=tmp_path, prepare=prepare)
    environment = {"ARROW_DEFAULT_MEMORY_POOL": "system", "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.stdout.startswith(told), done.stderr
    assert str(file) in done.stdout
    assert "damaged" not in done.stdout
