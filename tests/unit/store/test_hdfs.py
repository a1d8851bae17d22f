"""HDFS paths: the name node from the path, from arguments or from Hadoop's configuration."""

import pickle

import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store import HDFSStore, Store
from hvd_estimators.store.hdfs import hadoop_settings


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)


def configure(folder, monkeypatch, **settings):
    items = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in settings.items()
    )
    (folder / "core-site.xml").write_text(f"<configuration>{items}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(folder))


@pytest.mark.parametrize(
    ("prefix", "arguments", "full"),
    [
        ("hdfs://namenode:8020/a/b", {}, "hdfs://namenode:8020/a/b"),
        ("hdfs://namenode:8020/a/b/", {}, "hdfs://namenode:8020/a/b"),
        ("hdfs://nameservice/a", {"host": "other", "port": 1}, "hdfs://nameservice/a"),
        ("hdfs:///a", {}, "hdfs:///a"),
        ("hdfs:/a", {}, "hdfs:///a"),
        ("/a", {}, "hdfs:///a"),
        ("/a", {"host": "default", "port": 0}, "hdfs:///a"),
        ("/a", {"host": "namenode", "port": 8020}, "hdfs://namenode:8020/a"),
        ("hdfs:///a", {"host": "nameservice"}, "hdfs://nameservice/a"),
        ("viewfs://cluster/a", {}, "viewfs://cluster/a"),
    ],
)
def test_paths_resolve_to_name_nodes(prefix, arguments, full):
    assert HDFSStore(prefix, **arguments).prefix_path == full


def test_paths_resolve_with_hadoops_configuration(tmp_path, monkeypatch):
    configure(tmp_path, monkeypatch, **{"fs.defaultFS": "hdfs://namenode:8020"})

    assert type(Store.create("hdfs:///a")) is HDFSStore
    assert Store.create("hdfs:/a").prefix_path == "hdfs://namenode:8020/a"
    assert HDFSStore("/a").prefix_path == "hdfs://namenode:8020/a"
    assert HDFSStore("/a", host="nameservice").prefix_path == "hdfs://nameservice/a"
    assert HDFSStore("viewfs:///a").prefix_path == "viewfs:///a"

    configure(tmp_path, monkeypatch, **{"fs.defaultFS": "viewfs://cluster"})
    assert HDFSStore("/a").prefix_path == "viewfs://cluster/a"
    assert Store.create("viewfs:///a").prefix_path == "viewfs://cluster/a"


def test_ranks_get_the_hdfs_configuration_without_other_secrets(tmp_path, monkeypatch):
    needed = {
        "fs.defaultFS": "hdfs://nameservice",
        "dfs.ha.namenodes.nameservice": "a,b",
        "fs.viewfs.mounttable.cluster.link./v": "hdfs://nameservice/v",
        "hadoop.security.authentication": "kerberos",
    }
    configure(tmp_path, monkeypatch, **needed, **{"fs.s3a.secret.key": "of somebody"})
    assert hadoop_settings() == needed

    store = HDFSStore("/a", user="me@REALM", kerb_ticket="/t", extra_conf={"dfs.replication": "1"})
    monkeypatch.delenv("HADOOP_CONF_DIR")
    there = pickle.loads(pickle.dumps(store))
    assert there.settings == {**needed, "dfs.replication": "1"}
    assert (there.user, there.kerb_ticket) == ("me@REALM", "/t")


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("file:///a", "expected a path on HDFS, found 'file:///a'"),
        ("s3://bucket/a", "expected a path on HDFS"),
        ("a/b", "begins at its root"),
        ("hdfs://namenode:8020", "begins at its root"),
        ("hdfs://me@namenode:8020/a", "user='me'"),
        ("hdfs://me:pw@namenode:8020/a", "holds credentials"),
    ],
)
def test_other_paths_are_rejected(prefix, message):
    with pytest.raises(ParamError, match=message) as raised:
        HDFSStore(prefix)
    assert "pw" not in str(raised.value)


def test_all_paths_must_be_on_one_hdfs():
    with pytest.raises(ParamError, match="'hdfs://b:1/train', which is on another filesystem"):
        HDFSStore("hdfs://a:1/data", train_path="hdfs://b:1/train")


def test_the_error_without_a_name_node_says_what_to_set():
    with pytest.raises(ParamError, match=r"no name node for .*Set hdfs://host:port/path"):
        HDFSStore("hdfs:///a").check()
