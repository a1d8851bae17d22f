"""Run all benchmarks, each in a separate process, and write their results and a page.

If a part fails, the others still run, and the failed part is named at the end. A part's new result
replaces its old one in the file. Parts that were not run, or failed, keep their old results. A part
fails if other programs use more than a processor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import figures, page, plots, quotes, results

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
QUOTING = (ROOT / "README.rst",)
"""Documents with their own substitutions, because they are shown where files cannot be included."""

PARTS: Mapping[str, str] = {
    "prepare": "--rows 4000",
    "transform": "--rows 4000 --images 64",
    "columns": "--rows 200 --widths 10 100",
    "loader": "--rows 64000 --jpegs 200",
    "loader_text": "--rows 2000",
    "shuffle": "--rows 80000 --small",
    "memory": "--rows 65536 --parameters 2e7",
    "fit": "--rows 8000",
    "scaling": "--steps 3 --ranks 2 --gigabits 1",
    "stores": "--rows 200000",
    "files": "--files 1 100",
    "launch": "",
    "collectives": "",
    "gpu": "--cpu --gpus 2 --rows 20000 --images 64 --parameters 2e7",
}
"""Parts in order, and options for a short trial run."""

ELSEWHERE = ("gpu",)
"""Parts that run only if they are named."""

MOST_LOAD = 1.0
"""Processors that other programs may use."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    default = [part for part in PARTS if part not in ELSEWHERE]
    chosen = [] if options.page_only else options.parts or default
    file = options.output / f"{options.name}.json"
    found, failed = results.load(file), []
    for part in chosen:
        print(f"== {part}", flush=True)
        load = 0.0 if options.quick else figures.load()
        if load > MOST_LOAD:
            failed.append(part)
            print(f"{part}: other programs use {load:.1f} processors. End them.", file=sys.stderr)
            continue
        given = [*PARTS[part].split(), "--repeats", "1"] if options.quick else options.given
        command = [sys.executable, "-m", f"benchmarks.{part}", *given]
        try:
            result = results.parse(last_line(command, options.limit))
            machine = {**result.machine, "load_before": round(load, 1)}
            found[part] = dataclasses.replace(result, machine=machine)
        except (ValueError, subprocess.SubprocessError) as error:
            failed.append(part)
            print(f"{part}: {error}", file=sys.stderr, flush=True)
            continue
        results.save(file, {name: found[name] for name in PARTS if name in found})
    publish(options.output, QUOTING if options.output == FIGURES else ())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def publish(folder: Path, quoting: Sequence[Path]) -> None:
    """Write the page, its plots and the figures that the documentation quotes."""
    folder.mkdir(parents=True, exist_ok=True)
    page.write(folder)
    plots.draw(folder)
    texts = quotes.texts(results.load(folder / "results.json"))
    quotes.write(folder / quotes.QUOTED, texts)
    for document in quoting:
        quotes.rewrite(document, texts)
    print(f"\nwritten: {folder / page.PAGE}")


def last_line(command: Sequence[str], limit: float) -> str:
    """Run a command, print its output, and return its last line.

    Parameters
    ----------
    command : sequence of str
        The command. It has its own process group, which is killed with it.
    limit : float
        Maximum duration in seconds.

    Raises
    ------
    subprocess.SubprocessError
        If the command fails, or exceeds the limit.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):  # The process has just ended.
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    last = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            # The full result is in the file.
            print(line[:2000], end="" if len(line) <= 2000 else " ...\n", flush=True)
            last = line.strip() or last
        code = process.wait()
    except BaseException:
        end()
        process.wait()
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise subprocess.TimeoutExpired(command, limit)
    if code:
        raise subprocess.CalledProcessError(code, command)
    return last


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"some of {', '.join(PARTS)}")
    add("--quick", action="store_true", help="small sizes: whether they run, not how fast")
    add("--repeats", dest="given", help="times that each is measured, for all of them")
    add("--limit", type=float, default=3600, help="seconds that a part may take")
    add("--output", type=Path, help="folder; docs/figures, or build/figures with --quick")
    add("--name", default="results", help="the file of results; another one for another machine")
    add("--page-only", action="store_true", help="only write the page again, of the results there")
    options = parser.parse_args(arguments)
    default = ROOT / "build" / "figures" if options.quick else FIGURES
    options.output = (options.output or default).resolve()
    options.given = ["--repeats", options.given] if options.given else []
    return options


if __name__ == "__main__":
    # End the running part with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
