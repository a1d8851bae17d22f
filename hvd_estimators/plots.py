"""Plots that compare the metrics of several runs in a store. Runs on the driver.

This module requires matplotlib, which is an optional dependency.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib import ticker
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.store import Store
from hvd_estimators.store.base import as_store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"train": "-", "validation": "--"}
_COLUMNS = 3
_INCHES = 5.2, 3.6
_PIXELS_PER_INCH = 120


def plot_histories(
    store: Store | str,
    run_ids: Sequence[str] | None = None,
    path: str | None = None,
    names: Collection[str] | None = None,
) -> Figure:
    """Plot metrics of runs by epoch, with one chart per metric and one colour per run, up to ten.

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
    if isinstance(names, str) or (names is not None and not names):
        raise ParamError(f"names: expected a list of names of metrics, found {names!r}.")
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
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    size = _INCHES[0] * columns, _INCHES[1] * rows
    figure = _NotebookFigure(figsize=size, dpi=_PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    for number, name in enumerate(shown, start=1):
        _draw(figure.add_subplot(rows, columns, number), name, histories)
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
    plain = frame["name"].str.removeprefix("val_")
    is_pair = (frame["stage"] == "validation") & plain.isin(training)
    return frame.assign(name=plain.where(is_pair, frame["name"]))


def _draw(chart: Axes, name: str, histories: dict[str, pd.DataFrame]) -> None:
    for number, (run_id, frame) in enumerate(histories.items()):
        for stage, style in _STYLES.items():
            chosen = frame[(frame["name"] == name) & (frame["stage"] == stage)]
            if len(chosen):
                # Count epochs from 1, as the progress display does.
                epochs, label = chosen["epoch"] + 1, f"{run_id}, {stage}"
                chart.plot(epochs, chosen["value"], style, color=f"C{number}", label=label)
    chart.set(title=name, xlabel="epoch", ylabel=name)
    chart.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    chart.grid(alpha=0.3)
    chart.legend(fontsize="small")
