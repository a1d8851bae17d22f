"""Plots that compare the metrics of several runs in a store. Runs on the driver.

This module requires matplotlib, which is an optional dependency.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.store import Store
from hvd_estimators.store.base import as_store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: dict[str, Literal["-", "--"]] = {"train": "-", "validation": "--"}
_MARKERS = "osD^vP*X"
_COLORS = 10
_COLUMNS = 3
_MOST_MARKERS = 5
_INCHES = 5.2, 3.6
_INCHES_PER_CHARACTER, _INCHES_PER_LINE = 0.085, 0.18
_PIXELS_PER_INCH = 120
_LONGEST_NAME = 40


def plot_histories(
    store: Store | str,
    run_ids: Sequence[str] | None = None,
    path: str | None = None,
    names: Collection[str] | None = None,
) -> Figure:
    """Plot metrics of runs by epoch, with one chart per metric and one colour per run.

    Solid lines show training metrics, dashed lines show validation metrics.

    Parameters
    ----------
    store : Store or str
        The store that holds the runs, or its path or URL.
    run_ids : sequence of str, optional
        The runs, in the order of the legend. Default: all runs with metrics, the oldest first.
    path : str, optional
        Local file for the figure. The extension sets the format (``.png``, ``.svg``, ``.pdf``).
    names : collection of str, optional
        The metrics to plot, such as ``["loss"]``. Default: all, with ``loss`` first. A training
        metric and the validation metric with the same name after ``val_`` share one chart.

    Returns
    -------
    matplotlib.figure.Figure
        The figure. A notebook displays it as the value of a cell, with or without ``%matplotlib``.

    Raises
    ------
    ParamError
        If a run or metric does not exist, or if the runs have no metrics.
    DependencyError
        If matplotlib is not installed.
    """
    if isinstance(run_ids, str):
        raise ParamError(f"run_ids: expected a list of names of runs, found {run_ids!r}.")
    store = as_store(store)
    if run_ids is None:
        run_ids = [run.run_id for run in reversed(store.list_runs())]
        histories = {run_id: store.load_history(run_id) for run_id in run_ids}
        histories = {run_id: frame for run_id, frame in histories.items() if len(frame)}
    else:
        histories = {run_id: store.load_history(run_id) for run_id in run_ids}
    histories = {run_id: _joined(frame) for run_id, frame in histories.items()}
    metrics = list(dict.fromkeys(n for frame in histories.values() for n in frame["name"].unique()))
    if not metrics:
        raise ParamError(f"run_ids: found no metrics in the runs of {store!r}.")
    shown = sorted(metrics, key=lambda name: name != "loss") if names is None else list(names)
    for name in shown:
        if name not in metrics:
            raise ParamError(
                f"names: {name!r} was not measured in these runs, but {', '.join(sorted(metrics))}."
                f"{did_you_mean(name, metrics)}"
            )
    figure = _figure(histories, shown)
    if path is not None:
        figure.savefig(path)
    return figure


class _NotebookFigure(Figure):
    """Figure that a notebook displays even if no backend of matplotlib is configured."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def _joined(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a history that gives validation metrics the names of their training metrics."""
    training = set(frame["name"][frame["stage"] == "train"])
    return frame.assign(
        name=[
            re.sub("^val_", "", name)
            if stage == "validation" and re.sub("^val_", "", name) in training
            else name
            for stage, name in zip(frame["stage"], frame["name"], strict=True)
        ]
    )


def _figure(histories: dict[str, pd.DataFrame], names: Sequence[str]) -> Figure:
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    looks = {run_id: _look(number) for number, run_id in enumerate(histories)}
    handles = [
        Line2D([], [], label=_shortened(run_id), markersize=4, **look)
        for run_id, look in looks.items()
    ]
    stages = {stage for frame in histories.values() for stage in frame["stage"]}
    handles += [
        Line2D([], [], color="black", linestyle=style, label=stage)
        for stage, style in _STYLES.items()
        if stage in stages
    ]
    width, height = _INCHES[0] * columns, _INCHES[1] * rows
    longest = max(len(str(handle.get_label())) for handle in handles)
    beside = min(max(int(width / (_INCHES_PER_CHARACTER * (longest + 8))), 1), len(handles))
    height += _INCHES_PER_LINE * math.ceil(len(handles) / beside)
    figure = _NotebookFigure(figsize=(width, height), dpi=_PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    charts = figure.subplots(rows, columns, squeeze=False).ravel()
    for chart, name in zip(charts, names, strict=False):
        _draw(chart, name, histories, looks)
    for chart in charts[len(names) :]:
        chart.set_axis_off()
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=beside,
        fontsize="small",
        frameon=False,
    )
    return figure


def _draw(
    chart: Axes, name: str, histories: dict[str, pd.DataFrame], looks: dict[str, dict[str, Any]]
) -> None:
    for run_id, frame in histories.items():
        for stage, style in _STYLES.items():
            chosen = frame[(frame["name"] == name) & (frame["stage"] == stage)]
            if len(chosen):
                # With few markers, dashed lines remain recognizable.
                every = -(-len(chosen) // _MOST_MARKERS)
                # Count epochs from 1, as the progress display does.
                epochs = chosen["epoch"] + 1
                look = {**looks[run_id], "markersize": 4, "markevery": every}
                chart.plot(epochs, chosen["value"], linestyle=style, **look)
    chart.set_title(name)
    chart.set_xlabel("epoch")
    chart.set_ylabel(name)
    chart.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    chart.grid(alpha=0.3)


def _look(number: int) -> dict[str, Any]:
    """Return the colour and marker of a run; the marker changes when the colours repeat."""
    marker = _MARKERS[number // _COLORS % len(_MARKERS)]
    return {"color": colormaps["tab10"](number % _COLORS), "marker": marker}


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
