"""Checkpoints damaged at any position: a fit resumes from the one before or reports an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_fits
import pytest
from backends import InProcessBackend
from kill_fits import assert_equal_bits, end_of, make_estimator, write_data

from hvd_estimators import load_checkpoint
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.paths import manifest_of

pytestmark = pytest.mark.integration

EPOCHS = 3


def fit(store: Any, run_id: str, epochs: int = EPOCHS) -> dict[str, Any]:
    estimator = make_estimator(
        "torch",
        store=store,
        backend=InProcessBackend(),
        run_id=run_id,
        epochs=epochs,
        batch_size=32,
        keep_checkpoints=9,
        # The first epoch has the lowest value.
        checkpoint_monitor="loss",
        checkpoint_mode="max",
    )
    return end_of("torch", estimator.fit_on_parquet())


def damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a file's content cut off, or with a flipped bit, at each tenth of its length."""
    for tenth in range(11):
        place = min(len(whole) * tenth // 10, len(whole) - 1)
        if tenth % 2:
            yield f"cut-{tenth}", whole[:place]
        else:
            yield f"bit-{tenth}", whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :]


def files_of(folder: str) -> dict[str, bytes]:
    """Return the files of a run except its lease and the notes on its fits, as one has failed."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    notes = ("metadata", "lease-")
    return {str(path): path.read_bytes() for path in paths if not path.name.startswith(notes)}


@pytest.fixture
def trained(store: Any) -> dict[str, Any]:
    """Store a run of two of three epochs; return the final state of a run of three."""
    write_data(store)
    whole = fit(store, "whole")
    fit(store, "parts", epochs=EPOCHS - 1)
    return whole


def copied(store: Any, name: str) -> list[str]:
    """Copy the run of two epochs, and return the checkpoints of the copy."""
    shutil.copytree(store.get_run_path("parts"), store.get_run_path(name))
    return [str(path) for path in store.get_checkpoints(name)]


def test_a_fit_resumes_from_the_previous_checkpoint(
    store: Any, trained: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for which in ("file", "pointer"):
        newest = store.get_checkpoints("parts")[-1]
        content = Path(newest if which == "file" else manifest_of(newest)).read_bytes()
        # Unit tests damage pointers at each position; here each costs a fit.
        for how, bad in list(damaged(content))[:: 1 if which == "file" else 5]:
            name = f"{which}-{how}"
            older, newest = copied(store, name)
            Path(newest if which == "file" else manifest_of(newest)).write_bytes(bad)
            caplog.clear()
            assert_equal_bits(fit(store, name), trained)
            # A bit of a pointer may belong to a metric, which resuming does not need.
            assert which == "pointer" or f"The one before, {older!r}, is taken" in caplog.text
            # The damaged epoch was written again.
            assert load_checkpoint(store, name).epoch == EPOCHS
            assert [load_checkpoint(path).epoch for path in store.get_checkpoints(name)] == [
                1,
                2,
                3,
            ]
            shutil.rmtree(store.get_run_path(name))


def test_resuming_does_not_need_the_best_checkpoint(
    store: Any, trained: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for how, bad in damaged(Path(store.get_checkpoints("parts")[0]).read_bytes()):
        best, second = copied(store, how)
        assert load_checkpoint(store, how, which="best").path == best
        Path(best).write_bytes(bad)
        assert load_checkpoint(store, how, which="best").path == second
        assert f"The best checkpoint, {best!r}, is skipped" in caplog.text
        caplog.clear()
    assert_equal_bits(fit(store, how), trained)
    # The damaged file is left untouched.
    assert Path(best).read_bytes() == bad


def test_a_fit_without_valid_checkpoints_fails_and_overwrites_nothing(
    store: Any, trained: dict[str, Any]
) -> None:
    both = [list(damaged(Path(path).read_bytes())) for path in store.get_checkpoints("parts")]
    for (how, first), (_, second) in zip(*both, strict=True):
        for path, content in zip(copied(store, how), (first, second), strict=True):
            Path(path).write_bytes(content)
        before = files_of(store.get_run_path(how))
        with pytest.raises(
            StoreError, match=f"No checkpoint of the run '{how}' is valid"
        ) as raised:
            fit(store, how)
        assert "Set another run_id" in str(raised.value)
        assert files_of(store.get_run_path(how)) == before
    with pytest.raises(StoreError, match="is valid"):
        load_checkpoint(store, how)


def setup_module() -> None:
    kill_fits.send_by_value()
