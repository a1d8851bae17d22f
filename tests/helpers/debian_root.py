"""Root folder of a Debian system, for commands of tests. Needs root's rights and debootstrap."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MIRROR = "http://deb.debian.org/debian"
# Certificates and pip settings with which this machine reaches the registries.
SETTINGS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pip.conf",
    "/etc/xdg/pip",
    "/etc/resolv.conf",
    "/etc/hosts",
)


class DebianRoot:
    """Root folder for commands, which run in separate process and mount namespaces.

    Parameters
    ----------
    root : Path
        The folder, which is created.
    suite : str
        Debian's name of the release.
    packages : sequence of str
        Packages to install beside the minimal system.
    """

    def __init__(self, root: Path, suite: str, packages: Sequence[str]) -> None:
        self.root = root
        include = f"--include={','.join(['ca-certificates', *packages])}"
        subprocess.run(
            ["debootstrap", "--variant=minbase", include, suite, root, MIRROR],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for name in filter(os.path.exists, SETTINGS):
            target = self.path(name)
            if Path(name).is_dir():
                shutil.copytree(name, target, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(Path(name).read_bytes())

    def path(self, path: str | Path) -> Path:
        """Return where a path of the system is on this machine."""
        return self.root / str(path).lstrip("/")

    def command(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str = "/",
        user: str = "0",
        mounts: Mapping[str, str | Path] | None = None,
        within: Sequence[str] = (),
    ) -> list[str]:
        """Return the arguments of a command that runs another one in the root folder.

        Parameters
        ----------
        arguments : sequence of str
            The command and its arguments.
        environment : mapping, optional
            Variables beside those for pip. Default: none.
        folder, user : str
            Working folder and numeric user.
        mounts : mapping, optional
            Paths of the system to folders of this machine that appear there.
        within : sequence of str
            Command that starts the whole, such as ``ip netns exec NAME``.
        """
        script = [f"cd {self.root}", "mount -t proc proc proc"]
        script += ["mount --rbind /sys sys", "mount --rbind /dev dev"]
        mounts = {**{path: path for path in wheel_folders()}, **(mounts or {})}
        for target, source in mounts.items():
            self.path(target).mkdir(parents=True, exist_ok=True)
            script.append(f"mount --bind {source} .{target}")
        script.append('exec chroot --userspec="$1" . sh -ec \'cd "$0" && exec "$@"\' "${@:2}"')
        kept = {k: v for k, v in os.environ.items() if re.search("(?i)^pip_|_proxy$|cert", k)}
        variables = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/bin:/usr/sbin", **kept}
        variables |= environment or {}
        settings = [f"{name}={value}" for name, value in variables.items()]
        inside = [f"{user}:{user}", folder, "env", "-i", *settings, *arguments]
        # All processes end with the first one, and so do the mounts.
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*within, *apart, "bash", "-ec", " && ".join(script), "bash", *inside]

    def run(self, script: str, log: Path, **options: Any) -> str:
        """Run a shell script and return its output; check that it succeeds.

        ``log`` is a file for the output, and ``options`` are those of `command`.
        """
        with log.open("w") as file:
            done = subprocess.run(
                self.command(["sh", "-ec", script], **options),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        output = log.read_text(errors="replace")
        assert done.returncode == 0, output[-4000:]
        return output


def copy_project(project: Path, target: Path) -> None:
    """Copy the files of a checkout, except those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(project / name, target / name)


def wheel_folders() -> list[str]:
    """Return the folders that pip's configuration names."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    values = re.split(r"[\s'\"]+", re.sub(r"\\n", " ", shown.stdout))
    paths = [urlsplit(value).path for value in values if value.startswith(("/", "file:///"))]
    return sorted({path for path in paths if Path(path).is_dir()})
