"""The files of ``deploy/kubernetes`` and ``deploy/databricks`` agree with each other."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile import instructions

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
DATABRICKS = ROOT / "deploy" / "databricks"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def submitted_settings() -> dict[str, str]:
    """Return the ``--conf`` options of ``submit.sh``."""
    words = shlex.split((KUBERNETES / "submit.sh").read_text(), comments=True)
    options = [words[i + 1] for i, word in enumerate(words) if word == "--conf"]
    return dict(option.split("=", 1) for option in options)


def test_the_network_policy_opens_the_ports_of_spark_and_of_ranks() -> None:
    (policy,) = documents("network-policy.yaml")
    (pod,) = documents("pod.yaml")
    (application,) = documents("application.yaml")
    settings = submitted_settings()
    spark = {int(value) for name, value in settings.items() if name.lower().endswith("port")}
    (ranks,) = pod["spec"]["securityContext"]["sysctls"]
    first, last = map(int, ranks["value"].split())

    assert ranks["name"] == "net.ipv4.ip_local_port_range"
    expected = {(port, port) for port in spark} | {(first, last)}
    (ingress,), egress = policy["spec"]["ingress"], policy["spec"]["egress"][0]
    for rule in (ingress, egress):
        assert {(p["port"], p.get("endPort", p["port"])) for p in rule["ports"]} == expected
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert ingress["from"] == egress["to"] == [{"podSelector": {"matchLabels": labels}}]
    assert pod["metadata"]["labels"] == labels
    for role in ("driver", "executor"):
        assert application["spec"][role]["template"]["metadata"]["labels"] == labels


def test_the_application_for_the_operator_is_that_of_spark_submit() -> None:
    (pod,) = documents("pod.yaml")
    (application,) = documents("application.yaml")
    spec, settings = application["spec"], submitted_settings()

    assert (application["apiVersion"], application["kind"]) == (
        "sparkoperator.k8s.io/v1beta2",
        "SparkApplication",
    )
    same = {name: value for name, value in settings.items() if name in spec["sparkConf"]}
    assert same == spec["sparkConf"]
    assert application["metadata"]["namespace"] == settings["spark.kubernetes.namespace"]
    account = "spark.kubernetes.authenticate.driver.serviceAccountName"
    assert spec["driver"]["serviceAccount"] == settings[account]
    for part in ("instances", "cores", "memory", "memoryOverhead"):
        assert str(spec["executor"][part]) == settings[f"spark.executor.{part}"]
    for role in ("driver", "executor"):
        template = spec[role]["template"]["spec"]
        (container,) = template["containers"]
        # The operator finds the container by this name.
        assert container.pop("name") == f"spark-kubernetes-{role}"
        (expected,) = pod["spec"]["containers"]
        assert template == {
            **pod["spec"],
            "containers": [{k: v for k, v in expected.items() if k != "name"}],
        }

    objects = {(each["kind"], each["metadata"]["name"]) for each in documents("cluster.yaml")}
    assert ("ServiceAccount", spec["driver"]["serviceAccount"]) in objects
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert {("PersistentVolumeClaim", claim) for claim in claims} <= objects


def test_the_image_has_the_layout_of_sparks_image() -> None:
    found = instructions(KUBERNETES / "Dockerfile")
    texts = {name: [text for each, text in found if each == name] for name, _ in found}
    copied = {text.split()[-1]: text.split()[:-1] for text in texts["COPY"]}
    (pod,) = documents("pod.yaml")
    (application,) = documents("application.yaml")

    (entrypoint,) = json.loads(texts["ENTRYPOINT"][0])
    assert entrypoint == "/opt/entrypoint.sh"
    assert copied[entrypoint] == ["deploy/kubernetes/entrypoint.sh"]
    for sources in copied.values():
        assert all((ROOT / source).exists() for source in sources)
    assert texts["USER"] == [str(pod["spec"]["securityContext"]["runAsUser"])] == ["185"]
    assert texts["WORKDIR"][-1] == "/opt/spark/work-dir"
    assert "SPARK_HOME=/opt/spark" in texts["ENV"]
    assert application["spec"]["mainApplicationFile"].removeprefix("local://") in copied

    arguments = dict(text.split("=", 1) for text in texts["ARG"])
    pins = (ROOT / arguments["CONSTRAINTS"]).read_text()
    pyspark = re.search(r"^pyspark==(\S+)", pins, re.MULTILINE)
    assert pyspark is not None
    assert application["spec"]["sparkVersion"] == pyspark[1]


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """Programs that print their arguments, one per line, in place of ``tini``'s and Spark's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in {
        "tini": '[ "$1" = -s ] && shift 2; exec "$@"',
        "java": "printf '%s\\n' java \"$@\"",
        "spark-submit": "printf '%s\\n' spark-submit \"$@\"",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SPARK_HOME": str(tmp_path)}


def started(programs: dict[str, str], *arguments: str, **variables: str) -> list[str]:
    """Return the command that the entrypoint of the image starts."""
    done = subprocess.run(
        ["bash", KUBERNETES / "entrypoint.sh", *arguments],
        env={**programs, **variables},
        cwd=programs["SPARK_HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_entrypoint_starts_what_spark_requests(programs: dict[str, str]) -> None:
    driver = started(programs, "driver", "--class", "A B", SPARK_DRIVER_BIND_ADDRESS="10.0.0.1")
    assert driver == [
        *("spark-submit", "--conf", "spark.driver.bindAddress=10.0.0.1"),
        *("--conf", "spark.executorEnv.SPARK_DRIVER_POD_IP=10.0.0.1"),
        *("--deploy-mode", "client", "--class", "A B"),
    ]

    home = programs["SPARK_HOME"]
    executor = started(
        programs,
        "executor",
        SPARK_JAVA_OPT_0="-Dspark.driver.port=7078",
        SPARK_JAVA_OPT_1="-Dname=a b",
        SPARK_EXECUTOR_MEMORY="2048m",
        SPARK_CLASSPATH="/further/*",
        SPARK_CONF_DIR="/opt/spark/conf",
        SPARK_DRIVER_URL="spark://CoarseGrainedScheduler@train:7078",
        SPARK_EXECUTOR_ID="1",
        SPARK_EXECUTOR_CORES="2",
        SPARK_APPLICATION_ID="spark-1",
        SPARK_EXECUTOR_POD_IP="10.0.0.2",
        SPARK_RESOURCE_PROFILE_ID="0",
        SPARK_EXECUTOR_POD_NAME="train-exec-1",
    )
    assert executor == [
        *("java", "-Dspark.driver.port=7078", "-Dname=a b", "-Xms2048m", "-Xmx2048m"),
        *("-cp", f"/opt/spark/conf:/further/*:{home}/jars/*:{home}"),
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        *("--driver-url", "spark://CoarseGrainedScheduler@train:7078", "--executor-id", "1"),
        *("--cores", "2", "--app-id", "spark-1", "--hostname", "10.0.0.2"),
        *("--resourceProfileId", "0", "--podName", "train-exec-1"),
    ]

    assert started(programs, "printf", "%s\n", "any command") == ["any command"]


def test_the_databricks_job_and_the_cluster_have_the_same_settings() -> None:
    bundle = yaml.safe_load((DATABRICKS / "databricks.yml").read_text())
    values = {name: each["default"] for name, each in bundle["variables"].items()}
    job = json.dumps(bundle["resources"]["jobs"]["train"])
    job = re.sub(r"\$\{var\.(\w+)\}", lambda found: values[found[1]], job)
    (of_job,) = json.loads(job)["job_clusters"]
    (task,) = json.loads(job)["tasks"]
    cluster = json.loads((DATABRICKS / "cluster.json").read_text())

    shared = {name: cluster[name] for name in of_job["new_cluster"]}
    assert shared == of_job["new_cluster"]
    assert task["job_cluster_key"] == of_job["job_cluster_key"]
    assert (DATABRICKS / task["spark_python_task"]["python_file"]).is_file()
    assert task["spark_python_task"]["parameters"] == [
        cluster["spark_conf"]["spark.hvdEstimators.store"]
    ]
    script = (DATABRICKS / "install.sh").read_text()
    for name, value in cluster["spark_env_vars"].items():
        assert f"{name}:-{value}" in script
    for init in cluster["init_scripts"]:
        folder = cluster["spark_env_vars"]["HVD_ESTIMATORS_WHEELS"]
        assert init == {"volumes": {"destination": f"{folder}/install.sh"}}
    version = cluster["spark_version"].partition(".x")[0]
    assert (DATABRICKS / f"runtime-{version}.txt").is_file()
