"""The probes of the cluster's doctor, without Spark."""

from __future__ import annotations

import base64
import functools
import io
import json
import pickle
import subprocess
import sys
import sysconfig

import cloudpickle
import pytest

from hvd_estimators.commands import cluster_probe
from hvd_estimators.commands.reachability import listening
from hvd_estimators.launch.rendezvous.channel import LOOPBACK
from hvd_estimators.launch.task.addresses import host_identity

# Runs a pickled task in a Python with the installed packages, except for this one.
WITHOUT_THIS_PACKAGE = """
import pickle, sys
sys.path += sys.argv[1:]
task = pickle.load(sys.stdin.buffer)
(batch,) = task(iter(()))
print(batch.to_pylist()[0]["facts"])
"""

REQUEST = {"id": "1", "packages": ["numpy", "absent"], "seconds": 0, "nics": [], "store": None}


@pytest.fixture(autouse=True)
def like_a_task(monkeypatch):
    monkeypatch.setattr("pyspark.SparkFiles.getRootDirectory", lambda: "/files")


def test_a_host_without_this_package_reports_that_and_its_other_packages():
    task = functools.partial(cluster_probe.task_of("survey"), request=REQUEST)
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", WITHOUT_THIS_PACKAGE, *paths],
        input=cloudpickle.dumps(task),
        capture_output=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()
    facts = json.loads(done.stdout)
    assert facts["error"] == "ModuleNotFoundError: No module named 'hvd_estimators'"
    assert facts["versions"].keys() == {"numpy", "pyspark"}
    assert facts["executable"] == sys.executable
    assert "installation" not in facts


def test_hosts_are_identified_as_by_the_ranks_tasks():
    assert cluster_probe._host_facts()["identity"] == host_identity()


def test_addresses_that_answer_are_reached_and_others_are_not(monkeypatch):
    with listening([LOOPBACK]) as right, listening([LOOPBACK]) as other:
        # A port at which another host answers.
        wrong = {**right, "endpoints": other["endpoints"]}

        found = cluster_probe._call("print_reached", {"right": right, "wrong": wrong}, 100)

    assert found == {"right": [LOOPBACK], "wrong": []}


@pytest.fixture
def checked(store, monkeypatch, capsys):
    """Return a function that checks files of a store and returns the problems."""

    def check(**given):
        document = {
            "pickle": base64.b64encode(pickle.dumps(store)).decode(),
            "folder": f"{store.folder}/check",
            "write": None,
            "read": [],
            **given,
        }
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(document)))
        cluster_probe.check_store()
        return json.loads(capsys.readouterr().out)["problems"]

    return check


def test_files_of_the_store_are_written_and_read(store, checked):
    store.write_text(f"{store.folder}/check/driver", "driver")
    store.write_text(f"{store.folder}/check/damaged", "other")

    assert checked(write="host-1") == {}
    found = checked(read=["driver", "host-1", "host-2", "damaged"])
    assert found == {"host-2": "does not see it", "damaged": "reads another content"}
    assert store.exists(f"{store.folder}/check/host-1")


def test_a_host_that_sees_another_folder_deletes_its_own_file(store, checked):
    assert checked(write="host-1") == {}

    assert checked(read=["driver"]) == {"driver": "does not see it"}
    assert not store.names(store.folder)


def test_a_store_that_cannot_be_written_to_is_reported(store, checked):
    store.write_text(f"{store.folder}/check", "a file")

    (problem,) = checked(write="host-1").values()
    assert "Error: " in problem


@pytest.mark.parametrize(
    ("function", "seconds", "error"),
    [
        ("absent", 100, "AttributeError: module 'hvd_estimators.commands.cluster_probe' has no"),
        ("print_reached", 0.01, "no answer within 0.01 s"),
    ],
)
def test_a_probe_that_fails_or_hangs_has_an_error(function, seconds, error):
    assert cluster_probe._call(function, {}, seconds)["error"].startswith(error)
