"""Fallback from damaged checkpoints on a real HDFS and on S3."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hvd_estimators import Store

pytestmark = pytest.mark.integration


@pytest.fixture(params=["hdfs", "s3"])
def remote(request: pytest.FixtureRequest) -> Any:
    server = request.getfixturevalue(request.param)
    options = getattr(server, "storage_options", None)
    return Store.create(f"{server.url}/{uuid.uuid4().hex}", storage_options=options)


def replace(store: Any, path: str, content: bytes) -> None:
    with store.open_atomic(path) as file:
        file.write(content)


FORK = """
    import multiprocessing, pickle, sys

    with open(sys.argv[1], "rb") as file:
        store = pickle.load(file)
    store.write_text(f"{store.prefix_path}/file", "whole")
    assert store.read(f"{store.prefix_path}/file") == b"whole"
    # fsspec forgets its filesystems in the child.
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(60)
    print(child.exitcode, flush=True)
    child.kill()
"""


def test_processes_can_fork_after_using_a_store(remote: Any, tmp_path: Path) -> None:
    """Fork in a new process: frameworks' threads in this process could make a fork hang."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(FORK))
    given = tmp_path / "store.pkl"
    given.write_bytes(cloudpickle.dumps(remote))
    command = [sys.executable, str(program), str(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_ranks_files_are_written_read_by_rows_and_checked(remote: Any) -> None:
    import torch

    from hvd_estimators.store.checkpoints import CheckpointInfo, DamagedCheckpoint, open_valid
    from hvd_estimators.torch.tensor_files import TensorReader, write_tensors

    tensors = {"large": torch.rand(3000, 1000), "small": torch.arange(7)}
    folder = remote.run_paths("mine").checkpoints_path
    file = write_tensors(remote, folder, "checkpoint-000001.tensors/a.safetensors", tensors)
    path = f"{folder}/{file.name}"
    reader = TensorReader(remote, [path], mapped=True)  # which only local files are
    assert torch.equal(reader.whole("small"), tensors["small"])
    assert torch.equal(reader.rows("large", 1999, 2010), tensors["large"][1999:2010])
    replace(remote, f"{folder}/checkpoint-000001.ckpt", b"")
    digest = hashlib.sha256(b"").hexdigest()
    info = CheckpointInfo(
        f"{folder}/checkpoint-000001.ckpt", 0, digest, 1, 0, "torch", files=(file,)
    )
    with open_valid(remote, info):
        pass
    replace(remote, path, remote.read(path)[:-1] + b"?")
    with (
        pytest.raises(DamagedCheckpoint, match="its content has changed"),
        open_valid(remote, info),
    ):
        pass
    remote.delete(path)
    with pytest.raises(DamagedCheckpoint, match="there is no such file"), open_valid(remote, info):
        pass
