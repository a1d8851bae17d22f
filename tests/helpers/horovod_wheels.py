"""Small stand-ins for Horovod's source and wheels, for the tests of its build."""

import patch_ng

from hvd_estimators.commands.horovod_source import PATCHES, write_build_files
from hvd_estimators.commands.toolchain import BuildRecipe

RECIPE = BuildRecipe("cp311-cp311-manylinux_2_36_x86_64", torch="2.13.0+cpu", tensorflow="2.21.0")
WHEEL_NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"

PYTHON_PATCHES = PATCHES[-3:]
"""The patches of Python files. Compiling Horovod, which `make setup` does, shows all others."""

# What the patched files import.
_SOURCE = {
    "setup.py": "",
    "horovod/__init__.py": "",
    "horovod/common/__init__.py": "",
    "horovod/common/util.py": "check_extension = lambda *names: None\n",
    "horovod/runner/__init__.py": "",
    "horovod/spark/common/__init__.py": "",
    "horovod/spark/common/_namedtuple_fix.py": "",
    "horovod/spark/runner.py": "run = run_elastic = 'the frozen one'\n",
    "horovod/spark/torch.py": "TorchEstimator = 'the frozen one'\n",
}


def make_source(folder):
    """Write a source with the lines that `PYTHON_PATCHES` expect; return the folder."""
    for name, text in _SOURCE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for patch in PYTHON_PATCHES:
        for change in patch_ng.fromfile(str(patch)).items:
            lines = []
            for hunk in change.hunks:
                lines += ["#\n"] * (hunk.startsrc - 1 - len(lines))
                lines += [line[1:].decode() for line in hunk.text if line[:1] in b" -"]
            path = folder / change.source.decode().removeprefix("a/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines))
    return folder


def make_patched_source(folder, recipe):
    """Write a patched source for a recipe; return the folder."""
    make_source(folder)
    for patch in PYTHON_PATCHES:
        assert patch_ng.fromfile(str(patch)).apply(strip=1, root=str(folder))
    write_build_files(folder, recipe.record())
    return folder
