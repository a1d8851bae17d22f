"""What is published: the source distribution, the wheel and the metadata."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path

import docutils.core
import docutils.nodes
import pytest
import yaml
from debian_root import copy_project
from dockerfile import instructions
from packaging.specifiers import SpecifierSet

import hvd_estimators

PROJECT = Path(__file__).parents[3]


HOME = "https://example.org/hvd_estimators"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def build(source: Path, kind: str, target: Path) -> Path:
    """Build an ``sdist`` or a ``wheel`` as pip does, with the installed setuptools."""
    target.mkdir(exist_ok=True)
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.tar.gz" if kind == "sdist" else "*.whl"))


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(packed.read(name))


def relative_targets(description: str) -> list[str]:
    """Return the targets of links and pictures that an index cannot follow."""
    settings = {"report_level": 5, "file_insertion_enabled": False}
    document = docutils.core.publish_doctree(description, settings_overrides=settings)
    targets = [node["uri"] for node in document.findall(docutils.nodes.image)]
    for node in document.findall(docutils.nodes.reference):
        targets += [node["refuri"]] if "refuri" in node else []
    assert not list(document.findall(docutils.nodes.problematic))
    return [target for target in targets if not re.match(r"(https|mailto):", target)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, without what other tests and builds leave there."""
    folder = tmp_path_factory.mktemp("packaging") / "source"
    copy_project(PROJECT, folder)
    return folder


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The source distribution, unpacked."""
    committed = files(source)
    target = tmp_path_factory.mktemp("sdist")
    # Python 3.11.2 of Debian 12 has no filter for tarfile.
    subprocess.run(["tar", "-xf", build(source, "sdist", target / "built")], cwd=target, check=True)
    (folder,) = target.glob("hvd_estimators-*")
    # Of the repository only what git itself reads is missing.
    assert committed - files(folder) <= {".gitignore", ".gitattributes"}
    yield folder
    shutil.rmtree(target)


def test_the_source_distribution_has_all_that_the_image_copies(unpacked: Path) -> None:
    found = instructions(unpacked / "deploy/kubernetes/Dockerfile")
    copied = [name for kind, text in found if kind == "COPY" for name in text.split()[:-1]]
    assert {"setup.py", "examples/find_gpus.sh"} <= {*copied}
    assert [name for name in copied if not (unpacked / name).exists()] == []


def test_the_wheel_of_the_source_distribution_is_complete(unpacked: Path, tmp_path: Path) -> None:
    wheel = build(unpacked, "wheel", tmp_path / "wheel")

    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    package = {f"hvd_estimators/{name}" for name in files(PROJECT / "hvd_estimators")}
    package = {name for name in package if "__pycache__" not in name}
    assert package == {name for name in names if name.startswith("hvd_estimators/")}
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    described = metadata_of(wheel)
    assert described["Author"]
    assert not described["Home-page"]
    assert not described.get_all("Project-URL")
    assert len(described.get_payload()) > 2000
    assert not relative_targets(described.get_payload())


def test_with_a_home_page_the_links_lead_there(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(
        source, copy, ignore=shutil.ignore_patterns("tests", "docs", "build", "*.egg-info")
    )
    settings = (copy / "setup.cfg").read_text()
    assert re.search(r"^url =.*$", settings, re.M)
    (copy / "setup.cfg").write_text(re.sub(r"^url =.*$", f"url = {HOME}", settings, flags=re.M))

    described = metadata_of(build(copy, "wheel", tmp_path / "wheel"))

    assert described["Home-page"] == HOME
    urls = dict(url.split(", ") for url in described.get_all("Project-URL"))
    assert urls["Documentation"].startswith(f"{HOME}/")
    assert not relative_targets(described.get_payload())
    linked = set(re.findall(rf"{HOME}/(?:blob|raw)/HEAD/([\w./-]+)", described.get_payload()))
    assert linked
    assert [name for name in linked if not (PROJECT / name).exists()] == []


def test_pages_and_settings_name_the_same_versions_of_python() -> None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(PROJECT / "setup.cfg")
    metadata, options = config["metadata"], config["options"]
    listed = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])
    oldest, newest = listed[0], listed[-1]
    assert options["python_requires"] == f">={oldest}"
    assert config["mypy"]["python_version"] == oldest
    assert f'target-version = "py{oldest.replace(".", "")}"' in read("pyproject.toml")
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in read("Makefile")
    for page in ("README.rst", "CONTRIBUTING.rst", "docs/install.rst"):
        assert re.search(rf"Python\s+{oldest}\s+to\s+{newest}", read(page)), page
    assert re.findall(r"^   \* - (3\.\d+)", read("docs/install.rst"), re.M) == listed
    older = [f"3.{n}" for n in range(6, int(oldest.split(".")[1]))]
    for name in ("Makefile", "README.rst", "CONTRIBUTING.rst", "docs/install.rst"):
        assert not [version for version in older if re.search(rf"Python {version}\b", read(name))]
    assert not any(version in SpecifierSet(options["python_requires"]) for version in older)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pip chose packages for this Python")
def test_all_pinned_packages_accept_the_python_of_debian_12() -> None:
    # pip does not say so: it tries all versions of the package that needs the refused one.
    python = "3.11.2"
    needed = {
        f"{package.name} {package.version}": package.metadata["Requires-Python"]
        for package in distributions(path=[sysconfig.get_path("purelib")])
        if "Requires-Python" in package.metadata
    }
    assert len(needed) > 100
    assert not {
        name: wanted for name, wanted in needed.items() if not SpecifierSet(wanted).contains(python)
    }


def test_the_citation_names_this_version_and_home() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    config = configparser.ConfigParser(interpolation=None)
    config.read(PROJECT / "setup.cfg")
    assert citation["version"] == hvd_estimators.__version__
    assert citation["license"] == config["metadata"]["license"]
    assert citation.get("repository-code", "") == config["metadata"]["url"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_make_installs_nothing_twice_and_the_demo_without_a_compiler(tmp_path: Path) -> None:
    def commands(*targets: str) -> str:
        """Return what ``make`` would run in a folder without an environment."""
        names = ("Makefile", "setup.cfg", "pyproject.toml", "constraints")
        for name in names:
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(PROJECT / name)
        make = ["make", "--dry-run", f"PYTHON={sys.executable}", *targets]
        environment = {**os.environ, "MAKEFLAGS": ""}
        done = subprocess.run(make, cwd=tmp_path, text=True, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    demo, test = commands("demo"), commands("test")
    assert "No C++ compiler" not in demo
    assert "build-horovod" not in demo
    assert "keras" not in demo
    assert "torch" in demo
    with_horovod = commands("demo", "HOROVOD=1")
    compiler = with_horovod.index("No C++ compiler")
    assert compiler < with_horovod.index(" -m venv ") < with_horovod.index("build-horovod")
    assert test.index("No C++ compiler") < test.index(" -m venv ") < test.index("build-horovod")
    for text in (demo, with_horovod, test):
        assert text.count(" -m venv .venv\n") == 1
        installed = re.findall(r"pip install .*", text)
        assert len(installed) == len(set(installed))
        constraints = re.findall(r"--constraint (\S+)", text)
        assert len(set(constraints)) == 1
        assert len(constraints) == len(installed)
    # The tests' environment begins with the demo's.
    assert set(re.findall(r"pip install .*", demo)) <= set(re.findall(r"pip install .*", test))


def read(name: str) -> str:
    return (PROJECT / name).read_text()
