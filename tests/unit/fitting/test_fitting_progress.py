"""The driver's progress output in notebooks, on terminals and in files."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm.auto import tqdm

from hvd_estimators.fitting.progress import show_progress
from hvd_estimators.launch.service.events import RankMessage, RankOutput, RankProgress
from hvd_estimators.store.paths import Position


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


PLACES = pytest.mark.parametrize("place", ["notebook", "terminal", "file"])


@contextlib.contextmanager
def showing_in(place: str) -> Iterator[None]:
    """Replace standard error by a notebook's, a terminal or a file."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}}) if place == "notebook" else None
    with pytest.MonkeyPatch.context() as patch:
        # Within the test, because pytest's capturing changes the streams before it.
        patch.setattr(sys, "stderr", Terminal() if place == "terminal" else io.StringIO())
        patch.setattr(sys, "stdout", io.StringIO())
        ipython = types.SimpleNamespace(get_ipython=lambda: shell)
        patch.setitem(sys.modules, "IPython", ipython)
        yield
        assert not list(getattr(tqdm, "_instances", [])), "a bar was left"


def spec(run_id: str = "mine", verbose: int = 1, epochs: int = 3) -> Any:
    """Return a training job's spec for progress output."""
    return types.SimpleNamespace(
        verbose=verbose,
        epochs=epochs,
        run=types.SimpleNamespace(run_id=run_id),
        data=types.SimpleNamespace(
            train_steps_per_epoch=4, batches_before=lambda epoch, rows: rows // 25
        ),
    )


def progress(epoch: int, step: int, epochs: int = 3) -> RankProgress:
    return RankProgress(0, epoch, epochs, step, 4, 1234.5, {"loss": 1 / (step + 1)}, step == 4)


def shown() -> str:
    """Return the standard error, with each state of a bar on a separate line."""
    return sys.stderr.getvalue().replace("\r", "\n")  # type: ignore[attr-defined]


@PLACES
def test_epochs_are_shown_until_complete(place: str) -> None:
    with showing_in(place):
        with show_progress(spec()) as handle:
            for epoch in range(3):
                for step in (1, 4):
                    handle(progress(epoch, step))

        lines = [line for line in shown().splitlines() if "1,234 rows/s, loss=0.2" in line]
        ends = {
            # One bar for all epochs.
            "notebook": ["4/12", "8/12", "12/12"],
            "terminal": ["4/4", "4/4", "4/4"],
            "file": ["", "", ""],
        }[place]
        for epoch, end in enumerate(ends):
            mine = [line for line in lines if line.startswith(f"Epoch {epoch + 1}/3: ")]
            assert mine
            assert all(end in line for line in mine)
        if place == "file":
            assert shown() == "".join(f"Epoch {n}/3: 1,234 rows/s, loss=0.2\n" for n in (1, 2, 3))


@PLACES
def test_resumed_runs_start_the_bar_at_their_position(place: str) -> None:
    with showing_in(place):
        with show_progress(spec()) as handle:
            handle(progress(2, 2))
            handle(progress(2, 4))

        assert "Epoch 3/3" in shown()
        if place == "notebook":
            assert " 10/12 [" in shown()
            assert " 2/12 [" not in shown()


@PLACES
def test_a_failure_ends_the_bar(place: str) -> None:
    with showing_in(place):
        with contextlib.suppress(KeyboardInterrupt), show_progress(spec()) as handle:
            handle(progress(0, 2))
            raise KeyboardInterrupt

        assert shown().endswith("\n") or place == "file"


@PLACES
def test_lines_and_messages_appear_between_bars(place: str) -> None:
    with showing_in(place):
        with show_progress(spec()) as handle:
            handle(progress(0, 1))
            handle(RankOutput(1, "hello\n"))
            handle(RankMessage(0, "message"))
            handle(progress(0, 4))

        assert "[1] hello" in [line.strip() for line in shown().splitlines()]
        assert sys.stdout.getvalue().strip("\r\n \x1b[A") == "message"  # type: ignore[attr-defined]


@PLACES
def test_concurrent_fits_show_their_names(place: str) -> None:
    with showing_in(place):
        with contextlib.ExitStack() as stack:
            handlers = [stack.enter_context(show_progress(spec(name, epochs=1))) for name in "AB"]
            for step in (1, 4):
                for handle in handlers:
                    handle(progress(0, step, epochs=1))

        for name in "AB":
            assert f"{name}, Epoch 1/1: " in shown()


@PLACES
def test_without_verbosity_only_messages_and_lines_are_shown(place: str) -> None:
    with showing_in(place):
        with show_progress(spec(verbose=0)) as handle:
            handle(progress(0, 4))
            handle(RankOutput(1, "hello\n"))
            handle(RankMessage(0, "message"))

        assert shown() == "[1] hello\n"
        assert sys.stdout.getvalue() == "message\n"  # type: ignore[attr-defined]


@PLACES
def test_a_line_names_the_resume_position(place: str) -> None:
    expected = {
        Position(2): "Resuming run 'mine' at epoch 3 of 3.",
        Position(1, 50): "Resuming run 'mine' at epoch 2 of 3, after step 2.",
        Position(3): "Run 'mine' is complete; returning its model.",
    }
    for newest, line in expected.items():
        with showing_in(place):
            with show_progress(spec(), newest):
                pass
            assert line in shown().splitlines()
    with showing_in(place):
        with show_progress(spec(verbose=0), Position(2)):
            pass
        assert not shown()
