"""Files of tensors are safetensors files, and rows of them are read alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import LocalStore
from hvd_estimators.store.files import digest_of
from hvd_estimators.torch.shard_files import with_tensors
from hvd_estimators.torch.tensor_files import TensorReader, write_tensors

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def tensors(draw: Any) -> dict[str, torch.Tensor]:
    """Draw tensors of several types and shapes, without numbers and without dimensions, too."""
    made = {}
    names = st.lists(st.text('abc./é"', min_size=1, max_size=6), max_size=5, unique=True)
    for seed, name in enumerate(draw(names)):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 100 - 50
        made[name] = drawn.to(draw(st.sampled_from(DTYPES)))
    return dict(sorted(made.items(), key=lambda item: -item[1].itemsize))


@SHARED
@given(written=tensors(), mapped=st.booleans(), data=st.data())
def test_what_is_written_is_read_by_us_and_by_safetensors(
    tmp_path: Path, written: dict[str, torch.Tensor], mapped: bool, data: Any
) -> None:
    store = LocalStore(str(tmp_path))
    file = write_tensors(store, str(tmp_path), "some.safetensors", written)
    path = tmp_path / file.name
    with open(path, "rb") as opened:
        assert (file.size, file.sha256) == (path.stat().st_size, digest_of(opened))
    exact: dict[str, Any] = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(load_file(path), written, **exact)
    reader = TensorReader(store, [str(path)], mapped)
    assert set(reader.names()) == set(written)
    for name, tensor in written.items():
        torch.testing.assert_close(reader.whole(name), tensor, **exact)
        if tensor.dim():
            start = data.draw(st.integers(0, len(tensor)))
            stop = data.draw(st.integers(start, len(tensor)))
            torch.testing.assert_close(reader.rows(name, start, stop), tensor[start:stop], **exact)


def test_files_of_safetensors_are_read(tmp_path: Path) -> None:
    given = {f"layer.{n}.weight": torch.rand(30, 40) for n in range(900)}  # a long header
    save_file(given, tmp_path / "others.safetensors", metadata={"format": "pt"})
    reader = TensorReader(LocalStore(str(tmp_path)), [str(tmp_path / "others.safetensors")])
    assert {name: reader.whole(name).sum() for name in reader.names()} == {
        name: tensor.sum() for name, tensor in given.items()
    }


@SHARED
@given(written=tensors(), data=st.data())
def test_a_damaged_file_is_a_store_error_or_has_other_numbers(
    tmp_path: Path, written: dict[str, torch.Tensor], data: Any
) -> None:
    store = LocalStore(str(tmp_path))
    path = tmp_path / write_tensors(store, str(tmp_path), "some.safetensors", written).name
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:position]
    else:
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(StoreError):
        reader = TensorReader(store, [str(path)])
        for name in reader.names():
            assert reader.whole(name).shape == reader.stored(name).shape


def test_a_changed_mapped_tensor_does_not_change_its_file(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    write_tensors(store, str(tmp_path), "some.safetensors", {"a": torch.ones(3)})
    paths = [str(tmp_path / "some.safetensors")]
    TensorReader(store, paths, mapped=True).whole("a").zero_()
    assert TensorReader(store, paths, mapped=True).whole("a").tolist() == [1, 1, 1]


def test_content_without_files_is_unchanged(tmp_path: Path) -> None:
    content = {"model": {"a": torch.ones(2)}}
    assert with_tensors(content, LocalStore(str(tmp_path)), "") is content


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\x02\0\0\0\0\0\0\0[]"])
def test_other_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(StoreError, match="other' is not a safetensors file"):
        TensorReader(LocalStore(str(tmp_path)), [str(tmp_path / "other")])
