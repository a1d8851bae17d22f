"""Real HDFS on loopback: a NameNode and DataNodes, each in a separate process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from servers.processes import Server, answers, free_ports

_JAVA = [
    "-Xmx256m",
    # The servers start in half the time, which matters more here than their speed.
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:-UsePerfData",
]
_SERVER = "org.apache.hadoop.hdfs.server"
_LOGGING = """
status = warn
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


class Hdfs:
    """Cluster of one NameNode and some DataNodes, initially empty.

    Its superuser is the user who runs the tests. Each block has a replica on every DataNode.

    Parameters
    ----------
    folder : Path
        Folder for the servers' files.
    jars : sequence of str
        Hadoop's Java archives.
    datanodes : int
        Number of DataNodes.

    Attributes
    ----------
    host, port : str, int
        The NameNode's address.
    url : str
        An initially empty folder.
    conf_dir : Path
        Hadoop configuration that names the cluster as the default filesystem.
    """

    def __init__(self, folder: Path, jars: Sequence[str], datanodes: int = 1) -> None:
        self._folder = folder
        self._jars = jars
        self.host = "127.0.0.1"
        self.port, self._http_port, *ports = free_ports(2 + 3 * datanodes)
        self._datanode_ports = [ports[3 * i : 3 * i + 3] for i in range(datanodes)]
        self._datanodes: list[Server] = []
        self.url = f"hdfs://{self.host}:{self.port}/tests"
        self.conf_dir = folder / "conf"
        self.conf_dir.mkdir(parents=True)
        root = f"hdfs://{self.host}:{self.port}"
        write_settings(self.conf_dir / "core-site.xml", {"fs.defaultFS": root})
        hdfs_site = {
            "dfs.replication": str(datanodes),
            "dfs.namenode.name.dir": f"file://{folder}/name",
            "dfs.namenode.http-address": f"{self.host}:{self._http_port}",
            # A lost DataNode is noticed within seconds, not ten minutes.
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "1000",
            "dfs.namenode.safemode.extension": "0",
            "dfs.blockreport.initialDelay": "0",
            "dfs.block.scanner.volume.bytes.per.second": "0",
            # No other DataNode exists that could replace a failing one.
            "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
        }
        write_settings(self.conf_dir / "hdfs-site.xml", hdfs_site)
        (self.conf_dir / "log4j2.properties").write_text(_LOGGING)

    def start(self) -> None:
        """Format the filesystem, start all servers and wait until files can be written."""
        # The DataNodes retry until the NameNode answers.
        self._datanodes = [self._run_datanode(i) for i in range(len(self._datanode_ports))]
        try:
            output = self._folder / "format.txt"
            with open(output, "wb") as file:
                command = self._command("namenode.NameNode", "-format", "-nonInteractive")
                done = subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=90
                )
            assert done.returncode == 0, output.read_text()
            self.start_namenode()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all servers."""
        for server in (*self._datanodes, getattr(self, "_namenode", None)):
            if server is not None:
                server.kill()

    def kill_namenode(self) -> None:
        """Kill the NameNode."""
        self._namenode.kill()

    def start_namenode(self, wait: bool = True) -> None:
        """Start the NameNode with its stored files; with ``wait``, wait until all can be used."""
        self._namenode = self._run("namenode.NameNode")
        self._namenode.wait_until(lambda: answers(self.port), "listening")
        if wait:
            self._namenode.wait_until(lambda: bool(self._state()), "ready")
            for number in range(len(self._datanodes)):
                self._await_datanode(number)

    @property
    def namenode_pid(self) -> int:
        """Process id of the NameNode, as it reports it."""
        (runtime,) = _beans(self._http_port, "java.lang:type=Runtime")
        return int(runtime["Name"].partition("@")[0])

    def kill_datanode(self, wait: bool = False, number: int = 0) -> None:
        """Kill a DataNode; with ``wait``, wait 12 seconds until the NameNode has noticed."""
        before = self._state().get("NumLiveDataNodes")
        self._datanodes[number].kill()
        if wait:

            def has_noticed() -> bool:
                return self._state().get("NumLiveDataNodes") == before - 1

            self._namenode.wait_until(has_noticed, "without its DataNode")

    def start_datanode(self, wait: bool = True, number: int = 0) -> None:
        """Restart a DataNode with its stored blocks; with ``wait``, wait until it is used."""
        self._datanodes[number] = self._run_datanode(number)
        if wait:
            self._await_datanode(number)

    def admin(self, *arguments: str) -> str:
        """Run ``hdfs dfsadmin`` with arguments, and return its output."""
        return self._tool("org.apache.hadoop.hdfs.tools.DFSAdmin", *arguments)

    def shell(self, *arguments: str) -> str:
        """Run ``hdfs dfs`` with arguments, and return its output."""
        return self._tool("org.apache.hadoop.fs.FsShell", *arguments)

    def _tool(self, name: str, *arguments: str) -> str:
        command = self._java(name, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _run_datanode(self, number: int) -> Server:
        addresses = [f"dfs.datanode.{of}address" for of in ("", "http.", "ipc.")]
        ports = self._datanode_ports[number]
        settings = {
            "dfs.datanode.data.dir": f"file://{self._folder}/data{number}",
            **{name: f"{self.host}:{port}" for name, port in zip(addresses, ports, strict=True)},
        }
        options = [f"-D{name}={value}" for name, value in settings.items()]
        return self._run("datanode.DataNode", *options)

    def _await_datanode(self, number: int) -> None:
        _, http_port, _ = self._datanode_ports[number]

        def is_used() -> bool:
            if self._state().get("NumLiveDataNodes", 0) <= number:
                return False
            # The NameNode may still list the killed DataNode.
            (info,) = _beans(http_port, "Hadoop:service=DataNode,name=DataNodeInfo") or [{}]
            actors = json.loads(info.get("BPServiceActorInfo") or "[]")
            if not actors or any(actor["ActorState"] != "RUNNING" for actor in actors):
                return False
            return self._state().get("MissingBlocks") == 0

        self._datanodes[number].wait_until(is_used, "ready")

    def _state(self) -> dict[str, Any]:
        """Return the NameNode's state; an empty dict while it is not operational."""
        beans = _beans(self._http_port, "Hadoop:service=NameNode,name=FSNamesystem*")
        state = {name: value for bean in beans for name, value in bean.items()}
        # The NameNode is in safe mode until all blocks have been reported.
        return state if state.get("FSState") == "Operational" else {}

    def _run(self, server: str, *arguments: str) -> Server:
        name = server.partition(".")[2]
        return Server(name, self._command(server, *arguments), self._folder / f"{name}.txt")

    def _command(self, server: str, *arguments: str) -> list[str]:
        return self._java(f"{_SERVER}.{server}", *arguments)

    def _java(self, *arguments: str) -> list[str]:
        return java_command(self.conf_dir, self._jars, *arguments)


def java_command(conf_dir: Path, jars: Sequence[str], *arguments: str) -> list[str]:
    """Return a command that runs Hadoop's Java with a configuration."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java") or "java"
    return [java, *_JAVA, "-cp", os.pathsep.join([str(conf_dir), *jars]), *arguments]


def _beans(port: int, name: str) -> list[dict[str, Any]]:
    """Return a server's JMX beans of a name; an empty list if it does not answer."""
    url = f"http://127.0.0.1:{port}/jmx?qry={name}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["beans"]
    except (OSError, ValueError):
        return []


def write_settings(path: Path, settings: Mapping[str, str]) -> None:
    """Write a Hadoop configuration file."""
    properties = "".join(
        f"<property><name>{escape(name)}</name><value>{escape(value)}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{properties}</configuration>\n")
