"""A store's secret stays in memory: not in files, logs, command lines or user interfaces."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers.jars import jars, s3a_folder

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.spark]

_UI_PAGES = ("jobs", "stages", "storage", "environment", "executors", "SQL")


class Search:
    """Search for a text in files and processes.

    Parameters
    ----------
    text : str
        Text that must not appear.
    folder : Path
        Folder of the files to search.

    Attributes
    ----------
    found : set of str
        Places that contain the text.
    searched : set of str
        Places that were searched.
    """

    def __init__(self, text: str, folder: Path) -> None:
        encoded = [base64.b64encode(b"x" * shift + text.encode())[4:-4] for shift in range(3)]
        self._forms = [text.encode(), text.encode("utf-16-le"), text.encode("utf-16-be"), *encoded]
        self._folder = folder
        self._seen: dict[str, tuple[int, int]] = {}
        self.found: set[str] = set()
        self.searched: set[str] = set()

    def search(self, where: str, content: bytes) -> None:
        """Search some bytes for the text."""
        self.searched.add(where)
        if any(form in content for form in self._forms):
            self.found.add(where)

    def files(self) -> None:
        """Search all files that are new or have changed."""
        for folder, _, names in os.walk(self._folder):
            for name in names:
                self._file(os.path.join(folder, name))

    def processes(self, job: int) -> None:
        """Search all command lines, and environments and deleted files of a job's processes."""
        for process in psutil.process_iter():
            self._read(f"/proc/{process.pid}/cmdline", f"command line of {process.pid}")
        for pid in {*_descendants(job), *self._others()}:
            self._read(f"/proc/{pid}/environ", f"environment of {pid}")
            for descriptor in _entries(f"/proc/{pid}/fd"):
                try:
                    target = os.readlink(descriptor)
                except OSError:
                    continue
                is_file = target.startswith("/") and not target.startswith("/memfd:")
                if is_file and target.endswith(" (deleted)"):
                    self._read(descriptor, f"deleted file {target} of {pid}")

    def _others(self) -> Iterator[int]:
        """Yield processes with the job's environment, as forks of warm ones are not descendants."""
        own = str(self._folder).encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if own in Path(f"/proc/{process.pid}/environ").read_bytes():
                    yield process.pid

    def _file(self, path: str) -> None:
        try:
            status = os.stat(path)
        except OSError:
            return
        state = (status.st_size, status.st_mtime_ns)
        if self._seen.get(path) != state:
            self._seen[path] = state
            self._read(path, path)

    def _read(self, path: str, where: str) -> None:
        with contextlib.suppress(OSError):  # The file may have been deleted.
            self.search(where, Path(path).read_bytes())


def _descendants(job: int) -> list[int]:
    try:
        return [job, *(p.pid for p in psutil.Process(job).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _entries(folder: str) -> Iterator[str]:
    try:
        yield from (os.path.join(folder, name) for name in os.listdir(folder))
    except OSError:
        return


def test_a_secret_does_not_leak(s3: Any, tmp_path: Path) -> None:
    mark = f"mark{uuid.uuid4().hex}{uuid.uuid4().hex}"
    for name in ("tmp", "events", "local", "home"):
        (tmp_path / name).mkdir()
    url = s3.new_bucket()
    task = {
        "folder": str(tmp_path),
        "class_path": os.pathsep.join(jars(s3a_folder())),
        "url": f"{url}/store",
        "storage_options": s3.options(secret=mark),
    }
    search = Search(mark, tmp_path)
    with (
        open(tmp_path / "output.txt", "wb") as output,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("secrets_job.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "TMPDIR": str(tmp_path / "tmp"),
                "HOME": str(tmp_path / "home"),
                "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
            },
        ) as job,
    ):
        over = threading.Event()

        def look() -> None:
            rounds = 0
            while not over.wait(0.5):
                ranks = len(list(tmp_path.glob("*.pid")))
                search.files()
                search.processes(job.pid)
                rounds += ranks == 2
                if rounds == 2:
                    # All places have been searched once while both ranks were running.
                    (tmp_path / "go on").touch()

        looking = threading.Thread(target=look)
        looking.start()
        try:
            print(json.dumps(task), file=job.stdin, flush=True)
            ui = job.stdout.readline().strip()
            assert ui.startswith("http"), (tmp_path / "output.txt").read_text()[-8000:]
            for page, content in _user_interface(ui):
                search.search(page, content)
            print(file=job.stdin, flush=True)
            assert job.wait(60) == 0, (tmp_path / "output.txt").read_text()[-8000:]
        finally:
            job.kill()
            over.set()
            looking.join()
    search.files()
    objects = s3.objects(url)
    for name, content in objects.items():
        search.search(f"object {name}", content)
    assert search.found == set()

    # The search has covered all of these places.
    searched = "\n".join(sorted(search.searched))
    for part in ("events/", "saved/model/", "saved/estimator/", "driver.log", "output.txt"):
        assert f"{tmp_path}/{part}" in searched, part
    for part in ("runs/marked/metadata.json", "runs/marked/checkpoints/", "store/model/metadata"):
        assert part in "\n".join(objects), part
    assert "/environment/" in searched
    ranks = [file.stem for file in tmp_path.glob("*.pid")]
    assert len(ranks) == 2
    for pid in ranks:
        assert f"environment of {pid}" in searched
    assert "epoch 1 has ended" in (tmp_path / "output.txt").read_text()


def _user_interface(url: str) -> Iterator[tuple[str, bytes]]:
    """Yield all pages of Spark's user interface and the answers of its API."""
    (application,) = json.loads(_get(f"{url}/api/v1/applications"))
    api = f"/api/v1/applications/{application['id']}"
    queries = json.loads(_get(f"{url}{api}/sql?length=1000"))
    pages = [f"/{page}/" for page in _UI_PAGES]
    pages += [f"{api}/{part}" for part in ("environment", "jobs", "stages", "allexecutors")]
    pages += [f"/SQL/execution/?id={query['id']}" for query in queries]
    pages += [f"{api}/sql/{query['id']}" for query in queries]
    for page in pages:
        yield page, _get(url + page)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read()
