"""The recipe for Kubernetes: the image is built in a Debian root folder, and trains in pods.

A server of Kubernetes' API starts what ``submit.sh`` and Spark request, in network namespaces with
the recipe's network policy. Needs root's rights, debootstrap, iproute2, nftables, the tests' Java
archives, and the registries of Debian and PyPI.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from debian_root import DebianRoot
from dockerfile import Image, build, instructions
from recipe_program import result_of
from servers.jars import jars
from servers.kubernetes import Kubernetes, Pod

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

PROJECT = Path(__file__).parents[2]
RECIPE = PROJECT / "deploy" / "kubernetes"


class Built(NamedTuple):
    root: DebianRoot
    image: Image


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The image for CPUs; torch is that of pip's own index, and Java archives are the tests'."""
    folder = tmp_path_factory.mktemp("image")
    root = DebianRoot(folder / "root", "bookworm", [])
    archives = [Path(path) for path in jars("s3a-spark-4")]
    handler = functools.partial(_Quiet, directory=str(archives[0].parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as repository:
        threading.Thread(target=repository.serve_forever, daemon=True).start()
        arguments = {
            "TORCH_INDEX": "",
            "MAVEN": f"http://127.0.0.1:{repository.server_port}",
            "JARS": " ".join(archive.name for archive in archives),
        }
        image = build(RECIPE / "Dockerfile", root, PROJECT, arguments, folder / "logs")
        repository.shutdown()
    yield Built(root, image)
    shutil.rmtree(root.root)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def kubernetes(built: Built, tmp_path: Path) -> Iterator[Kubernetes]:
    store = tmp_path / "store"
    store.mkdir()
    # The group that pod.yaml names as fsGroup.
    shutil.chown(store, 0, 185)
    store.chmod(0o2775)
    token = built.root.path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_text("token")
    policy = yaml.safe_load((RECIPE / "network-policy.yaml").read_text())
    claims = {"hvd-store": store}
    with Kubernetes(built.root, built.image, policy, claims, tmp_path / "pods") as server:
        yield server


def submit(built: Built, kubernetes: Kubernetes, folder: Path, ports: str | None = None) -> Pod:
    """Run a copy of ``submit.sh`` in the image, and return the driver's pod when it has ended.

    ``ports`` replaces the range of ports in ``pod.yaml``.
    """
    copies = folder / "recipe"
    copies.mkdir()
    for name in ("submit.sh", "pod.yaml"):
        shutil.copy(RECIPE / name, copies)
    if ports is not None:
        template = copies / "pod.yaml"
        template.write_text(template.read_text().replace("40000 44999", ports))
    settings = [
        "spark.kubernetes.submission.waitAppCompletion=false",
        f"spark.kubernetes.driver.master={kubernetes.address}",
        "spark.kubernetes.executor.enableApiWatcher=false",
        "spark.kubernetes.executor.apiPollingInterval=2s",
    ]
    arguments = " ".join(f"--conf {setting}" for setting in settings)
    built.root.run(
        f"sh /recipe/submit.sh {arguments} local:///opt/train.py /store",
        folder / "submit.txt",
        environment={
            **built.image.environment,
            "MASTER": f"k8s://{kubernetes.address}",
            "IMAGE": "registry.example.com/hvd-estimators:cpu",
        },
        mounts={"/recipe": copies},
    )
    (driver,) = [pod for name, pod in kubernetes.pods.items() if name.endswith("-driver")]
    assert driver.ended.wait(900)
    return driver


def test_the_image_has_spark_and_the_s3a_client_of_its_hadoop(built: Built) -> None:
    names = [jar.name for jar in built.root.path("/opt/spark/jars").iterdir()]
    (hadoop,) = [m[1] for m in map(re.compile(r"hadoop-client-api-(.+)\.jar").match, names) if m]
    arguments = dict(
        instruction.text.split("=", 1)
        for instruction in instructions(RECIPE / "Dockerfile")
        if instruction.name == "ARG"
    )
    assert f"hadoop-aws/{hadoop}/hadoop-aws-{hadoop}.jar" in arguments["JARS"]
    assert f"hadoop-aws-{hadoop}.jar" in names
    # The work of pods belongs to the image's user.
    assert built.root.path(built.image.folder).stat().st_uid == int(built.image.user)


def test_the_image_trains_in_pods_whose_network_the_policy_limits(
    built: Built, kubernetes: Kubernetes, tmp_path: Path
) -> None:
    driver = submit(built, kubernetes, tmp_path)

    output = driver.log.read_text()
    assert driver.phase == "Succeeded", output[-4000:]
    result = result_of(output)

    executors = sorted(name for name in kubernetes.pods if "-exec-" in name)
    assert len(executors) == 2
    assert sorted(host for host, _ in result["ranks"]) == executors
    assert {folder for _, folder in result["ranks"]} == {result["driver"][1]}
    assert result["driver"][0] == driver.name
    assert [pod.rejected_packets() for pod in kubernetes.pods.values()] == [0, 0, 0]
    assert list((tmp_path / "store").glob("runs/*/checkpoints"))


def test_a_fit_fails_if_pods_listen_on_ports_that_the_policy_rejects(
    built: Built, kubernetes: Kubernetes, tmp_path: Path
) -> None:
    driver = submit(built, kubernetes, tmp_path, ports="50000 50999")

    assert driver.phase == "Failed"
    assert "UnreachableError: " in driver.log.read_text()
    assert any(pod.rejected_packets() for pod in kubernetes.pods.values())
