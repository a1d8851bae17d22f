"""A picture of what was measured in several runs of a store. Runs on the driver.

matplotlib is needed, an extra of this package.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_histories"]

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
    store: Store,
    run_ids: Sequence[str] | None = None,
    path: str | None = None,
    names: Collection[str] | None = None,
) -> Figure:
    """Plot what was measured in runs, by epoch: a chart for each metric, a colour for each run.

    Training is a solid line, validation a dashed one.

    Parameters
    ----------
    store : Store
        Keeps the runs.
    run_ids : sequence of str, optional
        The runs, in the order of the legend. Default: all that have measured something, the oldest
        first.
    path : str, optional
        A local file to write, in the format that its ending names (``.png``, ``.svg``, ``.pdf``).
    names : collection of str, optional
        The metrics to plot, such as ``["loss"]``. Default: all, loss first. Where validation has
        the name of training with ``val_`` before it, both are in one chart.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; a notebook shows it.

    Raises
    ------
    ParamError
        If there is no such run or metric, or nothing to plot.
    DependencyError
        If matplotlib is not installed.
    """
    if isinstance(run_ids, str):
        raise ParamError(f"run_ids: expected a list of names of runs, found {run_ids!r}.")
    if run_ids is None:
        run_ids = [run.run_id for run in reversed(store.list_runs())]
        histories = {run_id: store.load_history(run_id) for run_id in run_ids}
        histories = {run_id: frame for run_id, frame in histories.items() if len(frame)}
    else:
        histories = {run_id: store.load_history(run_id) for run_id in run_ids}
    histories = {run_id: _joined(frame) for run_id, frame in histories.items()}
    found = list(dict.fromkeys(n for frame in histories.values() for n in frame["name"].unique()))
    if not found:
        raise ParamError(f"run_ids: nothing was measured yet in the runs of {store!r}.")
    wanted = sorted(found, key=lambda name: name != "loss") if names is None else list(names)
    for name in wanted:
        if name not in found:
            raise ParamError(
                f"names: {name!r} was not measured in these runs, but {', '.join(sorted(found))}."
                f"{did_you_mean(name, found)}"
            )
    figure = _figure(histories, wanted)
    if path is not None:
        figure.savefig(path)
    return figure


def _joined(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a history in which validation's names are those of training."""
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
    figure = Figure(figsize=(width, height), dpi=_PIXELS_PER_INCH, layout="constrained")
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
                # So few that dashes are seen as such.
                every = -(-len(chosen) // _MOST_MARKERS)
                # As people count, and as progress is shown.
                epochs = chosen["epoch"] + 1
                look = {**looks[run_id], "markersize": 4, "markevery": every}
                chart.plot(epochs, chosen["value"], linestyle=style, **look)
    chart.set_title(name)
    chart.set_xlabel("epoch")
    chart.set_ylabel(name)
    chart.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    chart.grid(alpha=0.3)


def _look(number: int) -> dict[str, Any]:
    """Return colour and marker of a run: other markers where the colours come again."""
    marker = _MARKERS[number // _COLORS % len(_MARKERS)]
    return {"color": colormaps["tab10"](number % _COLORS), "marker": marker}


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
