"""Small wheels that stand in for Horovod's, for the tests of its build."""

import base64
import csv
import hashlib
import zipfile

from hvd_estimators.commands.toolchain import BuildRecipe

RECIPE = BuildRecipe("cp311-cp311-manylinux_2_36_x86_64", torch="2.13.0+cpu", tensorflow="2.21.0")
WHEEL_NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


def make_wheel(path, text):
    """Write a tiny Horovod wheel that pip can install."""
    files = {
        "horovod/__init__.py": "",
        "horovod/torch/__init__.py": text,
        "horovod/tensorflow/__init__.py": "",
        "horovod/runner/__init__.py": "",
        "horovod/spark/__init__.py": "run = 'the frozen one'\n",
        "horovod/spark/torch.py": "TorchEstimator = 'the frozen one'\n",
    }
    return write_wheel(path, "horovod", "0.28.1", files)


def make_package(folder, name, version):
    """Write a wheel that holds one module with a version, and nothing else."""
    module = {f"{name}/__init__.py": f"__version__ = {version!r}\n"}
    return write_wheel(folder / f"{name}-{version}-py3-none-any.whl", name, version, module)


def write_wheel(path, name, version, files):
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        **files,
        f"{info}/METADATA": f"{head}\nText.\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{file},sha256={urlsafe_sha256(body)},{len(body)}" for file, body in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, body in files.items():
            wheel.writestr(file, body)
    return path


def is_as_recorded(wheel):
    """Return whether the files match the hashes and sizes in RECORD."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    rows = {file: rest for file, *rest in csv.reader(archive.read(name).decode().splitlines())}
    for file, (digest, size) in rows.items():
        content = archive.read(file).decode()
        if digest and (digest, size) != (f"sha256={urlsafe_sha256(content)}", str(len(content))):
            return False
    return rows.keys() == set(archive.namelist())


def urlsafe_sha256(text):
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
