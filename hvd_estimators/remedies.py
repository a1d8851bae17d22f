"""What to run where a package is missing: one table, for all messages."""

from __future__ import annotations

__all__ = ["BUILD_HOROVOD", "INSTALL", "INSTALL_A_FRAMEWORK"]

BUILD_HOROVOD = "hvd-estimators build-horovod"
"""Builds and installs Horovod."""

INSTALL = {
    "horovod": BUILD_HOROVOD,
    "keras": 'pip install --upgrade "hvd_estimators[keras]"',
    "lightning": 'pip install --upgrade "hvd_estimators[lightning]"',
    "matplotlib": 'pip install "hvd_estimators[plot]"',
    "petastorm": (
        'pip install "hvd_estimators[petastorm]" && pip install --no-deps petastorm==0.13.1'
    ),
    "tensorflow": 'pip install --upgrade "hvd_estimators[keras]"',
    "torch": 'pip install --upgrade "hvd_estimators[torch]"',
}
"""Package to the command that installs it, or a newer one."""

INSTALL["lightning_utilities"] = INSTALL["lightning"]  # what an import of Lightning lacks first

INSTALL_A_FRAMEWORK = 'pip install "hvd_estimators[torch]" or pip install "hvd_estimators[keras]"'
"""What to run where there is none at all."""
