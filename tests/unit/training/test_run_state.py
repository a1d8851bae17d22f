"""The state of a run within a framework's file."""

from __future__ import annotations

import io
import json
import random
import zipfile
from functools import partial
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from json_values import (
    JSON_VALUES,
    NO_JSON,
    Effort,
    damaged_bytes,
    edited_anywhere,
    efforts,
    fuzz,
    typed_outcome,
)
from saved_checkpoints import read_state

from hvd_estimators import Store
from hvd_estimators.exceptions import StoreError
from hvd_estimators.torch.shard_state import TorchStreams
from hvd_estimators.training.run_state import (
    _STATE,
    RunState,
    check_state,
    encode,
    is_encodable,
    write_archive,
)
from hvd_estimators.training.shard_state import HostStreams, merge_by_shard
from hvd_estimators.training.spec import EpochMetrics


def assert_same(found: Any, expected: Any) -> None:
    """Compare types and bits recursively."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, dict):
        assert_same(list(found.items()), list(expected.items()))
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, float):
        assert np.float64(found).tobytes() == np.float64(expected).tobytes()
    else:
        assert found == expected


def some_value(rng: random.Random, depth: int = 0) -> Any:
    """Generate a random value that a checkpoint can hold."""
    leaves = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-(2**80), 2**80),
        lambda: rng.choice([rng.gauss(0, 1e200), 0.1, -0.0, float("inf"), float("nan")]),
        lambda: rng.choice(["", "loss", "größe/\n\0", "\ud800"]),
        lambda: rng.randbytes(rng.randrange(5)),
        lambda: rng.choice([np.float32, np.float64, np.int8, np.uint64, ml_dtypes.bfloat16])(3.7),
        lambda: np.array([rng.gauss(0, 1) for _ in range(6)], rng.choice(["f2", ">f8", "c8"])),
        lambda: np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,
        lambda: np.zeros((0, 2), "i4"),
        lambda: np.array("text"),
        lambda: np.datetime64("2026-11-22"),
    ]
    if depth < 3 and rng.random() < 0.6:
        entries = [some_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        keys = ["a", 1, ("t", 2.5), None][: len(entries)]
        made = [list(entries), tuple(entries), dict(zip(keys, entries, strict=False))]
        return made[rng.randrange(3)]
    return rng.choice(leaves)()


def torch_file(file: IO[bytes]) -> None:
    torch.save({"weight": torch.arange(1000.0)}, file)


def some_state(seed: int = 0) -> RunState:
    rng = random.Random(seed)
    history = tuple(
        EpochMetrics(e, {"loss": rng.random(), "all_metrics": []}, None if e else {"loss": 0.1})
        for e in range(3)
    )
    return RunState(
        epoch=3,
        rows=rng.randrange(1000),
        canonical_shards=2,
        history=history,
        random=(TorchStreams(torch.device("cpu")).capture(), HostStreams().capture()),
        parts={"callbacks": [some_value(rng) for _ in range(20)]},
    )


def write(store: Any, path: str, state: RunState) -> None:
    with store.open_atomic(path) as file:
        write_archive(file, state, torch_file)


@pytest.mark.parametrize("seed", range(20))
def test_states_are_restored_bit_for_bit(store: Any, seed: int) -> None:
    state = some_state(seed)
    path = f"{store.prefix_path}/checkpoint"
    write(store, path, state)
    found = read_state(store, path)
    assert_same(vars(found)["parts"], vars(state)["parts"])
    assert_same([vars(record) for record in found.history], [vars(r) for r in state.history])
    assert_same(found.random, state.random)
    assert (found.epoch, found.rows, found.canonical_shards) == (3, state.rows, 2)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([None]), [lambda: None]])
def test_values_that_are_not_plain_are_rejected(value: Any) -> None:
    assert not is_encodable(value)
    with pytest.raises(TypeError, match="expected plain values, found"):
        encode(value, [])


def test_torch_can_load_the_file(store: Any) -> None:
    path = f"{store.prefix_path}/checkpoint"
    write(store, path, some_state())
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert torch.equal(loaded["weight"], torch.arange(1000.0))
    assert zipfile.ZipFile(path).testzip() is None


def written(path: Path, store: Any, kind: str) -> None:
    """Write a checkpoint that cannot be resumed."""
    write(store, str(path), some_state())
    content = path.read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "foreign":
        path.write_bytes(b"something else entirely")
    elif kind == "of torch alone":
        torch.save({"history": [], "model": {}}, path)
    elif kind == "a folder":
        path.unlink()
        path.mkdir()
    elif kind == "of another version":
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, member in members.items():
                archive.writestr(name, member.replace(b'"format": 1', b'"format": 2'))
    elif kind == "changed state":
        # Flip one bit of an array of the run state.
        name = "hvd_estimators/0.npy"
        with zipfile.ZipFile(path) as archive:
            (info,) = [info for info in archive.infolist() if info.filename.endswith(name)]
        place = content.index(info.filename.encode()) + len(info.filename) + info.file_size - 9
        changed = bytes([content[place] ^ 1])
        path.write_bytes(content[:place] + changed + content[place + 1 :])


KINDS = ["empty", "truncated", "foreign", "of torch alone", "a folder", "of another version"]


@pytest.mark.parametrize("kind", [*KINDS, "changed state"])
def test_errors_about_unusable_checkpoints_suggest_a_fix(
    store: Any, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "checkpoint"
    written(path, store, kind)
    message = f"The checkpoint {str(path)!r} .*Set another run_id, or none"
    if kind in KINDS:
        with pytest.raises(StoreError, match=message):
            read_state(store, str(path))
        with pytest.raises(StoreError, match=message):
            check_state(store, str(path))
    else:
        # Only reading the whole file finds the change.
        check_state(store, str(path))
        with pytest.raises(StoreError, match=message):
            read_state(store, str(path))


def test_random_streams_continue_across_swapped_shards() -> None:
    streams = TorchStreams(torch.device("cpu"))

    def draw() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), np.random.normal(), float(torch.rand(()))

    def seed(number: int) -> None:
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    alone = []
    for shard in range(2):
        seed(shard)
        alone.append([draw() for _ in range(3)])
    states = {}
    for shard in range(2):
        seed(shard)
        states[shard] = streams.capture()
    taken: list[list[tuple[float, ...]]] = [[], []]
    for _ in range(3):
        for shard in range(2):
            streams.restore(states[shard])
            taken[shard].append(draw())
            states[shard] = streams.capture()
    assert taken == alone
    assert [*merge_by_shard([{1: states[1]}, {0: states[0]}], 2)] == [states[0], states[1]]


def written_state() -> bytes:
    """Return a checkpoint of a small model with a state."""
    file = io.BytesIO()
    state = RunState(1, 0, 2, (EpochMetrics(0, {"loss": 0.5}),), ({"a": np.arange(3)}, {}))
    write_archive(file, state, lambda target: torch.save({"weight": torch.ones(2)}, target))
    return file.getvalue()


def with_document(content: bytes, edit: Any) -> bytes:
    """Return a checkpoint whose state's document is replaced."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            is_state = name.endswith(_STATE)
            new.writestr(name, edit if is_state else old.read(name))
    return target.getvalue()


def document_of(content: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(_STATE)]
        return json.loads(archive.read(name))


@pytest.mark.parametrize("effort", efforts(100, calls=2))
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(
    effort: Effort, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path))
    path = tmp_path / "mine.ckpt"
    content = written_state()
    document = document_of(content)
    edited = edited_anywhere(document).map(lambda found: json.dumps(found).encode())
    arrays = JSON_VALUES.map(lambda value: json.dumps({**document, "arrays": value}).encode())
    documents = edited | arrays | st.sampled_from(NO_JSON)

    def check(damaged: bytes) -> None:
        path.write_bytes(damaged)
        for read in (check_state, read_state):
            typed_outcome(partial(read, store, str(path)), str(path))

    fuzz(check, documents.map(lambda text: with_document(content, text)), effort)
    fuzz(check, damaged_bytes(content), effort)
    check(with_document(content, json.dumps({**document, "arrays": 10**12}).encode()))
