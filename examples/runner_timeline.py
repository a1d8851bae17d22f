"""Analyse Horovod's timeline of a training loop that runs with HorovodRunner.

``HorovodRunner(np=-2)`` runs a hand-written torch loop in two processes on this machine, without
Spark. ``--np 2`` runs it in two tasks of a Spark job. Messages that rank 0 sends with
``log_to_driver`` appear here. ``HOROVOD_TIMELINE`` makes Horovod record its activity for every
tensor. The script adds up the times; chrome://tracing or https://ui.perfetto.dev displays them.

Run it with ``python examples/runner_timeline.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

from common import make_parser, start_spark

from hvd_estimators import HorovodRunner


def train(learning_rate: float, batch_size: int, epochs: int, seed: int) -> float:
    """Train a network on this rank's share of the digits; return its accuracy on all test images.

    Runs on every rank, in a separate process.
    """
    import horovod.torch as hvd
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    from hvd_estimators import log_to_driver

    hvd.init()
    torch.manual_seed(seed)  # the same initial network; broadcast_parameters ensures it anyway
    data = load_digits()
    images, digits = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(network.parameters(), lr=learning_rate * hvd.size()),
        named_parameters=network.named_parameters(),
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)

    # The last 297 images are the test set. All ranks take the same number of batches.
    steps = 1500 // (batch_size * hvd.size())
    for epoch in range(epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for step in range(steps):
            start = (step * hvd.size() + hvd.rank()) * batch_size
            rows = order[start : start + batch_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[rows]), digits[rows])
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch + 1}: loss of the last batches {mean:.3f}")
    with torch.no_grad():
        return (network(images[1500:]).argmax(1) == digits[1500:]).float().mean().item()


def time_spent(timeline: Path) -> dict[str, tuple[int, float]]:
    """Return the count and the total milliseconds of each activity.

    The file lists events in the format of Chrome's traces. Each tensor is a process (``pid``),
    whose activities begin ("B") and end ("E") and can be nested.
    """
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else f"{text}]")
    open_since: dict[int, list[tuple[str, float]]] = defaultdict(list)
    spent: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("ph") == "B":
            open_since[event["pid"]].append((event["name"], event["ts"]))
        elif event.get("ph") == "E" and open_since[event["pid"]]:
            name, start = open_since[event["pid"]].pop()
            count, total = spent.get(name, (0, 0.0))
            spent[name] = count + 1, total + (event["ts"] - start) / 1000
    return spent


def run(args: argparse.Namespace) -> tuple[float, dict[str, tuple[int, float]]]:
    """Train and read the timeline; return the accuracy and the times of the activities."""
    args.output.mkdir(parents=True, exist_ok=True)
    timeline = args.output / "timeline.json"
    timeline.unlink(missing_ok=True)
    runner = HorovodRunner(np=args.np, env={"HOROVOD_TIMELINE": str(timeline)})
    accuracy = runner.run(
        train,
        learning_rate=args.learning_rate,
        batch_size=args.batch_size,
        epochs=args.epochs,
        seed=args.seed,
    )
    print(f"Accuracy on 297 images held out: {accuracy:.3f}")
    spent = time_spent(timeline)
    print(f"\n{'activity':<28}{'times':>8}{'ms in all':>12}")
    for name, (count, total) in sorted(spent.items(), key=lambda item: -item[1][1])[:10]:
        print(f"{name:<28}{count:>8}{total:>12.1f}")
    print(f"\nTimeline: {timeline}")
    return accuracy, spent


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "runner_timeline", learning_rate=3e-3)
    parser.add_argument(
        "--np", type=int, default=-2, help="below 0: processes here; above 0: tasks of Spark"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "runner_timeline") if arguments.np > 0 else nullcontext():
        run(arguments)
