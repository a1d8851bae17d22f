"""Run all benchmarks, each in a separate process, and write their results and a page.

If a part fails, the others still run, and the failed part is named at the end. A part's new result
replaces its old one in the file. Parts that were not run, or failed, keep their old results.
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

from benchmarks import page, plots, quotes, results

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
QUOTING = (ROOT / "README.rst",)
"""Documents with their own substitutions, because they are shown where files cannot be included."""

PARTS: Mapping[str, str] = {
    "prepare": "--rows 4000 --repeats 1",
    "transform": "--rows 4000 --images 64 --repeats 1",
    "columns": "--rows 200 --widths 10 100 --repeats 1",
    "loader": "--rows 64000 --jpegs 200 --repeats 1",
    "shuffle": "--rows 80000 --images 512 --small",
    "memory": "--rows 65536",
    "fit": "--rows 8000 --repeats 1",
    "scaling": "--repeats 1 --steps 3 --ranks 2 --gigabits 1",
    "stores": "--rows 200000 --repeats 1",
    "files": "--files 100 --s3-files 10 --repeats 1",
    "launch": "--repeats 1",
    "collectives": "--repeats 1",
}
"""Parts in order, and options for a short trial run."""

ELSEWHERE: Mapping[str, str] = {
    "gpu": "--cpu --rows 20000 --images 64 --repeats 1",
    "gpu_spark": "--cpu --rows 2000 --images 8 --slots 2 --repeats 1",
}
"""Parts that run only if they are named."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    chosen = [] if options.page_only else options.parts or [*PARTS]
    file = options.output / f"{options.name}.json"
    found, failed = results.load(file), []
    for part in chosen:
        print(f"== {part}", flush=True)
        given = {**PARTS, **ELSEWHERE}[part].split() if options.quick else _given(options)
        try:
            result = results.parse(last_line(command_of(part, given), options.limit))
            found[part] = dataclasses.replace(result, part=part)
        except (ValueError, subprocess.SubprocessError) as error:
            failed.append(part)
            print(f"{part}: {error}", file=sys.stderr, flush=True)
            continue
        order = [*PARTS, *ELSEWHERE]
        results.save(file, {name: found[name] for name in order if name in found})
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


def command_of(part: str, given: Sequence[str]) -> list[str]:
    """Return the command line that runs a part."""
    return [sys.executable, "-m", f"benchmarks.{part}", *given]


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
    known = [*PARTS, *ELSEWHERE]
    add("--parts", nargs="+", choices=known, metavar="PART", help=f"some of {', '.join(known)}")
    add("--quick", action="store_true", help="small sizes: whether they run, not how fast")
    add("--rows", type=int, help="rows of the DataFrame, for all of them")
    add("--repeats", type=int, help="times that each is measured, for all of them")
    add("--limit", type=float, default=3600, help="seconds that a part may take")
    add("--output", type=Path, help="folder; docs/figures, or build/figures with --quick")
    add("--name", default="results", help="the file of results; another one for another machine")
    add("--page-only", action="store_true", help="only write the page again, of the results there")
    options = parser.parse_args(arguments)
    default = ROOT / "build" / "figures" if options.quick else FIGURES
    options.output = (options.output or default).resolve()
    return options


def _given(options: argparse.Namespace) -> list[str]:
    return [
        text
        for name in ("rows", "repeats")
        if (value := getattr(options, name)) is not None
        for text in (f"--{name}", str(value))
    ]


if __name__ == "__main__":
    # End the running part with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
