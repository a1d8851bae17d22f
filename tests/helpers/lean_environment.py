"""Copy of this environment without some packages and without compilers."""

import os
import re
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

COMPILERS = re.compile(
    r"(.*-)?(as|cc|ccache|clang|clang\+\+|cmake|cpp|c\+\+|g\+\+|gcc|gmake|ld|make|nvcc)(-[\d.]+)?"
)


def lean_environment(folder, without):
    """Return the variables that make ``python3`` that of a new environment in a folder.

    Parameters
    ----------
    folder : Path
        A folder that does not exist.
    without : collection of str
        Prefixes of the names of packages' files that the environment lacks.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    paths = sysconfig.get_paths()
    left_out = (*without, "hvd_estimators", "__editable__")
    for packages in {paths["purelib"], paths["platlib"]}:
        for entry in Path(packages).iterdir():
            if not entry.name.startswith(left_out) and not os.path.lexists(site / entry.name):
                (site / entry.name).symlink_to(entry)
    (site / "repository.pth").write_text(f"{ROOT}\n")
    programs = folder / "programs"
    programs.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        # This environment's scripts would run its own Python.
        if os.path.isdir(place) and not Path(place).is_relative_to(sys.prefix):
            for entry in Path(place).iterdir():
                if not COMPILERS.fullmatch(entry.name) and not os.path.lexists(
                    programs / entry.name
                ):
                    (programs / entry.name).symlink_to(entry)
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CXX", "CC", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    }
    python = str(folder / "bin" / "python3")
    return {
        **variables,
        "PATH": f"{folder / 'bin'}{os.pathsep}{programs}",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "TMPDIR": str(folder),
    }
