"""Small wheels that stand in for Horovod's, for the tests of its build."""

import base64
import hashlib
import zipfile

from hvd_estimators.commands.toolchain import BuildRecipe

RECIPE = BuildRecipe("cp311-cp311-manylinux_2_36_x86_64", torch="2.13.0+cpu", tensorflow="2.21.0")
WHEEL_NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


def make_wheel(path, text):
    """Write a small Horovod, which pip can install."""
    info = "horovod-0.28.1.dist-info"
    files = {
        "horovod/__init__.py": "",
        "horovod/torch/__init__.py": text,
        "horovod/spark/__init__.py": "run = 'the frozen one'\n",
        "horovod/spark/torch.py": "TorchEstimator = 'the frozen one'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{name},sha256={urlsafe_sha256(body)},{len(body)}" for name, body in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, body in files.items():
            wheel.writestr(name, body)
    return path


def urlsafe_sha256(text):
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
