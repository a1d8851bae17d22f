"""Processes whose clock is wrong, as on a host without time synchronization. Linux only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

VARIABLE, RANK_VARIABLE = "TEST_CLOCK_SHIFT", "TEST_CLOCK_RANK"

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    const char *seconds = getenv("TEST_CLOCK_SHIFT");
    const char *shifted = getenv("TEST_CLOCK_RANK");
    const char *rank = getenv("HOROVOD_RANK");
    if (!seconds || (shifted && (!rank || strcmp(rank, shifted)))) return 0;
    return atol(seconds);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def shifted_environment(folder: Path, seconds: int, rank: int | None = None) -> dict[str, str]:
    """Return variables with which a process starts with a shifted clock.

    Parameters
    ----------
    folder : Path
        Folder for the library that shifts the clock.
    seconds : int
        The shift.
    rank : int, optional
        The only rank whose clock is shifted. Default: all processes.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = folder / "clock.c", folder / "clock.so"
    if not library.exists():
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
    chosen = {} if rank is None else {RANK_VARIABLE: str(rank)}
    return {"LD_PRELOAD": str(library), VARIABLE: str(seconds), **chosen}
