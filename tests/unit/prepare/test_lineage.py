"""What tells a file from what it was before."""

import os
import time
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError

from hvd_estimators.prepare import lineage


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ä b%20c?#.parquet"
    path.write_bytes(b"rows")
    return path


def marks(path):
    return lineage._local_marks([f"file:{path}"])


def rewritten(path):
    path.write_bytes(b"ROWS")


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(b"ROWS")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_a_change_at_once_after_looking_is_seen_though_size_and_time_are_as_before(file, change):
    for _ in range(5):
        before, stat = marks(file), file.stat()
        change(file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert file.stat().st_mtime_ns == stat.st_mtime_ns
        assert marks(file) != before
    assert marks(file) == marks(file)


@pytest.mark.parametrize(
    ("age_ns", "settled"),
    [(10**9, True), (-(10**9), False), (5 * 10**7, True), (10**6, False)],
)
def test_a_file_that_has_just_changed_is_looked_at_again_later(monkeypatch, age_ns, settled):
    now = 1_700_000_000_123_456_789
    monkeypatch.setattr(time, "time_ns", lambda: now)
    stat = SimpleNamespace(st_ctime_ns=now - age_ns)
    assert (lineage._unsettled_ns(stat) <= 0) == settled


def test_where_the_clock_is_coarse_or_ahead_nothing_is_known_of_new_files(file, monkeypatch):
    stat = file.stat()
    fields = {name: getattr(stat, name) for name in dir(stat) if name.startswith("st_")}
    for ctime in (time.time_ns() // 10**9 * 10**9, time.time_ns() + 10**9 + 1):
        monkeypatch.setattr(
            lineage, "_stat", lambda url, c=ctime: SimpleNamespace(**{**fields, "st_ctime_ns": c})
        )
        assert marks(file) is None
    # Later it is.
    monkeypatch.setattr(time, "time_ns", lambda: time.monotonic_ns() + 2**62)
    assert marks(file) is not None


class Status:
    def __init__(self, tag):
        self.tag = tag

    def getLen(self):
        return 12

    def getEtag(self):
        if self.tag == "no such method":
            raise Py4JError("Method getEtag([]) does not exist")
        return self.tag


@pytest.mark.parametrize(
    ("tag", "checksum", "marks"),
    [
        ("9f6e", None, ("12", "etag", "9f6e")),
        (
            "no such method",
            "MD5-of-0MD5-of-512CRC32C:1f",
            ("12", "checksum", "MD5-of-0MD5-of-512CRC32C:1f"),
        ),
        (None, None, None),
        ("no such method", None, None),
    ],
)
def test_a_remote_file_is_told_by_its_tag_or_checksum_or_not_at_all(tag, checksum, marks):
    kept = None if checksum is None else SimpleNamespace(toString=lambda: checksum)
    filesystem = SimpleNamespace(
        getFileStatus=lambda path: Status(tag), getFileChecksum=lambda path: kept
    )
    path = SimpleNamespace(getFileSystem=lambda conf: filesystem)
    hadoop = SimpleNamespace(fs=SimpleNamespace(Path=lambda url: path))
    jvm = SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(hadoop=hadoop)))
    state = SimpleNamespace(newHadoopConf=lambda: None)
    session = SimpleNamespace(_jvm=jvm, _jsparkSession=SimpleNamespace(sessionState=lambda: state))
    assert lineage._remote_marks("s3a://bucket/rows.parquet", session) == marks
