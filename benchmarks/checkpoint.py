"""Steps per second with and without mid-epoch checkpoints, and seconds from a kill to a new step.

Two ranks on a local disk, for each framework, with a small network and with one of 400 MB. Runs
with and without checkpoints alternate, in pairs. A run's speed is the median of its stretches of
100 steps, so that other load on the machine has little influence.

Identical runs differ by more than the cost of a checkpoint. Therefore the cost for the small
network is also measured within runs: the extra time of the steps around a checkpoint, compared
with the other steps between the same two checkpoints. The same measurement in runs without
checkpoints shows the noise.

The cost is also measured in processor time of the first rank, which writes. If ranks fill all
cores, the writing thread takes this time from training. Other processes do not add to it.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import HIDDEN, WIDTH, write_regression_data
from benchmarks.figures import Record, compared, parser, show_result, show_table
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend

TARGET = 0.97
EVERY = 100
RANKS = 2
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
# Unmeasured steps at the start, in which threads, buffers and graphs are created.
WARM_UP = 20
# Steps that a checkpoint may slow down: the one at whose end it begins, and the following ones.
AROUND = 30
# Names of the ratios within runs, each followed by that of its noise.
WITHIN = ("within", "none", "processor", "none")
# A layer of 10,000 x 10,000 weights has 400 MB.
LARGE = 10_000


class Clock:
    """Record the start of each step on the first rank, and write the times to a file at the end.

    The file has two rows: seconds since the epoch, and processor seconds of all threads.

    Parameters
    ----------
    path : str
        The file.
    kill_at : int
        The step in which the last rank kills itself, in the first launch; 0 for none.
    """

    def __init__(self, path: str, kill_at: int = 0) -> None:
        self.path, self.kill_at = path, kill_at
        self.moments: list[float] = []
        self.processor: list[float] = []

    def step(self) -> None:
        rank = int(os.environ["HOROVOD_RANK"])
        self.moments.append(time.time())
        self.processor.append(time.process_time())
        if self.kill_at == len(self.moments) and rank == RANKS - 1:
            killed = Path(f"{self.path}.killed")
            if not killed.exists():
                killed.write_text(f"{time.time()}")
                os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        if os.environ["HOROVOD_RANK"] == "0":
            np.save(self.path, [self.moments, self.processor])


class TorchClock(Clock):
    """`Clock` as a callback of `TorchEstimator`; a hook of the module reports steps."""

    def on_train_begin(self, module: torch.nn.Module, **_: Any) -> None:
        module.register_forward_pre_hook(lambda *_: self.step())

    def on_train_end(self, **_: Any) -> None:
        self.end()


def torch_net(width: int) -> torch.nn.Sequential:
    """Return a network with one hidden layer, or with two of the given width."""
    torch.manual_seed(1)
    hidden = width or HIDDEN
    layers = [torch.nn.Linear(WIDTH, hidden), torch.nn.ReLU()]
    if width:
        layers += [torch.nn.Linear(width, width, bias=False), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(hidden, 1), torch.nn.Flatten(0))


def torch_estimator(clock: tuple[str, int], width: int, **params: Any) -> Any:
    from hvd_estimators.torch import TorchEstimator

    net = torch_net(width)
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-4),
        loss=torch.nn.functional.mse_loss,
        callbacks=[TorchClock(*clock)],
        **params,
    )


def keras_estimator(clock: tuple[str, int], width: int, **params: Any) -> Any:
    import keras

    from hvd_estimators.keras import KerasEstimator

    class KerasClock(keras.callbacks.Callback, Clock):
        def __init__(self, *given: Any) -> None:
            keras.callbacks.Callback.__init__(self)
            Clock.__init__(self, *given)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.step()

        def on_train_end(self, logs: Any = None) -> None:
            self.end()

    hidden = [keras.layers.Dense(width or HIDDEN, activation="relu")]
    if width:
        hidden.append(keras.layers.Dense(width, activation="relu", use_bias=False))
    return KerasEstimator(
        model=keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(1e-4),
        loss="mse",
        callbacks=[KerasClock(*clock)],
        **params,
    )


def lightning_estimator(clock: tuple[str, int], width: int, **params: Any) -> Any:
    import pytorch_lightning as lightning

    from hvd_estimators.lightning import LightningEstimator

    class LightningClock(lightning.Callback, Clock):
        def __init__(self, *given: Any) -> None:
            lightning.Callback.__init__(self)
            Clock.__init__(self, *given)

        def on_train_batch_start(self, *_: Any) -> None:
            self.step()

        def on_train_end(self, *_: Any) -> None:
            self.end()

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch_net(width)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layers(batch["features"]), batch["label"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    return LightningEstimator(
        model=Net(), logger=False, callbacks=[LightningClock(*clock)], **params
    )


ESTIMATORS: Mapping[str, Callable[..., Any]] = {
    "torch": torch_estimator,
    "keras": keras_estimator,
    "lightning": lightning_estimator,
}


def fit(framework: str, folder: Path, name: str, width: int, batch_size: int, **how: Any) -> Path:
    """Train an epoch, and return the file with the times of its steps."""
    store = Store.create(f"{folder}/store")
    path = folder / f"{name}.npy"
    estimator = ESTIMATORS[framework](
        (str(path), how.pop("kill_at", 0)),
        width,
        backend=LocalBackend(RANKS, env=QUIET),
        store=store,
        run_id=name,
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=batch_size,
        epochs=1,
        random_seed=1,
        verbose=0,
        **how,
    )
    estimator.fit_on_parquet()
    store.delete_run(name)
    return path


def speed(moments: Sequence[float]) -> float:
    """Return the steps per second of the median stretch; each stretch has one checkpoint."""
    measured = moments[WARM_UP:]
    length = EVERY if len(measured) > 5 * EVERY else len(measured) - 1
    bounds = measured[::length]
    return float(length / np.median(np.diff(bounds)))


def seconds_around(moments: Sequence[float]) -> tuple[float, float]:
    """Return the extra seconds of the steps around a checkpoint, and those of 100 other steps.

    Both are medians of stretches from one checkpoint to the next, without the first stretch.
    """
    took = np.diff(moments)
    stretches = [
        took[begin : begin + EVERY] for begin in range(EVERY - 1, len(took) - EVERY + 1, EVERY)
    ]
    others = [stretch[AROUND:].mean() for stretch in stretches]
    longer = [
        stretch[:AROUND].sum() - AROUND * other
        for stretch, other in zip(stretches, others, strict=True)
    ]
    return float(np.median(longer)), float(EVERY * np.median(others))


@dataclass(frozen=True)
class Price:
    """Steps per second of pairs of runs, and ratios within runs; None if not measured.

    Attributes
    ----------
    without, with_them : tuple of float
        Steps per second.
    within, within_none : float or None
        Time of steps without a checkpoint divided by their time with one; and the same in runs
        without checkpoints.
    processor, processor_none : float or None
        The same ratios for the processor time of the first rank.
    """

    without: tuple[float, ...]
    with_them: tuple[float, ...]
    within: float | None = None
    within_none: float | None = None
    processor: float | None = None
    processor_none: float | None = None

    @property
    def ratios(self) -> list[float]:
        """The speed with checkpoints divided by the speed without, of each pair."""
        return [w / o for o, w in zip(self.without, self.with_them, strict=True)]


def price(framework: str, folder: Path, width: int, batch_size: int, repeats: int) -> Price:
    """Train in pairs, without and with checkpoints within the epoch."""
    speeds: dict[int, list[float]] = {0: [], EVERY: []}
    around: dict[int, list[list[tuple[float, float]]]] = {0: [], EVERY: []}
    for turn in range(repeats):
        # The order alternates, because each run finds the machine as the previous one left it.
        for every in (0, EVERY) if turn % 2 == 0 else (EVERY, 0):
            name = f"{framework}-{width}-{turn}-{every}"
            how = {"checkpoint_every_n_steps": every} if every else {}
            clocks = np.load(fit(framework, folder, name, width, batch_size, **how))
            speeds[every].append(speed(clocks[0]))
            if clocks.shape[1] > 5 * EVERY:
                around[every].append([seconds_around(clock) for clock in clocks])

    def ratio_within(every: int, clock: int) -> float | None:
        if not around[every]:
            return None
        longer, stretch = np.median([of_run[clock] for of_run in around[every]], axis=0)
        return float(stretch / (stretch + longer))

    ratios = [ratio_within(every, clock) for clock in (0, 1) for every in (EVERY, 0)]
    return Price(tuple(speeds[0]), tuple(speeds[EVERY]), *ratios)


def seconds_to_next_step(framework: str, folder: Path, batch_size: int) -> float:
    """Return the seconds from the kill of a rank to the first step after the relaunch."""
    kill_at = 2 * EVERY + EVERY // 2
    name = f"{framework}-killed"
    how = {"kill_at": kill_at, "max_restarts": 1, "checkpoint_every_n_steps": EVERY}
    path = fit(framework, folder, name, 0, batch_size, **how)
    # Remove the file, so that the next run is also killed.
    killed = Path(f"{path}.killed")
    moment = float(killed.read_text())
    killed.unlink()
    # Restored Keras callbacks still have the times recorded before the kill.
    return float(min(step for step in np.load(path)[0] if step > moment)) - moment


def main() -> None:
    arguments = parser(__doc__, rows=1_000_000, repeats=3)
    arguments.add_argument("--batch-size", type=int, default=256, help="rows of a rank's batch")
    arguments.add_argument("--large-steps", type=int, default=150, help="steps of the large one")
    arguments.add_argument("--large-repeats", type=int, default=1, help="times for the large one")
    arguments.add_argument("--frameworks", nargs="+", default=list(ESTIMATORS))
    given = arguments.parse_args()
    prices: dict[str, Price] = {}
    restart: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-checkpoint-") as directory:
        folder, large = Path(directory, "small"), Path(directory, "large")
        for place, rows in ((folder, given.rows), (large, given.large_steps * RANKS * 16)):
            place.mkdir()
            target = Path(Store.create(f"{place}/store").get_train_data_path())
            write_regression_data(place, target, rows)
        for name in given.frameworks:
            prices[f"{name}, small"] = price(name, folder, 0, given.batch_size, given.repeats)
            restart[name] = [seconds_to_next_step(name, folder, given.batch_size) for _ in range(3)]
            if given.large_repeats:
                prices[f"{name}, 400 MB"] = price(name, large, LARGE, 16, given.large_repeats)
    show_table(
        f"Steps per second, {RANKS} ranks",
        ["", "without", f"every {EVERY} steps", "ratio of pairs", "from", "to", *WITHIN],
        [
            [
                name,
                statistics.median(of.without),
                statistics.median(of.with_them),
                statistics.median(of.ratios),
                min(of.ratios),
                max(of.ratios),
                *(
                    "-" if ratio is None else ratio
                    for ratio in (of.within, of.within_none, of.processor, of.processor_none)
                ),
            ]
            for name, of in prices.items()
        ],
    )
    middles = [[name, statistics.median(taken)] for name, taken in restart.items()]
    show_table("Seconds from a kill to the next step", ["", "s"], middles)
    print(f"\nwith / without: target {TARGET}")
    figures = {
        "price": {name: asdict(of) for name, of in prices.items()},
        "seconds_from_kill_to_step": restart,
    }
    show_result("checkpoint", vars(given), figures, records_of(prices, restart))


def records_of(prices: Mapping[str, Price], restart: Mapping[str, list[float]]) -> list[Record]:
    """Return records of each pair's speeds, of the ratios within runs, and of restarts."""
    records: list[Record] = []
    for name, of in prices.items():
        measured = {"without": of.without, f"every {EVERY} steps": of.with_them}
        records += compared(f"steps, {name}", measured, "steps/s", "without", middle=True)
    for table, ours, chance in (
        ("within runs", "within", "within_none"),
        ("processor time", "processor", "processor_none"),
    ):
        ratios = {
            f"{name}{which}": [getattr(of, attribute)]
            for name, of in prices.items()
            for attribute, which in ((ours, ""), (chance, ", none written"))
            if getattr(of, attribute) is not None
        }
        records += compared(table, ratios, "")
    return [*records, *compared("from a kill to the next step", restart, "s", middle=True)]


if __name__ == "__main__":
    main()
