"""Dockerfiles: their instructions, and a build in a root folder, without Docker."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import NamedTuple

from debian_root import DebianRoot


class Instruction(NamedTuple):
    """Instruction of a Dockerfile: its name, and the rest of its lines."""

    name: str
    text: str


def instructions(dockerfile: Path) -> list[Instruction]:
    """Return the instructions of a file, without comments, with continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@dataclass
class Image:
    """What a build has set: the root folder's contents are the image's.

    Attributes
    ----------
    environment : dict
        Variables of ``ENV``.
    arguments : dict
        Variables of ``ARG``.
    user, folder : str
        The last ``USER`` and ``WORKDIR``.
    entrypoint : list of str
        The command of ``ENTRYPOINT``.
    """

    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)


def build(
    dockerfile: Path, root: DebianRoot, context: Path, arguments: Mapping[str, str], logs: Path
) -> Image:
    """Execute the instructions of a Dockerfile with one stage, whose ``FROM`` is the root folder.

    Each ``RUN`` writes to a file in ``logs``.
    """
    image = Image()
    logs.mkdir()
    for number, (name, text) in enumerate(instructions(dockerfile)):
        known = {**image.arguments, **image.environment}
        if name == "RUN":
            root.run(
                text,
                logs / f"{number}.txt",
                environment=known,
                folder=image.folder,
                user=image.user,
            )
        elif name in ("ARG", "ENV"):
            key, _, value = text.partition("=")
            value = " ".join(shlex.split(Template(value).safe_substitute(known)))
            if name == "ARG":
                image.arguments[key] = arguments.get(key, value)
            else:
                image.environment[key] = value
        elif name == "COPY":
            *sources, target = text.split()
            _copy(context, sources, root.path(Path(image.folder, target)), target.endswith("/"))
        elif name == "WORKDIR":
            image.folder = text
            root.path(text).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            image.user = text
        elif name == "ENTRYPOINT":
            image.entrypoint = json.loads(text)
        else:
            assert name == "FROM", name
    return image


def _copy(context: Path, sources: list[str], target: Path, into_folder: bool) -> None:
    for source in sources:
        place = target / Path(source).name if into_folder else target
        place.parent.mkdir(parents=True, exist_ok=True)
        if (context / source).is_dir():
            shutil.copytree(context / source, place)
        else:
            shutil.copy2(context / source, place)
