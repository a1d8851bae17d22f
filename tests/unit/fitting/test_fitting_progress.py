"""The driver's progress output in notebooks, on terminals and in files."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
from fake_clock import set_clock

from hvd_estimators.fitting import progress as displays
from hvd_estimators.fitting.progress import StageRow, show_progress
from hvd_estimators.launch.service.events import LaunchStart, RankMessage, RankOutput, RankProgress
from hvd_estimators.store.paths import Position


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Handle:
    """A notebook's display, which writes each of its states to standard error."""

    def __init__(self, data: Any, **options: Any) -> None:
        self.update(data, raw=True)

    def update(self, data: Any, *, raw: bool) -> None:
        sys.stderr.write(f"{data['text/plain']}\n")


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
        patch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=Handle))
        yield


def spec(run_id: str = "mine", verbose: int = 1, epochs: int = 3) -> Any:
    """Return a training job's spec for progress output."""
    return types.SimpleNamespace(
        verbose=verbose,
        epochs=epochs,
        run=types.SimpleNamespace(run_id=run_id),
        data=types.SimpleNamespace(
            num_ranks=2, train_steps_per_epoch=4, batches_before=lambda epoch, rows: rows // 25
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

        # One bar for all epochs.
        bars = [line for line in shown().splitlines() if "%|" in line and "loss=0.2" in line]
        ends = [] if place == "file" else ["4/12", "8/12", "12/12"]
        assert len(bars) == len(ends)
        for epoch, (bar, end) in enumerate(zip(bars, ends, strict=True)):
            assert re.fullmatch(rf"Epoch {epoch + 1}/3: .*\| {end} \[.*, 1,234 rows/s.*", bar)
        epochs = "".join(f"Epoch {n}/3: 1,234 rows/s, loss=0.2\n" for n in (1, 2, 3))
        if place == "notebook":
            assert sys.stdout.getvalue() == epochs  # type: ignore[attr-defined]
        else:
            lines = shown() if place == "file" else "\n".join(screen())
            assert re.fullmatch(f"Started 2 processes in 0.. s.\n{epochs}", lines)


def test_a_long_epoch_has_a_line_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch, displays)
    with showing_in("file"):
        with show_progress(spec(epochs=1)) as handle:
            for clock.now, step in ((59.0, 1), (61.0, 2), (120.0, 3), (122.0, 3), (130.0, 4)):
                handle(progress(0, step, epochs=1))

        _, *lines = shown().splitlines()
        assert lines == [
            "Epoch 1/1: step 2 of 4, 1,234 rows/s, loss=0.3333",
            "Epoch 1/1: step 3 of 4, 1,234 rows/s, loss=0.25",
            "Epoch 1/1: 1,234 rows/s, loss=0.2",
        ]


@PLACES
def test_a_failure_ends_the_bar(place: str) -> None:
    with showing_in(place):
        with contextlib.suppress(KeyboardInterrupt), show_progress(spec()) as handle:
            handle(progress(0, 2))
            raise KeyboardInterrupt

        assert shown().endswith(("\n", "\x1b[K"))


@PLACES
def test_lines_and_messages_appear_between_bars(place: str) -> None:
    with showing_in(place):
        with show_progress(spec()) as handle:
            handle(progress(0, 1))
            handle(RankOutput(1, "hello\n"))
            handle(RankMessage(0, "message"))
            handle(progress(0, 4))

        assert "[1] hello" in (screen() if place == "terminal" else shown().splitlines())
        first, *epochs = sys.stdout.getvalue().splitlines()  # type: ignore[attr-defined]
        assert first == "message"
        assert len(epochs) == (place == "notebook")


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
            place_of_lines = sys.stdout if place == "notebook" else sys.stderr
            assert line in place_of_lines.getvalue().splitlines()  # type: ignore[attr-defined]
    with showing_in(place):
        with show_progress(spec(verbose=0), Position(2)):
            pass
        assert not shown()


def wait_for(text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in shown():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.01)


def screen() -> list[str]:
    """Return the rows of the terminal after its control characters."""
    rows, column = [""], 0
    for part in re.split(r"(\r|\n|\x1b\[K)", sys.stderr.getvalue()):  # type: ignore[attr-defined]
        if part == "\n":
            rows.append("")
        elif part == "\x1b[K":
            rows[-1] = rows[-1][:column]
        elif part != "\r":
            rows[-1] = rows[-1][:column] + part + rows[-1][column + len(part) :]
            column += len(part)
        if part in ("\r", "\n"):
            column = 0
    return rows


@PLACES
def test_a_stage_is_replaced_by_its_line(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "_REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(displays, "_LATE_SECONDS", 0.05)
    with showing_in(place):
        with StageRow("Checking") as stage:
            wait_for("Checking")
            stage.doing = "Writing"
            wait_for("Writing")
            stage.finish("Wrote 3 rows.")
            stage.finish("Wrote it again.")
        with pytest.raises(KeyError), StageRow("Failing"):
            raise KeyError

        if place == "file":
            assert shown() == "Checking ...\nWriting ...\nWrote 3 rows.\n"
        elif place == "notebook":
            states = shown().splitlines()
            assert states[0] == "Checking (0 s)"
            assert "Wrote 3 rows." in states[-2:]
        else:
            assert screen() == ["Wrote 3 rows.", ""]


@PLACES
def test_launches_are_shown_and_relaunches_begin_again(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(displays, "_REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(displays, "_LATE_SECONDS", 0.05)
    with showing_in(place):
        with show_progress(spec(epochs=1)) as handle:
            for num_ranks, processes in ((2, "2 processes"), (1, "1 process")):
                handle(LaunchStart(num_ranks))
                wait_for(f"Starting {processes}")
            handle(progress(0, 4, epochs=1))

        assert shown().count("Started 2 processes in") == 0
        assert shown().count("Started 1 process in") == 1
        assert shown().index("Started 1 process in") < shown().index("Epoch 1/1: ")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_loss_that_is_nan_is_reported_once(
    verbose: int, caplog: pytest.LogCaptureFixture
) -> None:
    with showing_in("file"), show_progress(spec(verbose=verbose)) as handle:
        handle(RankProgress(0, 0, 3, 8, 8, 1000.0, {"loss": 1.5, "auc": math.nan}, True))
        assert warnings(caplog) == []
        for epoch in (1, 2):
            handle(RankProgress(0, epoch, 3, 8, 8, 1000.0, {"loss": math.nan}, True))
    (line,) = warnings(caplog)
    assert line.startswith("Run 'mine': the loss of epoch 2 is nan. Look for NaN in the columns: ")
