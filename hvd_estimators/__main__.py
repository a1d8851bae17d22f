"""The command line: ``hvd-estimators build-horovod`` and ``hvd-estimators doctor``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_estimators import __version__
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments after the program's name. Default: those in ``sys.argv``.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except HvdEstimatorsError as error:
        print(f"hvd-estimators: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvd-estimators", description="Build Horovod and check the installation."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    build = commands.add_parser(
        "build-horovod",
        help="build (or find in the cache) and install Horovod for the installed frameworks",
        description="Build a Horovod wheel for the installed torch and TensorFlow, keep it in a "
        "cache, and install it. The first build takes some minutes.",
    )
    _add_build_options(build)
    doctor = commands.add_parser(
        "doctor",
        help="check the installation and suggest fixes",
        description="Check the installed packages and run a small allreduce. The exit status is 1 "
        "if a check fails.",
    )
    doctor.add_argument("--json", action="store_true", help="print the rows as JSON")
    doctor.add_argument(
        "--parameters",
        type=lambda text: _positive(str(int(float(text)))),
        metavar="N",
        help="print the memory that a torch model of N parameters, such as 7e9, needs on each of "
        "--num-proc processes, and check nothing",
    )
    _add_cluster_options(doctor)
    doctor.set_defaults(run=_doctor)
    return parser


def _add_cluster_options(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument(
        "--cluster",
        action="store_true",
        help="check the executors of a Spark application instead of this machine",
    )
    cluster = doctor.add_argument_group("with --cluster")
    cluster.add_argument(
        "--master",
        metavar="URL",
        help="Spark's master, or sc://HOST:PORT of a Spark Connect server (default: from "
        "spark-submit, or Spark's configuration)",
    )
    cluster.add_argument(
        "--conf",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="a setting of Spark; can be repeated",
    )
    cluster.add_argument(
        "--store", metavar="PREFIX", help="the estimators' store, which all hosts write and read"
    )
    cluster.add_argument(
        "--num-proc",
        type=_positive,
        metavar="N",
        help="number of task slots to check (default: all)",
    )
    cluster.add_argument("--nics", metavar="NAMES", help="network interfaces, separated by commas")


def _add_build_options(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "--gpu",
        choices=("auto", "none", "cuda"),
        default="auto",
        help="auto (default): CUDA if torch was built with it and a CUDA toolkit is found",
    )
    build.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="folder of the wheels (default: $HVD_ESTIMATORS_CACHE, or hvd_estimators in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )
    build.add_argument("--force", action="store_true", help="build although the cache has it")
    build.add_argument(
        "--no-install", action="store_true", help="only build, and print the wheel's path"
    )
    build.add_argument(
        "--jobs", type=_positive, metavar="N", help="compilers to run at the same time"
    )
    compat = build.add_mutually_exclusive_group()
    compat.add_argument(
        "--with-compat",
        action="store_true",
        default=None,
        help="serve horovod.spark from this package, for code and libraries that cannot change "
        "their imports (default: as in the installed Horovod)",
    )
    compat.add_argument(
        "--without-compat",
        action="store_false",
        dest="with_compat",
        help="make horovod.spark of the wheel raise an ImportError",
    )
    build.set_defaults(run=_build)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text}")
    return number


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, not {text}")
    return name, value


def _build(options: argparse.Namespace) -> int:
    from hvd_estimators.commands.build import build_horovod

    # An exception reaches the code that stops the compilers. By default, SIGTERM would end only
    # this process, and the compilers would continue.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        wheel = build_horovod(
            gpu=options.gpu,
            cache_dir=options.cache_dir,
            force=options.force,
            install=not options.no_install,
            jobs=options.jobs,
            with_compat=options.with_compat,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.no_install:
        print(wheel)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    if options.parameters:
        from hvd_estimators.training.memory import describe_memory

        print(describe_memory(options.parameters, options.num_proc or 1))
        return 0
    if options.cluster:
        return _doctor_of_cluster(options)
    from hvd_estimators.commands import doctor

    given = [
        name for name in ("master", "conf", "store", "num_proc", "nics") if vars(options)[name]
    ]
    if given:
        raise ParamError(f"--{given[0].replace('_', '-')} needs --cluster.")
    return doctor.main(as_json=options.json)


def _doctor_of_cluster(options: argparse.Namespace) -> int:
    from pyspark.sql import SparkSession

    from hvd_estimators.commands.cluster_doctor import check_cluster

    builder = SparkSession.builder
    for name, value in options.conf:
        builder = builder.config(name, value)
    master = options.master or ""
    if master.startswith("sc://"):
        builder = builder.remote(master)
    elif master:
        builder = builder.master(master)
    spark = builder.appName("hvd-estimators doctor").getOrCreate()
    try:
        is_healthy = check_cluster(
            spark,
            options.store,
            num_proc=options.num_proc,
            nics=options.nics.split(",") if options.nics else None,
            as_json=options.json,
        )
    finally:
        spark.stop()
    return 0 if is_healthy else 1


if __name__ == "__main__":
    sys.exit(main())
