"""Environment in which Python processes lack the features that macOS lacks."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "like_macos"
BOOT = "5F2C6A4E-0000-4000-8000-000000000001"


def like_macos(bin_folder, environment=os.environ):
    """Return the variables; an existing folder receives a script in place of ``sysctl``."""
    sysctl = Path(bin_folder, "sysctl")
    sysctl.write_text(f'#!/bin/sh\n[ "$*" = "-n kern.bootsessionuuid" ] && echo {BOOT}\n')
    sysctl.chmod(0o755)
    return {
        **environment,
        "PATH": f"{bin_folder}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), environment.get("PYTHONPATH")])),
    }
