"""Run all benchmarks, one after another, each in a process of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys

BENCHMARKS = (
    "prepare",
    "transform",
    "stream",
    "loader",
    "shuffle",
    "memory",
    "fit",
    "keras",
    "lightning",
    "stores",
    "launch",
    "checkpoint",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", type=int, help="rows of the DataFrame, for all of them")
    parser.add_argument("--repeats", type=int, help="times that each is measured, for all of them")
    options = parser.parse_args()
    given = [
        text
        for name, value in vars(options).items()
        if value is not None
        for text in (f"--{name}", str(value))
    ]
    failed = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *given]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
