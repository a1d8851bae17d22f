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


def test_explicit_paths_with_and_without_a_prefix():
    store = HDFSStore("hdfs://nn:1/a", train_path="/b/train", val_path="hdfs://nn:1/b/val")
    assert store.get_train_data_path() == "hdfs://nn:1/b/train"
    assert store.get_val_data_path("7f") == "hdfs://nn:1/b/val.7f"
    assert store.get_test_data_path() == "hdfs://nn:1/a/intermediate_test_data"
    assert store.get_run_path("r") == "hdfs://nn:1/a/runs/r"

    store = HDFSStore(train_path="hdfs://nn:1/b/train", val_path="/b/val", runs_path="/b/runs")
    assert store.prefix_path is None
    assert store.get_val_data_path() == "hdfs://nn:1/b/val"
    assert store.run_paths("r").logs_path == "hdfs://nn:1/b/runs/r/logs"
    assert store.spark_url(store.get_train_data_path("7f")) == "hdfs://nn:1/b/train.7f"
    with pytest.raises(ParamError, match="test_path is not set"):
        store.get_test_data_path()


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


def test_arguments_of_other_clients():
    with pytest.warns(UserWarning, match="'libhdfs3' has no effect"):
        HDFSStore("hdfs:///a", driver="libhdfs3")
    with pytest.raises(ParamError, match="user: expected a name"):
        HDFSStore("hdfs:///a", user="a:b")
    with pytest.raises(ParamError, match="kerb_ticket: found no ticket cache '/absent'"):
        HDFSStore("hdfs://a:1/a", user="me@REALM", kerb_ticket="/absent").check()
    with pytest.raises(
        ParamError, match=r"user: expected the principal of kerb_ticket='/t'.*klist"
    ):
        HDFSStore("hdfs://a:1/a", kerb_ticket="/t")
