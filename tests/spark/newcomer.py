"""Clone and shell of a user who follows the recipes of ``deploy/``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from debian_root import copy_project
from servers.processes import Server

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Newcomer:
    """A user with a clone of this repository, whose shell does not lead to this checkout.

    Attributes
    ----------
    folder : Path
        The clone, where commands run.
    variables : dict
        Environment variables of commands, in addition to this machine's.
    inside : callable
        Returns a command that runs another command on the user's machine.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    inside: Callable[[Sequence[str]], list[str]] = list

    @classmethod
    def in_clone(cls, folder: Path, *pip_arguments: str) -> Newcomer:
        """Clone the repository into a new folder and pack an environment as the pages say."""
        copy_project(ROOT, folder)
        made = cls(folder)
        pack = "deploy/environment/pack_venv.sh"
        made.run("sh", pack, "environment", *pip_arguments, PYTHON=made.python)
        return made.having(
            SPARK_HOME=str(made.spark_home),
            PATH=os.pathsep.join([f"{made.spark_home}/bin", made.shell()["PATH"]]),
        )

    def having(
        self, inside: Callable[[Sequence[str]], list[str]] | None = None, **variables: str
    ) -> Newcomer:
        """Return this user with further environment variables, or on another machine."""
        return Newcomer(self.folder, {**self.variables, **variables}, inside or self.inside)

    @property
    def environment(self) -> Path:
        """The folder of the environment that was packed."""
        return self.folder / "environment"

    @property
    def archive(self) -> Path:
        """The archive of the environment."""
        return self.folder / "environment.tar.gz"

    @property
    def python(self) -> str:
        """This machine's own Python, on which the environment is built."""
        return f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"

    @property
    def spark_home(self) -> Path:
        """The Spark of the environment, which the archive lacks."""
        (found,) = self.environment.glob("lib/python3*/site-packages/pyspark")
        return found

    def shell(self, **further: str) -> dict[str, str]:
        """Return the environment variables of a command."""
        foreign = ("PYTHON", "PYSPARK", "SPARK", "VIRTUAL_ENV", "HADOOP", "HVD_")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(foreign) and str(ROOT) not in value
        }
        path = [place for place in os.get_exec_path() if not Path(place).is_relative_to(sys.prefix)]
        return {**inherited, "PATH": os.pathsep.join(path), **self.variables, **further}

    def command(self, *command: str, **further: str) -> list[str]:
        """Return a command for this process that runs another one in the user's shell."""
        variables = [f"{name}={value}" for name, value in self.shell(**further).items()]
        return self.inside(["env", "-i", "-C", str(self.folder), *variables, *command])

    def start(self, *command: str, **further: str) -> subprocess.Popen[str]:
        """Start a command in the user's shell."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*command, **further),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def run(self, *command: str, **further: str) -> str:
        """Run a command in the user's shell and return its output; fail if the command fails."""
        return output_of(self.start(*command, **further))

    def serve(self, log: Path, *command: str, **further: str) -> Server:
        """Start a server in the user's shell."""
        return Server(" ".join(command), self.command(*command, **further), log)


def output_of(process: subprocess.Popen[str]) -> str:
    """Wait for a command and return its output; fail if the command failed."""
    output, errors = process.communicate()
    assert process.returncode == 0, f"{output[-6000:]}\n{errors[-12000:]}"
    return output
