"""Plots of the histories of several runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import hvd_estimators
from hvd_estimators import plot_histories
from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.store.runs import history_text, run_file


def leave(store: Any, run_id: str, rows: list[Any], day: int = 1) -> None:
    started = f"2026-01-{day:02}T00:00:00+00:00"
    path = store.run_paths(run_id).run_path
    notes = {"run_id": run_id, "framework": "torch", "started": started, "state": "finished"}
    store.write_text(run_file(path, "metadata"), json.dumps(notes))
    store.write_text(run_file(path, "history"), history_text(rows))


def lines(chart: Any) -> dict[tuple[Any, str], list[float]]:
    return {
        (line.get_color(), line.get_linestyle()): list(line.get_ydata())
        for line in chart.get_lines()
    }


def test_each_metric_has_a_chart_and_each_run_a_colour(store: Any, tmp_path: Path) -> None:
    first = [
        (e, s, n, 1 / (e + k))
        for e in range(3)
        for k, (s, n) in enumerate(
            [("train", "accuracy"), ("train", "loss"), ("validation", "val_loss")], start=1
        )
    ]
    leave(store, "second", [(0, "train", "loss", 7.0)], day=2)
    leave(store, "first", first)
    leave(store, "nothing yet".replace(" ", "-"), [])
    path = tmp_path / "runs.png"

    figure = plot_histories(store, path=str(path))

    loss, accuracy = (chart for chart in figure.axes if chart.get_title())
    assert (loss.get_title(), accuracy.get_title()) == ("loss", "accuracy")
    drawn = lines(loss)
    (one, solid), (same, dashed), (two, also_solid) = drawn
    assert (solid, dashed, also_solid) == ("-", "--", "-")
    assert one == same != two
    assert list(drawn.values()) == [[1 / 2, 1 / 3, 1 / 4], [1 / 3, 1 / 4, 1 / 5], [7.0]]
    assert list(loss.get_lines()[0].get_xdata()) == [1, 2, 3]
    named = ["first, train", "first, validation", "second, train"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == named
    assert path.read_bytes().startswith(b"\x89PNG")

    (chart,) = plot_histories(store, ["second"], names=["loss"]).axes
    assert list(lines(chart).values()) == [[7.0]]


def test_errors_name_histories_that_cannot_be_plotted(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParamError, match="found no metrics"):
        plot_histories(store)
    leave(store, "mine", [(0, "train", "loss", 1.0)])
    with pytest.raises(ParamError, match=r"names: 'los' was not measured.*Did you mean 'loss'"):
        plot_histories(store, names=["los"])
    for names in ("loss", []):
        with pytest.raises(ParamError, match="names: expected a list"):
            plot_histories(store, names=names)
    with pytest.raises(ParamError, match="run_ids: expected a list"):
        plot_histories(store, "mine")
    with pytest.raises(ParamError, match=r"has no run 'mime'. Did you mean 'mine'"):
        plot_histories(store, ["mime"])
    monkeypatch.delitem(sys.modules, "hvd_estimators.plots")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        DependencyError, match=r"matplotlib, .*pip install .*hvd_estimators>\[plot\]"
    ):
        hvd_estimators.plot_histories  # noqa: B018
